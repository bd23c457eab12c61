"""Mode `triggers`: the change table `_df_cdc_changes`, which AFTER triggers fill.

================  ===========================================================================
id                AUTOINCREMENT: consecutive, never used again
table_name        the table
operation         INSERT, UPDATE or DELETE
row_data          the new row, a JSON object
old_data          the old row
created_at        milliseconds since 1970
================  ===========================================================================

Tables and triggers that the original DeltaForge created work as well; ours differ in the format of
values. A BLOB, for which `json_object` would make the application's statement fail, is
`{"_df_hex":"..."}`. A REAL has all of its digits; a very large or small one is
`{"_df_real":[m,e]}`, which means m times 2 to the power of e (`_real`).

Changes that every sink has are deleted. The table does not say where transactions end, so each
change is a transaction of its own.

Dropping a table drops its triggers, and nothing is logged until they are created again. So
`_df_cdc_tables` has a row for each table for which we created triggers, with a new `identity` each
time that a trigger was missing (`IdentifyingSource.logged_tables`).
"""

# ruff: noqa: S608 - names in statements are quoted, values are parameters

from __future__ import annotations

import base64
import math
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import orjson

from deltaforge_dagster.errors import (
    PositionLost,
    SourceMisconfigured,
    UnsupportedEvent,
)
from deltaforge_dagster.sources.base import ParkedEvent, SourceNotes
from deltaforge_dagster.sources.turso.changes import Part, Step, TursoChange, mean_bytes
from deltaforge_dagster.sources.turso.connection import (
    Row,
    TursoSession,
    identifier,
    literal,
)
from deltaforge_dagster.sources.turso.position import TursoPosition
from deltaforge_dagster.sources.turso.schema import (
    DB,
    Definition,
    definition,
    statements,
)
from deltaforge_dagster.sources.turso.values import image, key_of
from deltaforge_dagster.tables import Column, LoggedTable, TableSchema

MODE = "triggers"

TABLE = "_df_cdc_changes"

_OPS = {"INSERT": "c", "UPDATE": "u", "DELETE": "d"}
_EVENT = re.compile(r"\b(INSERT|UPDATE|DELETE)(?:\s+OF\s+[^;]*?)?\s+ON\b", re.IGNORECASE)
"""The event of a trigger (SQLite's manual: "CREATE TRIGGER")."""

_MANY_CHANGES = 10_000  # so many new changes are worth a run, whatever tables they are of
_HEX = "_df_hex"
_REAL = "_df_real"
_BITS = 62  # exponent of the largest power of two that is an INTEGER
_CREATE_CHANGES = f"""CREATE TABLE {TABLE} (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  table_name TEXT NOT NULL,
  operation TEXT NOT NULL,
  row_data TEXT,
  old_data TEXT,
  created_at INTEGER NOT NULL
)"""
_MARKS = "_df_cdc_tables"
_CREATE_MARKS = f"""CREATE TABLE {_MARKS} (
  table_name TEXT PRIMARY KEY,
  identity TEXT NOT NULL,
  was_empty INTEGER NOT NULL
)"""
_TABLES = {TABLE: _CREATE_CHANGES, _MARKS: _CREATE_MARKS}
"""The tables that `make` creates, by name."""

# The time in milliseconds, computed without REAL numbers, for every version of SQLite.
_NOW_MILLIS = "CAST(strftime('%s', 'now') || substr(strftime('%f', 'now'), 4) AS INTEGER)"


def trigger_statements(table: Definition) -> dict[str, str]:
    """Return the CREATE TRIGGER statements for a table, by the trigger's name."""
    images = {"NEW": _image("NEW", table), "OLD": _image("OLD", table)}
    rows = {"INSERT": ("NEW", None), "UPDATE": ("NEW", "OLD"), "DELETE": (None, "OLD")}
    triggers = {}
    for operation, (new, old) in rows.items():
        name = f"_df_cdc_{operation.lower()}_{table.name}"
        values = (
            literal(table.name),
            literal(operation),
            images[new] if new else "NULL",
            images[old] if old else "NULL",
            _NOW_MILLIS,
        )
        triggers[name] = (
            f"CREATE TRIGGER {identifier(name)} AFTER {operation} ON {identifier(table.name)} BEGIN"
            f" INSERT INTO {TABLE} (table_name, operation, row_data, old_data, created_at)"
            f" VALUES ({', '.join(values)}); END"
        )
    return triggers


def _image(which: str, table: Definition) -> str:
    """Return an SQL expression that converts the row `which` (NEW or OLD) to JSON."""
    members = []
    for name in table.columns:
        value = f"{which}.{identifier(name)}"
        label = orjson.dumps(name).decode() + ":"
        members.append(
            f"{literal(label)} || CASE typeof({value})"
            f" WHEN 'blob' THEN '{{\"{_HEX}\":\"' || hex({value}) || '\"}}'"
            f" WHEN 'real' THEN {_real(value)}"
            f" WHEN 'null' THEN 'null' ELSE json_quote({value}) END"
        )
    return "'{' || " + " || ',' || ".join(members) + " || '}'"


