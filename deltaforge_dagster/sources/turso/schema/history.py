"""How tables looked at a place in Turso's change table, which has changes of `sqlite_schema`, too.

It has CREATE, DROP, ADD COLUMN and DROP COLUMN of the connections that capture. It has no RENAME, and
nothing of what other connections do. So nothing is taken from the log alone: what is noted of tables
(`SourceNotes`), brought forward by the log to a place where the catalog was read as well, has to be what
the catalog says. Where it is not, nobody knows which rows of a table in between have which columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from deltaforge_dagster.errors import UnsupportedEvent
from deltaforge_dagster.sources.turso.decode.records import decode_record

SCHEMA_TABLE = "sqlite_schema"
"""What the change table calls the table of definitions."""

_TYPE, _NAME, _SQL = 0, 1, 4

Statements = Mapping[str, str]
"""`CREATE TABLE` statements by table."""


@dataclass(frozen=True, slots=True)
class TursoTableChange:
    """A table that was made, altered or dropped.

    Attributes:
        before, after: Name and statement, None where there is no table.
    """

    before: tuple[str, str] | None
    after: tuple[str, str] | None

    @property
    def sql(self) -> str:
        """What an event shows of it."""
        if self.after is not None:
            return self.after[1]
        assert self.before is not None
        return f'DROP TABLE "{self.before[0]}"'


def table_change(kind: int, before: bytes | None, after: bytes | None) -> TursoTableChange | None:
    """Return what a change of `sqlite_schema` means, None where it is of no table.

    Args:
        kind: 1 insert, 0 update, -1 delete.
        before: The row's record, as it was.
        after: As it is.

    Raises:
        UnsupportedEvent: The connection does not capture what is needed.
        CorruptLog: One is no record.
    """
    if (kind >= 0 and after is None) or (kind <= 0 and before is None):
        raise UnsupportedEvent(
            "a table was altered by a connection that captures less than `full` rows"
        )
    was = None if kind > 0 or before is None else _table(before)
    now = None if kind < 0 or after is None else _table(after)
    return None if was is None and now is None else TursoTableChange(was, now)


def _table(record: bytes) -> tuple[str, str] | None:
    values = decode_record(record)
    if len(values) <= _SQL or values[_TYPE] != "table" or values[_SQL] is None:
        return None
    return str(values[_NAME]), str(values[_SQL])


def forward(
    tables: Statements, changes: Iterable[TursoTableChange]
) -> tuple[dict[str, str], set[str]]:
    """Return what changes make of tables, and tables that were not what a change found."""
    now, surprising = dict(tables), set()
    for one in changes:
        if one.before is not None:
            name, sql = one.before
            if now.pop(name, sql) != sql:
                surprising.add(name)
        if one.after is not None:
            now[one.after[0]] = one.after[1]
    return now, surprising


def backward(tables: Statements, changes: Iterable[TursoTableChange]) -> dict[str, str]:
    """Return what tables were before changes, which are given in their order."""
    then = dict(tables)
    for one in reversed(list(changes)):
        if one.after is not None:
            then.pop(one.after[0], None)
        if one.before is not None:
            then[one.before[0]] = one.before[1]
    return then


@dataclass(frozen=True, slots=True)
class Known:
    """Tables at the beginning of a part of the log.

    Attributes:
        tables: Their statements there.
        doubtful: Of which it is not certain within this part.
    """

    tables: dict[str, str]
    doubtful: frozenset[str]


def known(noted: Statements, changes: list[TursoTableChange], catalog: Statements) -> Known:
    """Return how tables looked before changes, given what was noted of them and how they look after.

    A table of which nothing was noted, because it is new, is what the log makes of the catalog.
    """
    then = {**backward(catalog, changes), **noted}
    now, surprising = forward(then, changes)
    different = {name for name in {*now, *catalog} if now.get(name) != catalog.get(name)}
    return Known(then, frozenset(surprising | different))
