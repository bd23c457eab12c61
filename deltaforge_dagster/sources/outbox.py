"""Outboxes: what applications write beside their changes, in the same transaction, to be sent on.

A source gives every change of an outbox the schema `__outbox`, by which the `outbox` processor knows
it. In MySQL an outbox is a table, in PostgreSQL the prefix of logical messages.
"""

from __future__ import annotations

from collections.abc import Iterable

from deltaforge_dagster.config.globs import Globs, table_parts

SCHEMA = "__outbox"
"""`source.schema` of an event of an outbox."""


class MysqlOutboxTables:
    """The tables of MySQL that are outboxes.

    Args:
        patterns: Of tables, as in the pipeline file.
    """

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        self._patterns = [
            (Globs([database]), Globs([table])) for database, table in map(table_parts, patterns)
        ]

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def has(self, db: str, table: str) -> bool:
        """Say whether a table is one."""
        return any(first.match([db]) and second.match([table]) for first, second in self._patterns)


NO_OUTBOX = MysqlOutboxTables()
"""No table is an outbox."""
