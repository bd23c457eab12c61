"""Mode `native`: Turso's own change table, `turso_cdc` unless the application names another.

=============  =============================================================================
change_id      consecutive numbers from 1 on
change_time    seconds since 1970
change_txn_id  number of the transaction's first change; only in the newer form of the table
change_type    1 insert, 0 update, -1 delete; 2 a commit, only in the newer form
table_name     the table, `sqlite_schema` for definitions
before, after  the row as a record (`values`), null if the connection does not capture it
=============  =============================================================================

Its numbers start again at 1 after every row was deleted, so a position is recognized by number and
time of its row. That row, and all after it, must not be deleted; older ones may. Only one
connection writes at a time, so the changes of a transaction are consecutive, and a session sees
complete transactions only. The older form of the table does not say where transactions end: there
each change is a transaction of its own.
"""

# ruff: noqa: S608 - names in statements are quoted, values are parameters

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import orjson

from deltaforge_dagster.errors import (
    CorruptLog,
    PositionLost,
    SourceMisconfigured,
    UnsupportedEvent,
)
from deltaforge_dagster.sources.base import ParkedEvent, SourceNotes
from deltaforge_dagster.sources.turso.changes import Part, Step, TursoChange, mean_bytes
from deltaforge_dagster.sources.turso.connection import (
    Row,
    TursoSession,
    Value,
    identifier,
)
from deltaforge_dagster.sources.turso.position import TursoPosition
from deltaforge_dagster.sources.turso.schema import (
    DB,
    SCHEMA_TABLE,
    Definition,
    TursoTableChange,
    backward,
    definition,
    known,
    statements,
    table_change,
)
from deltaforge_dagster.sources.turso.values import decode_record, image, json_value, key_of
from deltaforge_dagster.tables import TableSchema

MODE = "native"

_NEEDED_COLUMNS = {"change_id", "change_time", "change_type", "table_name", "before", "after"}
_OPS = {1: "c", 0: "u", -1: "d"}
_COMMIT = 2
_MANY_CHANGES = 10_000  # so many new changes are worth a run, whatever tables they are of
_DDL = TableSchema(DB, None, "_ddl", (), ())


