"""Logical messages: what `pg_logical_emit_message` writes into the log (servers from 14 on).

A message is an insert into a schema that no table has, its prefix the table's name, its content the
row; the schema is that of outboxes (`sources.outbox`) where the pipeline file says so. One with
`transactional` true is part of its transaction, in its place among the changes, and
gone when that is rolled back. The others stand in the log by themselves: they come where their log
record stands between commits, before the changes of the transaction that wrote them, and also when
that is rolled back. Each is a transaction of its own here, which ends where its record ends: a position
between two records, at which the server takes up neither the message again nor a commit around it.

Content that is no JSON is left out, with a warning and a count: a message has no type that
could say what else it is.
"""

from __future__ import annotations

import logging

import numpy as np

from deltaforge_dagster.kernels.json_text import INVALID, JSON, MAX_DEPTH, OVERHEAD, write_scalar
from deltaforge_dagster.kernels.runtime import Bytes
from deltaforge_dagster.positions import format_lsn
from deltaforge_dagster.sources.postgres.decode.pgoutput import LogicalMessage

logger = logging.getLogger(__name__)

SCHEMA = "__wal_message"
"""`source.schema` of a message's event, unless it is of an outbox."""

MESSAGES_VERSION = 140000
"""Servers from here on send logical messages, if asked to."""

HEARTBEAT = "deltaforge_heartbeat"
"""Prefix of our own messages, which only move the position; never delivered."""

_FIRST_WARNINGS, _THEN_EVERY = 10, 1000


class MessageFilter:
    """Which logical messages of a stream become events.

    Attributes:
        skipped: Messages left out so far because their content is no JSON.
    """

    def __init__(self) -> None:
        self.skipped = 0
        self._out = np.empty(1 << 12, np.uint8)
        self._stack = np.empty(MAX_DEPTH, np.uint8)

    def takes(self, message: LogicalMessage, content: Bytes) -> bool:
        """Say whether the message is an event; content that is no JSON is warned of and counted."""
        if message.prefix == HEARTBEAT:
            return False
        if _is_json(content, self._room(content.size), self._stack):
            return True
        self.skipped += 1
        if self.skipped <= _FIRST_WARNINGS or self.skipped % _THEN_EVERY == 0:
            logger.warning(
                "left out the logical message with prefix %r at %s: its content is no JSON in UTF-8 "
                "(%d such messages since reading began)",
                message.prefix,
                format_lsn(message.lsn),
                self.skipped,
            )
        return False

    def _room(self, size: int) -> Bytes:
        if size + OVERHEAD <= self._out.size:
            return self._out
        return np.empty(size + OVERHEAD, np.uint8)


def _is_json(content: Bytes, out: Bytes, stack: Bytes) -> bool:
    """Say whether the text can be written as JSON; one that is only nested too deeply can."""
    try:
        content.tobytes().decode()
    except UnicodeDecodeError:
        return False
    return bool(write_scalar(JSON, content, 0, content.size, out, 0, stack) != INVALID)
