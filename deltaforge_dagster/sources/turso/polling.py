"""Mode `polling`: finds new rows by rowid. It sees inserts, but neither updates nor deletes.

A row is new if its rowid is larger than every one seen before. So applications must not insert
smaller rowids explicitly, and the rowid of a deleted last row must not be reused (AUTOINCREMENT
prevents that). The event has the row's values at the time of reading.
"""

# ruff: noqa: S608 - names in statements are quoted, values are parameters

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import orjson

from deltaforge_dagster.errors import SourceMisconfigured
from deltaforge_dagster.sources.base import ParkedEvent, SourceNotes
from deltaforge_dagster.sources.turso.changes import Part, Step, TursoChange
from deltaforge_dagster.sources.turso.connection import (
    Row,
    TursoSession,
    Value,
    identifier,
)
from deltaforge_dagster.sources.turso.position import TursoPosition
from deltaforge_dagster.sources.turso.schema import Definition, definition, statements
from deltaforge_dagster.sources.turso.values import image, json_value, key_of

MODE = "polling"

ROWID_NAMES = frozenset({"_rowid_", "rowid", "oid"})
_LOWEST = -(1 << 63)


@dataclass(frozen=True, slots=True)
class PollingLog:
    """The new rows of a database's tables.

    Attributes:
        where: The database, for error messages.
        captures: Returns whether a table is captured.
        column: `tracking_column` of the pipeline file.
    """

    where: str
    captures: Callable[[str], bool]
    column: str

    def newest(self, session: TursoSession) -> TursoPosition:
        """Return a position with the largest rowid of each table."""
        rowids = {}
        for table in self._tables(session):
            column = self.tracked(table)
            rows = session.query(
                f"SELECT {column} FROM {identifier(table.name)} ORDER BY {column} DESC LIMIT 1"
            )
            if rows:
                rowids[table.name] = _rowid(rows[0])
        return _position(rowids)

    def start(self, session: TursoSession) -> TursoPosition:
        """Return a position with each table's largest rowid: existing rows are not captured."""
        return self.newest(session)

    def check(self, session: TursoSession, position: TursoPosition) -> None:
        """Check that every table has a rowid; whether rows are missing cannot be verified."""
        del position
        for table in self._tables(session):
            self.tracked(table)

    def has_changes(self, session: TursoSession, after: TursoPosition) -> bool:
        """Return whether any captured table has new rows."""
        seen = dict(after.table_positions)
        return any(self._rows(session, table, seen, 1) for table in self._tables(session))

    def reading(self, start: TursoPosition, notes: SourceNotes) -> PollingReading:
        """Return a reading of the rows after a position."""
        return PollingReading(self, start, notes)

    def tracked(self, table: Definition) -> str:
        """Return the quoted name of a table's rowid.

        Raises:
            SourceMisconfigured: The table has no rowid, or `tracking_column` is not its rowid.
        """
        if not table.has_rowid:
            raise SourceMisconfigured(
                f"{self.where}: table {table.name} is WITHOUT ROWID, and has no order that polling"
                " could follow; leave it out of source.config.tables, or use triggers"
            )
        names = ROWID_NAMES - {name.lower() for name in table.columns}
        if self.column == table.rowid or self.column.lower() in names:
            return identifier(self.column)
        raise SourceMisconfigured(
            f"{self.where}: source.config.tracking_column: {self.column} is not the rowid of table"
            f" {table.name}; only that is known to grow (_rowid_, or its INTEGER PRIMARY KEY)"
        )

    def _tables(self, session: TursoSession) -> Iterator[Definition]:
        for name, sql in statements(session).items():
            if self.captures(name):
                yield definition(sql)

    def _rows(
        self, session: TursoSession, table: Definition, seen: dict[str, int], limit: int
    ) -> list[Row]:
        column = self.tracked(table)
        after = seen.get(table.name)
        begin, bounds = (">=", _LOWEST) if after is None else (">", after)
        return session.query(
            f"SELECT {column}, {table.selected()} FROM {identifier(table.name)}"
            f" WHERE {column} {begin} ? ORDER BY {column} LIMIT ?",
            (bounds, limit),
        )


@dataclass(slots=True)
class PollingReading:
    """A reading of new rows, table after table."""

    log: PollingLog
    at: TursoPosition
    notes: SourceNotes

    def step(self, session: TursoSession, limit: int) -> Step:
        """Read the next rows of each table; see `changes.Reading`."""
        now_us = time.time_ns() // 1000
        at, parts, more = self.at, [], False
        seen = dict(at.table_positions)
        for table in self.log._tables(session):  # noqa: SLF001 - the two are one
            rows = self.log._rows(session, table, seen, limit)  # noqa: SLF001
            more = more or len(rows) >= limit
            if rows:
                seen[table.name] = _rowid(rows[-1])
                at = _position(seen)
                changes = [_change(table, row, now_us) for row in rows]
                reason = self.notes.holds().get(table.table.full_name)
                if reason is None:
                    parts.append(Part(changes, at, at))
                else:
                    parked = tuple(_parked(table, change, reason) for change in changes)
                    parts.append(Part([], at, at, parked))
        self.at = at
        return Step(parts, more)


def _change(table: Definition, row: Row, now_us: int) -> TursoChange:
    values = {name: json_value(value) for name, value in table.row(list(row[1:])).items()}
    key = key_of(values, table.table.primary_key)
    return TursoChange(
        table=table.table,
        op="c",
        ts_us=now_us,
        number=_rowid(row),
        before=None,
        after=image(values),
        key=None if key is None else image(key),
        by_table=True,
    )


def _parked(table: Definition, change: TursoChange, reason: str) -> ParkedEvent:
    kept = {"sql": table.sql, "ts_us": change.ts_us, "number": change.number}
    data = orjson.dumps({**kept, "after": change.after, "key": change.key})
    return ParkedEvent(table.table.full_name, reason, data)


def parked(data: bytes) -> TursoChange:
    """Decode a parked change from `ParkedEvent.data`."""
    kept = orjson.loads(data)
    return TursoChange(
        table=definition(kept["sql"]).table,
        op="c",
        ts_us=kept["ts_us"],
        number=kept["number"],
        before=None,
        after=kept["after"],
        key=kept["key"],
        by_table=True,
    )


def _position(seen: dict[str, int]) -> TursoPosition:
    return TursoPosition(MODE, None, tuple(sorted(seen.items())))


def _rowid(row: Row) -> int:
    value: Value = row[0]
    assert isinstance(value, int)
    return value