def _real(value: str) -> str:
    """Return an SQL expression that converts a REAL to JSON without losing a bit.

    SQLite's `printf` is not exact for all numbers. Measured with random numbers: with SQLite
    3.40.1, 17 digits were wrong for 0.03 % of numbers above 1e100 and 1 % of those above 1e200, 20
    digits never; with SQLite 3.51.1 and Turso's engine, both 17 and 20 digits were wrong for a
    third of those above 1e100, half of those above 1e220, and a sixth of those below 1e-80. So very
    large and small numbers are scaled towards 1 by a power of two, which is exact (unlike by a
    literal such as 1e150), and written with 20 digits, which were always exact there.
    """

    def scaled(operator: str, steps: int) -> str:
        brought = f"{value}{f'{operator}(1<<{_BITS})' * steps}"
        power = _BITS * steps if operator == "/" else -_BITS * steps
        return f"'{{\"{_REAL}\":[' || printf('%!.20g', {brought}) || ',{power}]}}'"

    size = f"abs({value})"
    return (
        f"CASE WHEN {size} BETWEEN 1e-70 AND 1e90 OR {value} = 0 THEN printf('%!.20g', {value})"
        f" WHEN {size} > 1.7976931348623157e308"
        f" THEN CASE WHEN {value} > 0 THEN '\"Infinity\"' ELSE '\"-Infinity\"' END"
        f" WHEN {size} > 1e240 THEN {scaled('/', 16)} WHEN {size} > 1 THEN {scaled('/', 8)}"
        f" WHEN {size} < 1e-215 THEN {scaled('*', 16)} ELSE {scaled('*', 8)} END"
    )


def make(session: TursoSession, tables: dict[str, Definition]) -> bool:
    """Create the change table and the triggers, and recreate triggers that are outdated.

    Returns:
        Whether anything was created.
    """
    existing = {
        str(name): str(sql)
        for name, sql in session.query(
            "SELECT name, sql FROM sqlite_schema WHERE type IN ('table', 'trigger')"
        )
    }
    wanted = [sql for name, sql in _TABLES.items() if name not in existing]
    unmarked: list[str] = []
    for table in tables.values():
        triggers = trigger_statements(table)
        for name, sql in triggers.items():
            if existing.get(name) != sql:
                wanted += [f"DROP TRIGGER {identifier(name)}"] * (name in existing) + [sql]
        if _MARKS not in existing or not triggers.keys() <= existing.keys():
            unmarked.append(table.name)
    for statement in wanted:
        session.query(statement)
    for name in unmarked:
        is_empty = not session.query(f"SELECT 1 FROM {identifier(name)} LIMIT 1")
        session.query(f"DELETE FROM {_MARKS} WHERE table_name = ?", (name,))
        session.query(
            f"INSERT INTO {_MARKS} VALUES (?, ?, ?)", (name, secrets.token_hex(8), int(is_empty))
        )
    return bool(wanted)


def logged_tables(session: TursoSession, tables: dict[str, Definition]) -> dict[str, LoggedTable]:
    """Return those of some tables whose changes are logged, by full name.

    Nobody knows since when triggers exist that we did not create, so all tables with such triggers
    have the same identity.
    """
    logged = triggered(session)
    marks: dict[str, LoggedTable] = {}
    if _MARKS in statements(session):
        for name, identity, was_empty in session.query(f"SELECT * FROM {_MARKS}"):
            marks[str(name)] = LoggedTable(str(identity), bool(was_empty), bool(was_empty))
    unknown = LoggedTable("", whole=False, empty=False)
    return {
        table.table.full_name: marks.get(table.name, unknown)
        for table in tables.values()
        if table.name in logged
    }


def made(session: TursoSession) -> dict[str, str]:
    """Return the DROP statements by name for the change table and the triggers that fill it.

    Empty without them.
    """
    rows = session.query("SELECT type, name, sql FROM sqlite_schema WHERE sql IS NOT NULL")
    triggers = [
        str(name) for kind, name, sql in rows if kind == "trigger" and f"INTO {TABLE} " in str(sql)
    ]
    drops = {name: f"DROP TRIGGER {identifier(name)}" for name in sorted(triggers)}
    definitions = {sql for _, _, sql in rows}
    for name, sql in _TABLES.items():
        if sql in definitions:
            drops[name] = f"DROP TABLE {name}"
    return drops


