"""The definitions of tables at a position of the change table, which also records their changes.

Turso records changes of `sqlite_schema`: CREATE, DROP, ADD COLUMN and DROP COLUMN of the
connections that capture, but not RENAME, and nothing that other connections do. So these records
are verified: the stored definitions (`SourceNotes`), with the recorded changes applied up to the
position at which the catalog was read, must be equal to the catalog. If they are not, it is not
known which columns the table's rows in between have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from deltaforge_dagster.errors import UnsupportedEvent
from deltaforge_dagster.sources.turso.decode.records import decode_record

SCHEMA_TABLE = "sqlite_schema"
"""The name of the schema table in the change table."""

_TYPE, _NAME, _SQL = 0, 1, 4

Statements = Mapping[str, str]
"""`CREATE TABLE` statements by table."""


@dataclass(frozen=True, slots=True)
class TursoTableChange:
    """A change of a table's definition: it was created, altered or dropped.

    Attributes:
        before, after: Name and statement before and after; None if there was, or is, no table.
    """

    before: tuple[str, str] | None
    after: tuple[str, str] | None

    @property
    def sql(self) -> str:
        """The SQL statement for the DDL event."""
        if self.after is not None:
            return self.after[1]
        assert self.before is not None
        return f'DROP TABLE "{self.before[0]}"'


def table_change(kind: int, before: bytes | None, after: bytes | None) -> TursoTableChange | None:
    """Return the table change that a change of `sqlite_schema` means; None if it is of no table.

    Args:
        kind: 1 insert, 0 update, -1 delete.
        before: The record of the row before the change.
        after: The record of the row after it.

    Raises:
        UnsupportedEvent: The connection does not capture the needed record.
        CorruptLog: The bytes are not a record.
    """
    if (kind >= 0 and after is None) or (kind <= 0 and before is None):
        raise UnsupportedEvent(
            "a table was altered by a connection that captures less than `full` rows"
        )
    old = None if kind > 0 or before is None else _table(before)
    new = None if kind < 0 or after is None else _table(after)
    return None if old is None and new is None else TursoTableChange(old, new)


def _table(record: bytes) -> tuple[str, str] | None:
    values = decode_record(record)
    if len(values) <= _SQL or values[_TYPE] != "table" or values[_SQL] is None:
        return None
    return str(values[_NAME]), str(values[_SQL])


def forward(
    tables: Statements, changes: Iterable[TursoTableChange]
) -> tuple[dict[str, str], set[str]]:
    """Apply changes to definitions, in log order.

    Returns:
        The definitions after the changes, and the tables that differed from a change's `before`.
    """
    later, surprising = dict(tables), set()
    for change in changes:
        if change.before is not None:
            name, sql = change.before
            if later.pop(name, sql) != sql:
                surprising.add(name)
        if change.after is not None:
            later[change.after[0]] = change.after[1]
    return later, surprising


def backward(tables: Statements, changes: Iterable[TursoTableChange]) -> dict[str, str]:
    """Undo changes, given in log order; return the definitions before the first of them."""
    earlier = dict(tables)
    for change in reversed(list(changes)):
        if change.after is not None:
            earlier.pop(change.after[0], None)
        if change.before is not None:
            earlier[change.before[0]] = change.before[1]
    return earlier


@dataclass(frozen=True, slots=True)
class Known:
    """The definitions of tables at the beginning of a part of the log.

    Attributes:
        tables: Their statements.
        doubtful: Names of tables whose definitions are not certain in this part.
    """

    tables: dict[str, str]
    doubtful: frozenset[str]


def known(noted: Statements, changes: list[TursoTableChange], catalog: Statements) -> Known:
    """Return the definitions before a part of the log, and which of them are uncertain in it.

    A new table, without stored definition, gets the catalog's definition with the changes undone.

    Args:
        noted: The stored definitions at the beginning.
        changes: The changes of tables in the part.
        catalog: The definitions in the catalog at its end.
    """
    earlier = {**backward(catalog, changes), **noted}
    later, surprising = forward(earlier, changes)
    different = {name for name in {*later, *catalog} if later.get(name) != catalog.get(name)}
    return Known(earlier, frozenset(surprising | different))