@dataclass(frozen=True, slots=True)
class NativeLog:
    """The change table of a database.

    Attributes:
        where: The database, for error messages.
        name: Name of the change table.
        captures: Returns whether a table is captured.
        shows_ddl: Whether changes of tables become DDL events.
    """

    where: str
    name: str
    captures: Callable[[str], bool]
    shows_ddl: bool = False

    def exists(self, session: TursoSession) -> bool:
        """Return whether the change table exists."""
        return self.name in statements(session)

    def newest(self, session: TursoSession) -> TursoPosition:
        """Return the position of the newest change.

        Raises:
            SourceMisconfigured: The change table does not exist, or lacks columns.
        """
        self._columns(session)
        rows = session.query(
            f"SELECT change_id, change_time FROM {identifier(self.name)}"
            " ORDER BY change_id DESC LIMIT 1"
        )
        return TursoPosition(MODE) if not rows else _position(rows[0])

    def change_bytes(self, session: TursoSession) -> float:
        """Return the mean bytes of a change in the change table, as far as the newest ones say."""
        return mean_bytes(session, self.name, "change_id", "before", "after")

    def start(self, session: TursoSession) -> TursoPosition:
        """Return the position of the newest change; older ones in the table may be of any age."""
        return self.newest(session)

    def check(self, session: TursoSession, position: TursoPosition) -> None:
        """Check that a position's row and all rows after it exist; raise `PositionLost` if not."""
        self._columns(session)
        self._following(self._rows(session, position, None, 1), position)

    def has_changes(self, session: TursoSession, after: TursoPosition) -> bool:
        """Return whether a captured table has changes after a position.

        Also true if there are many changes.
        """
        self.check(session, after)
        rows = session.query(
            f"SELECT table_name FROM {identifier(self.name)} WHERE change_id > ?"
            " ORDER BY change_id LIMIT ?",
            (after.last_change_id or 0, _MANY_CHANGES),
        )
        names = {str(row[0]) for row in rows if row[0] is not None}
        return len(rows) == _MANY_CHANGES or any(map(self.captures, names))

    def definitions(self, session: TursoSession, at: TursoPosition) -> dict[str, str]:
        """Return the statements of captured tables at a position."""
        changes = [change for _, change in self._table_changes(session, at, None)]
        return self._captured(backward(statements(session), changes))

    def reading(self, start: TursoPosition, notes: SourceNotes) -> NativeReading:
        """Return a reading of the changes after a position."""
        return NativeReading(self, start, notes)

    def parked(self, data: bytes, create_table: str | None) -> TursoChange:
        """Decode a parked change.

        Args:
            data: `ParkedEvent.data`.
            create_table: The table's definition at that time, as given by the user; None to use the
                stored one.

        Raises:
            UnsupportedEvent: The change still cannot be decoded.
        """
        kept = orjson.loads(data)
        sql = create_table or kept["sql"]
        if sql is None:
            raise UnsupportedEvent(
                f"how table {kept['table']} was defined at change {kept['row'][0]} is not known:"
                " release it with --create-table"
            )
        row = [
            base64.b64decode(cell) if index > 4 and cell else cell
            for index, cell in enumerate(kept["row"])
        ]
        change = self._change(row, definition(sql))
        return replace(change, row=kept["index"])

    def _columns(self, session: TursoSession) -> tuple[str, ...]:
        sql = statements(session).get(self.name)
        if sql is None:
            raise SourceMisconfigured(
                f"{self.where}: there is no table {self.name}; the application's connections make"
                " it with PRAGMA unstable_capture_data_changes_conn('full'), or choose another"
                " source.config.cdc_mode"
            )
        columns = definition(sql).columns
        if not set(columns) >= _NEEDED_COLUMNS:
            raise SourceMisconfigured(
                f"{self.where}: table {self.name} is no change table of Turso"
            )
        return columns

    def _rows(
        self, session: TursoSession, after: TursoPosition, upto: int | None, limit: int
    ) -> list[Row]:
        """Return the row of a position, and at most `limit` rows after it."""
        columns = self._columns(session)
        transaction = "change_txn_id" if "change_txn_id" in columns else "NULL"
        end, bounds = ("", ()) if upto is None else (" AND change_id <= ?", (upto,))
        return session.query(
            f"SELECT change_id, change_time, {transaction}, change_type, table_name,"
            f' "before", "after" FROM {identifier(self.name)} WHERE change_id >= ?{end}'
            " ORDER BY change_id LIMIT ?",
            (after.last_change_id or 0, *bounds, limit + 1),
        )

    def _following(self, rows: list[Row], after: TursoPosition) -> list[Row]:
        """Check that rows follow a position without a gap; return them without the position's row.

        Raises:
            PositionLost: There is a gap, or the position's row does not exist or differs.
        """
        last = after.last_change_id or 0
        if last:
            is_there = rows and rows[0][0] == last
            if not is_there or after.change_time not in {None, rows[0][1]}:
                raise PositionLost(
                    f"{self.where}: change {last} of table {self.name}, the last one that was"
                    " read, is no longer there, or another one; what followed it is lost."
                    " Re-snapshot required."
                )
            rows = rows[1:]
        for number, row in enumerate(rows, last + 1):
            if row[0] != number:
                raise PositionLost(
                    f"{self.where}: change {number!s} of table {self.name} is not there, but later"
                    " ones are: it was deleted before it was read. Re-snapshot required."
                )
        return rows

    def _table_changes(
        self, session: TursoSession, after: TursoPosition, upto: int | None
    ) -> Iterator[tuple[TursoPosition, TursoTableChange]]:
        """Yield the changes of table definitions after a position, each with its position."""
        end, bounds = ("", ()) if upto is None else (" AND change_id <= ?", (upto,))
        rows = session.query(
            f'SELECT change_id, change_time, change_type, "before", "after" FROM'
            f" {identifier(self.name)} WHERE table_name = ? AND change_id > ?{end}"
            " ORDER BY change_id",
            (SCHEMA_TABLE, after.last_change_id or 0, *bounds),
        )
        for row in rows:
            change = table_change(_integer(row[2]), _blob(row[3]), _blob(row[4]))
            if change is not None:
                yield _position(row), change

    def _captured(self, tables: dict[str, str]) -> dict[str, str]:
        return {name: sql for name, sql in tables.items() if self.captures(name)}

    def _change(self, row: Row, table: Definition) -> TursoChange:
        """Decode a change of a row with the table's definition.

        Raises:
            UnsupportedEvent: The change does not match the definition, or lacks a needed record.
        """
        number, time, transaction, kind, name, before, after = row
        op = _OPS[_integer(kind)]
        old_row = self._image(before, table)
        new_row = self._image(after, table)
        if (op != "d" and new_row is None) or (op == "d" and old_row is None):
            raise UnsupportedEvent(
                f"change {number!s} of table {name!s}: the connection captures no row; it must"
                " capture `full` (or `after`, where nothing is deleted)"
            )
        key = key_of(
            new_row if new_row is not None and op != "d" else old_row or {}, table.table.primary_key
        )
        return TursoChange(
            table=table.table,
            op=op,
            ts_us=_integer(time) * 1_000_000,
            number=_integer(number),
            before=None if old_row is None or op == "c" else image(old_row),
            after=None if new_row is None or op == "d" else image(new_row),
            key=None if key is None else image(key),
            tx_id=None if transaction is None else str(transaction),
        )

    @staticmethod
    def _image(record: Value, table: Definition) -> dict[str, Value] | None:
        data = _blob(record)
        if data is None:
            return None
        values = decode_record(data)
        if table.computed or len(values) != len(table.columns):
            raise UnsupportedEvent(
                f"a row of table {table.name} has {len(values)} values, and its definition"
                f" {len(table.columns)} columns" + (" beside computed ones" * table.computed)
            )
        return {name: json_value(value) for name, value in table.row(values).items()}


