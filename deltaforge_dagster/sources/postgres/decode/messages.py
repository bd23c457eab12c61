"""Logical messages, which `pg_logical_emit_message` writes to the log (from PostgreSQL 14 on).

A message becomes an insert: its prefix is the table's name, its content is the row, and the schema
is a reserved one, or that of outboxes (`sources.outbox`) if the pipeline file says so. A
transactional message is part of its transaction, in order with the changes, and disappears if that
is rolled back. A non-transactional message is independent of the transaction that wrote it: it
comes at its log record's place between commits, before that transaction's changes, and also if that
is rolled back. Here it is a transaction of its own, which ends where the record ends: a server that
starts to send at that position repeats neither the message nor a commit before it.

Messages whose content is not JSON are skipped, with a warning and a count, because a message has no
content type.
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
"""`source.schema` of a message's event, unless the message belongs to an outbox."""

MESSAGES_VERSION = 140000
"""The first server version that sends logical messages, if requested."""

HEARTBEAT = "deltaforge_heartbeat"
"""Prefix of our heartbeat messages, which only move the position and are never delivered."""

_FIRST_WARNINGS, _THEN_EVERY = 10, 1000


class MessageFilter:
    """Decides which logical messages of a stream become events.

    Attributes:
        skipped: Number of messages skipped so far because their content is not JSON.
    """

    def __init__(self) -> None:
        self.skipped = 0
        self._out = np.empty(1 << 12, np.uint8)
        self._stack = np.empty(MAX_DEPTH, np.uint8)

    def takes(self, message: LogicalMessage, content: Bytes) -> bool:
        """Return whether the message becomes an event; count and log one that is not JSON."""
        if message.prefix == HEARTBEAT:
            return False
        if _is_json(content, self._room(content.size), self._stack):
            return True
        self.skipped += 1
        if self.skipped <= _FIRST_WARNINGS or self.skipped % _THEN_EVERY == 0:
            logger.warning(
                "left out the logical message with prefix %r at %s: "
                "its content is no JSON in UTF-8 "
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
    """Return whether content is JSON in UTF-8; a document nested too deeply counts as JSON."""
    try:
        content.tobytes().decode()
    except UnicodeDecodeError:
        return False
    return bool(write_scalar(JSON, content, 0, content.size, out, 0, stack) != INVALID)
