"""Receives librdkafka's own log, for debugging: the errors in it are raised elsewhere anyway."""

from __future__ import annotations

import logging
from typing import cast

logger = logging.getLogger(__name__)


class _Log:
    def log(self, level: int, text: str, *args: object) -> None:
        """Log a line at INFO or below, so that it does not appear on a terminal by default."""
        logger.log(min(level, logging.INFO), text, *args)


LOG = cast("logging.Logger", _Log())
"""The logger for clients of `confluent_kafka`."""