@dataclass(slots=True)
class _OpenTransaction:
    """The changes of an open transaction that were read so far."""

    changes: list[TursoChange] = field(default_factory=list)
    parked: list[ParkedEvent] = field(default_factory=list)

    def behind(self, part: Part) -> Part:
        """Return a part with these changes appended."""
        parked = (*part.parked, *self.parked)
        return replace(part, changes=[*part.changes, *self.changes], parked=parked)


@dataclass(slots=True)
class NativeReading:
    """A reading of the change table, in windows that end where the table ended when they began.

    The definitions of tables at a window's beginning are determined before the window is read
    (`schema.known`).
    """

    log: NativeLog
    at: TursoPosition
    notes: SourceNotes
    _window_end: int = 0
    _tables: dict[str, str] | None = None
    _uncertain: frozenset[str] = frozenset()
    _catalog: dict[str, str] = field(default_factory=dict)
    _transaction: Value = None
    _index: int = 0
    _last: TursoChange | None = None

    def step(self, session: TursoSession, limit: int) -> Step:
        """Read the next changes; see `changes.Reading`."""
        if self._window_end <= (self.at.last_change_id or 0):
            self._begin(session)
        # A reading and its log are one unit.
        rows = self.log._rows(session, self.at, self._window_end, limit)  # noqa: SLF001
        rows = self.log._following(rows, self.at)  # noqa: SLF001
        read_bytes = sum(
            len(value) for row in rows for value in row[5:] if isinstance(value, bytes)
        )
        return Step(self._parts(rows), len(rows) >= limit, read_bytes)

    def _begin(self, session: TursoSession) -> None:
        """Begin a window that ends at the change table's current end."""
        log = self.log
        self._window_end = log.newest(session).last_change_id or 0
        self._catalog = log._captured(statements(session))  # noqa: SLF001
        noted = self.notes.defined(self.at) if self._tables is None else self._tables
        changes = [
            ddl
            for _, ddl in log._table_changes(session, self.at, self._window_end)  # noqa: SLF001
        ]
        changes = [change for change in changes if self._touches(change)]
        definitions = known(noted, changes, self._catalog)
        self._tables, self._uncertain = definitions.tables, definitions.doubtful

    def _touches(self, change: TursoTableChange) -> bool:
        names = [table[0] for table in (change.before, change.after) if table is not None]
        return any(map(self.log.captures, names))

    def _parts(self, rows: list[Row]) -> list[Part]:
        start = self.at
        complete, transaction, ended = Part([], None, start), _OpenTransaction(), None
        for row in rows:
            # NULL: the older form of the table, where each change is a transaction of its own.
            if row[2] is None or row[2] != self._transaction:
                self._end_transaction(transaction)
                complete, transaction, ended = (
                    transaction.behind(complete),
                    _OpenTransaction(),
                    self.at,
                )
                self._transaction, self._index = row[2], 0
            self._add_row(row, transaction)
            self.at = _position(row)
        if (self.at.last_change_id or 0) >= self._window_end:
            # The session in which the window began saw complete transactions only.
            self._end_transaction(transaction)
            complete, transaction, ended = transaction.behind(complete), _OpenTransaction(), self.at
            self._end_window()
        parts = []
        if ended is not None and (ended != start or complete.changes or complete.parked):
            parts.append(replace(complete, end=ended, reached=ended))
        rest = transaction.behind(Part([], None, self.at))
        return [*parts, rest] if rest.changes or rest.parked else parts

    def _end_transaction(self, transaction: _OpenTransaction) -> None:
        """Mark the last change of a transaction that was read completely with `tx_end`."""
        if self._last is not None:
            transaction.changes.append(replace(self._last, tx_end=True))
            self._last = None

    def _end_window(self) -> None:
        """Continue with the catalog's definitions; store those the change table did not record."""
        tables = self._tables or {}
        different = {
            name: self._catalog.get(name)
            for name in {*tables, *self._catalog}
            if tables.get(name) != self._catalog.get(name)
        }
        if different:
            self.notes.define(different, self.at)
        self._tables, self._uncertain = dict(self._catalog), frozenset()

    def _add_row(self, row: Row, transaction: _OpenTransaction) -> None:
        kind, name = _integer(row[3]), row[4]
        if kind == _COMMIT:
            return
        if kind not in _OPS or name is None:
            raise UnsupportedEvent(
                f"{self.log.where}: change {row[0]!s} of table {self.log.name} is of the unknown"
                f" type {kind}"
            )
        if name == SCHEMA_TABLE:
            change = self._define(row)
        elif not self.log.captures(str(name)):
            return
        else:
            change = self._decode(row, str(name), transaction.parked)
        if change is not None:
            if self._last is not None:
                transaction.changes.append(self._last)
            self._last = replace(change, row=self._index, tx_end=False)
            self._index += 1

    def _define(self, row: Row) -> TursoChange | None:
        change = table_change(_integer(row[3]), _blob(row[5]), _blob(row[6]))
        if change is None or not self._touches(change):
            return None
        assert self._tables is not None
        definitions: dict[str, str | None] = {}
        if change.before is not None:
            self._tables.pop(change.before[0], None)
            definitions[change.before[0]] = None
        if change.after is not None:
            self._tables[change.after[0]] = change.after[1]
            definitions[change.after[0]] = change.after[1]
        self.notes.define(definitions, _position(row))
        if not self.log.shows_ddl:
            return None
        return TursoChange(
            table=_DDL,
            op="ddl",
            ts_us=_integer(row[1]) * 1_000_000,
            number=_integer(row[0]),
            before=None,
            after=None,
            key=None,
            tx_id=None if row[2] is None else str(row[2]),
            ddl=orjson.dumps({"sql": change.sql, "database": DB}).decode(),
        )

    def _decode(self, row: Row, name: str, parked: list[ParkedEvent]) -> TursoChange | None:
        """Decode a change; None if it is parked instead.

        If its table is on hold, or its definition is uncertain, the change is added to `parked`.
        """
        assert self._tables is not None
        full_name, sql = f"{DB}.{name!s}", self._tables.get(name)
        reason = self.notes.holds().get(full_name)
        if reason is None and (sql is None or name in self._uncertain):
            sql = None
            reason = (
                f"{self.log.where}: table {name!s} was renamed or altered, near change {row[0]!s},"
                " in a way that the change table does not have (a RENAME, or a connection that"
                " does not capture): which columns its rows have is not certain; release it with"
                " --create-table"
            )
        if reason is None:
            try:
                return self.log._change(row, definition(str(sql)))  # noqa: SLF001
            except (UnsupportedEvent, CorruptLog) as error:
                reason = f"{self.log.where}: change {row[0]!s}: {error}"
        kept = [
            base64.b64encode(value).decode() if isinstance(value, bytes) else value for value in row
        ]
        data = orjson.dumps({"table": full_name, "row": kept, "index": self._index, "sql": sql})
        parked.append(ParkedEvent(full_name, reason, data))
        self._index += 1
        return None


def _position(row: Row) -> TursoPosition:
    return TursoPosition(MODE, _integer(row[0]), change_time=_integer(row[1]))


def _integer(value: Value) -> int:
    if not isinstance(value, int):
        raise CorruptLog("a change table with something else than a number where one belongs")
    return value


def _blob(value: Value) -> bytes | None:
    if value is not None and not isinstance(value, bytes):
        raise CorruptLog("a change table with something else than a record where one belongs")
    return value
