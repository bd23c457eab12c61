"""Outboxes: messages to publish that applications write in the transactions of their changes.

A source gives every change of an outbox the schema `__outbox`, by which the `outbox` processor
recognizes it. In MySQL an outbox is a table; in PostgreSQL it is a prefix of logical messages.
"""

from __future__ import annotations

from collections.abc import Iterable

from deltaforge_dagster.config.globs import Globs, table_parts

SCHEMA = "__outbox"
"""`source.schema` of an event of an outbox."""


class MysqlOutboxTables:
    """The MySQL tables that are outboxes.

    Args:
        patterns: Table patterns, as in the pipeline file.
    """

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        self._patterns = [
            (Globs([database]), Globs([table])) for database, table in map(table_parts, patterns)
        ]

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def has(self, db: str, table: str) -> bool:
        """Return whether a table is an outbox."""
        return any(first.match([db]) and second.match([table]) for first, second in self._patterns)


NO_OUTBOX = MysqlOutboxTables()
"""No table is an outbox."""