def is_complete(session: TursoSession, tables: dict[str, Definition]) -> bool:
    """Return whether change table and triggers are as `make` would create them."""
    existing = {
        str(row[0]) for row in session.query("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL")
    }
    return existing.issuperset(_TABLES.values()) and all(
        sql in existing for table in tables.values() for sql in trigger_statements(table).values()
    )


def triggered(session: TursoSession) -> set[str]:
    """Return the tables that have triggers for inserts, updates and deletes.

    Only triggers that write to the change table count.
    """
    rows = session.query("SELECT tbl_name, sql FROM sqlite_schema WHERE type = 'trigger'")
    events_by_table: dict[str, set[str]] = {}
    for table, sql in rows:
        event = _EVENT.search(str(sql))
        if TABLE in str(sql) and event is not None:
            events_by_table.setdefault(str(table), set()).add(event[1].upper())
    return {table for table, events in events_by_table.items() if events == _OPS.keys()}


def outdated(session: TursoSession, tables: dict[str, Definition]) -> set[str]:
    """Return the tables whose triggers we created and `make` would recreate.

    An earlier version created them, or the table was altered since.
    """
    rows = session.query("SELECT name, sql FROM sqlite_schema WHERE type = 'trigger'")
    existing = {str(name): str(sql) for name, sql in rows if _HEX in str(sql)}
    return {
        table.name
        for table in tables.values()
        for name, sql in trigger_statements(table).items()
        if existing.get(name, sql) != sql
    }


@dataclass(frozen=True, slots=True)
class TriggerLog:
    """The change table of a database.

    Attributes:
        where: The database, for error messages.
        captures: Returns whether a table is captured.
    """

    where: str
    captures: Callable[[str], bool]

    def exists(self, session: TursoSession) -> bool:
        """Return whether the change table exists."""
        return TABLE in statements(session)

    def newest(self, session: TursoSession) -> TursoPosition:
        """Return the position of the newest change that was ever written, even if it was deleted.

        Raises:
            SourceMisconfigured: The change table does not exist, or is not AUTOINCREMENT, so that
                numbers may be reused.
        """
        sql = statements(session).get(TABLE)
        if sql is None:
            raise SourceMisconfigured(
                f"{self.where}: there is no table {TABLE}; set source.config.auto_create_triggers,"
                " or choose another cdc_mode"
            )
        if "AUTOINCREMENT" not in sql.upper():
            raise SourceMisconfigured(
                f"{self.where}: the id of table {TABLE} is not AUTOINCREMENT, so that numbers are"
                " used again, and changes would be passed over"
            )
        rows = session.query("SELECT seq FROM sqlite_sequence WHERE name = ?", (TABLE,))
        number = rows[0][0] if rows else None
        return TursoPosition(MODE, number if isinstance(number, int) and number else None)

    def change_bytes(self, session: TursoSession) -> float:
        """Return the mean bytes of a change in the change table, as far as the newest ones say."""
        return mean_bytes(session, TABLE, "id", "row_data", "old_data")

    def start(self, session: TursoSession) -> TursoPosition:
        """Return the position before the oldest change; if none exists, the newest position."""
        newest = self.newest(session)  # also checks the table
        ((oldest,),) = session.query(f"SELECT min(id) FROM {TABLE}")
        return TursoPosition(MODE, oldest - 1) if isinstance(oldest, int) else newest

    def check(self, session: TursoSession, position: TursoPosition) -> None:
        """Check that no change after a position was deleted; raise `PositionLost` if one was."""
        self._following(session, position, self._rows(session, position, 1))

    def has_changes(self, session: TursoSession, after: TursoPosition) -> bool:
        """Return whether a captured table has changes after a position.

        Also true if there are many changes.
        """
        self.check(session, after)
        rows = session.query(
            f"SELECT table_name FROM {TABLE} WHERE id > ? ORDER BY id LIMIT ?",
            (after.last_change_id or 0, _MANY_CHANGES),
        )
        return len(rows) == _MANY_CHANGES or any(map(self.captures, {str(row[0]) for row in rows}))

    def reading(self, start: TursoPosition, notes: SourceNotes) -> TriggerReading:
        """Return a reading of the changes after a position."""
        return TriggerReading(self, start, notes)

    def parked(self, data: bytes) -> TursoChange:
        """Decode a parked change from `ParkedEvent.data`."""
        kept = orjson.loads(data)
        return self._change(kept["row"], definition(kept["sql"]))

    def _rows(self, session: TursoSession, after: TursoPosition, limit: int) -> list[Row]:
        return session.query(
            f"SELECT id, table_name, operation, row_data, old_data, created_at FROM {TABLE}"
            " WHERE id > ? ORDER BY id LIMIT ?",
            (after.last_change_id or 0, limit),
        )

    def _following(self, session: TursoSession, after: TursoPosition, rows: list[Row]) -> list[Row]:
        """Check that rows follow a position without a gap, and return them.

        Raises:
            PositionLost: There is a gap, or the database is an older copy.
        """
        last = after.last_change_id or 0
        newest = self.newest(session).last_change_id or 0
        if newest < last or (newest > last and not rows):
            raise PositionLost(
                f"{self.where}: table {TABLE} has come to change {newest}, and holds nothing after"
                f" change {last}, up to which it was read: it was emptied, or an older copy of the"
                " database was restored. Re-snapshot required."
            )
        for number, row in enumerate(rows, last + 1):
            if row[0] != number:
                raise PositionLost(
                    f"{self.where}: change {number} of table {TABLE} is not there, but later ones"
                    " are: it was deleted before it was read, perhaps by another pipeline."
                    " Re-snapshot required."
                )
        return rows

    def _change(self, row: Row, table: Definition) -> TursoChange:
        """Decode a row of the change table.

        Raises:
            UnsupportedEvent: No trigger of ours writes such a row.
        """
        number, name, operation, new, old, created_at = row
        op = _OPS.get(str(operation).upper())
        new_row, old_row = (
            None if text is None else self._row(number, text) for text in (new, old)
        )
        if op is None or (new_row is None and op != "d") or (old_row is None and op == "d"):
            raise UnsupportedEvent(
                f"{self.where}: change {number!s} of table {TABLE}, of table {name!s}, is of an"
                " unknown kind"
            )
        shown = old_row if op == "d" else new_row
        assert shown is not None
        schema = _row_schema(table, shown)
        key = key_of(shown, schema.primary_key)
        assert isinstance(number, int)
        assert isinstance(created_at, int)
        return TursoChange(
            table=schema,
            op=op,
            ts_us=created_at * 1000,
            number=number,
            before=None if old_row is None or op == "c" else image(old_row),
            after=None if new_row is None or op == "d" else image(new_row),
            key=None if key is None else image(key),
        )

    def _row(self, number: Any, text: Any) -> dict[str, Any]:
        try:
            return {name: _decoded(value) for name, value in orjson.loads(text).items()}
        except (ValueError, TypeError, AttributeError, OverflowError):
            raise UnsupportedEvent(
                f"{self.where}: change {number} of table {TABLE} has no JSON object as its row"
            ) from None


@dataclass(slots=True)
class TriggerReading:
    """A reading of the change table."""

    log: TriggerLog
    at: TursoPosition
    notes: SourceNotes

    def step(self, session: TursoSession, limit: int) -> Step:
        """Read the next changes; see `changes.Reading`."""
        rows = self.log._rows(session, self.at, limit)  # noqa: SLF001 - the two are one
        self.log._following(session, self.at, rows)  # noqa: SLF001
        if not rows:
            return Step()
        current = statements(session)
        changes, parked = [], []
        for row in rows:
            name = str(row[1])
            if not self.log.captures(name):
                continue
            # The rows of a dropped table say which columns they have, but not what its key was.
            sql = current.get(name) or f"CREATE TABLE {identifier(name)} (_df_gone)"
            reason = self.notes.holds().get(f"{DB}.{name}")
            if reason is not None:
                data = orjson.dumps({"row": list(row), "sql": sql})
                parked.append(ParkedEvent(f"{DB}.{name}", reason, data))
                continue
            changes.append(self.log._change(row, definition(sql)))  # noqa: SLF001
        last = rows[-1][0]
        assert isinstance(last, int)
        self.at = TursoPosition(MODE, last)
        read_bytes = sum(len(text) for row in rows for text in row[3:5] if isinstance(text, str))
        return Step(
            [Part(changes, self.at, self.at, tuple(parked))], len(rows) >= limit, read_bytes
        )


def forget(session: TursoSession, position: TursoPosition) -> None:
    """Delete the changes up to a position from the change table."""
    session.query(f"DELETE FROM {TABLE} WHERE id <= ?", (position.last_change_id or 0,))


def _row_schema(table: Definition, row: dict[str, Any]) -> TableSchema:
    """Return a table with the columns of one of its rows: those when its trigger was created."""
    by_name = {column.name: column for column in table.table.columns}
    columns = tuple(
        replace(by_name[name], ordinal_position=number)
        if name in by_name
        else Column(name, "", None, True, number)
        for number, name in enumerate(row, 1)
    )
    key = table.table.primary_key if set(table.table.primary_key) <= set(row) else ()
    return TableSchema(DB, None, table.name, columns, key)


def _decoded(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value.keys() == {_HEX}:
        return {"_base64": base64.b64encode(bytes.fromhex(value[_HEX])).decode()}
    if value.keys() == {_REAL}:
        number, power = value[_REAL]
        return math.ldexp(number, power)
    return value
