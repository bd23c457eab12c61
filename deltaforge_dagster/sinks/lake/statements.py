"""SQL that is the same in all formats: statements that apply a step of a commit, names, and types.

The statements read the staged rows from a view, `STAGED`. Each row has a *place*, `(df_position,
df_ordinal)`, and replaces or closes only a row with an earlier place. So applying a step again
changes nothing.

Types are written as Spark writes them: `bigint`, `decimal(10,2)`, `array<string>`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deltaforge_dagster.sources.value_types import ValueType

_SCALARS = {
    "boolean": "boolean",
    "text": "string",
    "json": "string",
    "binary": "binary",
    "geometry": "binary",
    "uuid": "string",
    "date": "date",
    "time": "string",
}
_INTEGERS = {8: "tinyint", 16: "smallint", 32: "int", 64: "bigint"}
_DIGITS = {"tinyint": 3, "smallint": 5, "int": 10, "bigint": 19}
"""Integer types from the narrowest to the widest, with the digits of their largest values."""
_EXACT = {"float": {"tinyint", "smallint"}, "double": {"tinyint", "smallint", "int", "float"}}
"""By floating-point type, the types whose values it represents exactly."""
_DECIMAL = re.compile(r"decimal\((\d+),(\d+)\)")
_LIKE_TEXT = {"boolean", "date", *_DIGITS}
"""Types whose text in Spark is the text that a column of type `text` would have."""

STAGED = "deltaforge_staged"
"""The view with the rows of a step."""

_CHANGELOG = {
    "df_op": "string",
    "df_event_time": "timestamp",
    "df_source_position": "string",
    "df_tx_id": "string",
    "df_event_id": "string",
    "df_schema_version": "string",
}
_PLACE_COLUMNS = {"df_position": "bigint", "df_ordinal": "bigint"}
_PENDING = {"df_op": "string", "df_absent": "array<string>", "df_event_time": "timestamp"}
_VALIDITY = {"df_valid_from": "timestamp", "df_valid_to": "timestamp"}
_ALL = "s.df_segment >= 0"
"""Condition that all staged rows meet.

Spark makes a Bloom filter of the keys of rows only if these are selected by a condition.
"""
LATER = (
    "(t.df_position < s.df_position"
    " OR (t.df_position = s.df_position AND t.df_ordinal < s.df_ordinal))"
)
"""Condition that a change `s` has a later place than the row `t` of a table."""


@dataclass(frozen=True, slots=True)
class Statements:
    """Makes the statements of one table.

    Args:
        table: Name of the table in SQL, or of a branch of it.
        columns: The columns of staged rows.
        key: Names of the key columns in the staged rows.
        absent: Names in the staged rows of columns whose values some rows lack.
        base: The number that is added to a segment's number to make a position (`Ownership`).
    """

    table: str
    columns: Sequence[WrittenColumn]
    key: Sequence[str]
    absent: frozenset[str]
    base: int

    def append(self) -> str:
        """Return the statement that adds every row of a changelog."""
        return self._insert([*_CHANGELOG], [*self._values(), *(f"s.{name}" for name in _CHANGELOG)])

    def append_current(self, *, soft_deletes: bool) -> str:
        """Return the statement that adds rows of new keys, without deletes, to a current table."""
        meta = {"df_event_time": "s.df_event_time"} | (
            {"df_deleted": "false"} if soft_deletes else {}
        )
        return self._insert([*meta], [*self._values(), *meta.values()])

    def append_history(self) -> str:
        """Return the statement that adds versions of new keys, without deletes, to a history."""
        meta = {name: f"s.{name}" for name in _VALIDITY} | {
            "df_is_current": "s.df_valid_to IS NULL"
        }
        return self._insert([*meta], [*self._values(), *meta.values()])

    def append_pending(self, missing: Sequence[str]) -> str:
        """Return the statement that adds rows to a table of pending changes (`sinks.lake.pending`).

        Args:
            missing: Columns of that table that the staged rows do not have, in lower case. They
                become absent in all rows but deletes.
        """
        absent = "transform(s.df_absent, name -> lower(name))"
        if missing:
            names = ", ".join(map(literal, missing))
            absent = f"array_union(coalesce({absent}, array()), array({names}))"
            absent = f"CASE WHEN s.df_op <> 'd' THEN {absent} END"
        values = [*(column.value("s") for column in self.columns), "s.df_op", absent]
        return self._insert([*_PENDING], [*values, "s.df_event_time"])

    def truncated_changelog(self, truncate: Truncate) -> str:
        """Return the statement that adds a row about a truncate."""
        return (
            f"INSERT INTO {self.table} (df_op, df_event_time, df_position, df_ordinal)"
            f" VALUES ('t', {truncate.moment}, {truncate.position}, {truncate.ordinal})"
        )

    def truncate_current(self, truncate: Truncate, *, soft_deletes: bool) -> str:
        """Return the statement that deletes all rows, or marks them deleted."""
        if not soft_deletes:
            return f"DELETE FROM {self.table} AS t WHERE {truncate.earlier}"
        return (
            f"UPDATE {self.table} AS t SET {truncate.deleted}"
            f" WHERE NOT t.df_deleted AND {truncate.earlier}"
        )

    def truncate_history(self, truncate: Truncate) -> str:
        """Return the statement that ends all current versions."""
        return (
            f"UPDATE {self.table} AS t SET df_valid_to = {truncate.moment}, df_is_current = false"
            f" WHERE t.df_is_current AND {truncate.earlier}"
        )

    def merge_current(
        self,
        *,
        rekey: bool,
        soft_deletes: bool,
        within: str = "",
        truncate: Truncate | None = None,
    ) -> str:
        """Return the statement that applies rows, one per key, to a table of current rows.

        Args:
            rekey: Whether the rows are those of a step of kind `rekey`.
            soft_deletes: Whether deleted rows stay in the table, marked as deleted.
            within: A condition on `t` that holds for all keys of the rows (`within`).
            truncate: A truncate before the rows, which is applied in the same statement.
        """
        meta = ["df_event_time", *_PLACE_COLUMNS]
        changed = [f"t.{name} = s.{name}" for name in meta]
        names = [*(quoted(column.name) for column in self.columns), *meta]
        values = [f"s.{name}" for name in names]
        delete_action = "DELETE"
        if soft_deletes:
            delete_action = f"UPDATE SET t.df_deleted = true, {', '.join(changed)}"
            changed.append("t.df_deleted = false")
            names, values = [*names, "df_deleted"], [*values, "false"]
        if truncate is None:
            changed += [self._assignment(column.name, column.staged) for column in self.columns]
        else:  # the truncate removes the table's values, even of columns that a row lacks
            changed += [
                f"t.{name} = s.{name}" for name in (quoted(column.name) for column in self.columns)
            ]
        return (
            f"MERGE INTO {self.table} AS t USING ({self._rows(meta[:1], rekey=rekey)}) AS s"
            f" ON {self._same_key('t', 's')}{within}"
            f" WHEN MATCHED AND s.df_op = 'd' AND {LATER} THEN {delete_action}"
            f" WHEN MATCHED AND s.df_op <> 'd' AND {LATER} THEN UPDATE SET {', '.join(changed)}"
            f" WHEN NOT MATCHED AND s.df_op <> 'd' THEN"
            f" INSERT ({', '.join(names)}) VALUES ({', '.join(values)})"
            + (
                _truncate_clause(truncate, soft_deletes=soft_deletes)
                if truncate is not None
                else ""
            )
        )

    def merge_history(self, *, rekey: bool, within: str = "") -> str:
        """Return the statement that ends the current versions of keys and adds new versions.

        Each key's first row ends the version that the table has, and each row that is not a delete
        is a new version. Arguments are those of `merge_current`.
        """
        keys = ", ".join(f"r.{quoted(name)}" for name in self._key_names())
        numbered = (
            f"SELECT r.*, row_number() OVER (PARTITION BY {keys}"
            f" ORDER BY r.df_position, r.df_ordinal) = 1 AS df_first"
            f" FROM ({self._rows([*_VALIDITY], rekey=rekey)}) AS r"
        )
        if self.absent and not rekey:
            numbered = self._filled(numbered, within)
        names = [*(quoted(column.name) for column in self.columns), *_VALIDITY, *_PLACE_COLUMNS]
        read = f"SELECT {', '.join(names)}, df_op, df_close FROM ({numbered}) LATERAL VIEW explode("
        read += (
            "CASE WHEN df_first AND df_op <> 'd' THEN array(true, false) ELSE array(df_first) END"
        )
        read += ") AS df_close WHERE df_close OR df_op <> 'd'"
        closes = f"s.df_close AND t.df_is_current AND {LATER}"
        same = "t.df_position = s.df_position AND t.df_ordinal = s.df_ordinal"
        values = ", ".join(f"s.{name}" for name in names)
        return (
            f"MERGE INTO {self.table} AS t USING ({read}) AS s"
            f" ON {self._same_key('t', 's')}{within}"
            f" AND (({closes}) OR (NOT s.df_close AND {same}))"
            f" WHEN MATCHED AND s.df_close THEN"
            f" UPDATE SET t.df_valid_to = s.df_valid_from, t.df_is_current = false"
            f" WHEN NOT MATCHED AND NOT s.df_close THEN INSERT ({', '.join(names)}, df_is_current)"
            f" VALUES ({values}, s.df_valid_to IS NULL)"
        )

    def applied(self, kept: Sequence[str], *, rekey: bool, history: bool) -> str:
        """Return a query for what MERGE would make of the rows of `table`, deleted ones included.

        The result has the columns of `table`, which are these: columns of the source; when each
        row was changed, `df_event_time`; whether a row is one of the source, `df_is_current`; and
        `df_window`, which stays as it is, false in rows that are new.

        Args:
            kept: The columns of the source that `table` has.
            rekey: Whether the rows are those of a step of kind `rekey`.
            history: Whether they are versions; the last one of each key counts.
        """
        keys, own = self._key_names(), {column.name: column.staged for column in self.columns}
        rows = self._rows([*_VALIDITY] if history else ["df_event_time"], rekey=rekey)
        if history:
            partition = ", ".join(quoted(name) for name in keys)
            rows = (
                "SELECT h.*, h.df_valid_from AS df_event_time FROM (SELECT r.*, row_number() OVER ("
                f"PARTITION BY {partition} ORDER BY r.df_position DESC, r.df_ordinal DESC) = 1"
                f" AS df_last FROM ({rows}) AS r) AS h WHERE h.df_last"
            )
        lives = "s.df_op <> 'd'" + (" AND s.df_valid_to IS NULL" if history else "")
        values = {name: f"t.{quoted(name)}" for name in kept}
        for name, value in values.items():
            if name in keys:
                values[name] = f"coalesce({value}, s.{quoted(name)})"
            elif name in own:
                new = self._new_value(own[name], value, f"s.{quoted(name)}")
                values[name] = f"CASE WHEN s.df_op IS NULL THEN {value} ELSE {new} END"
        chosen = [f"{value} AS {quoted(name)}" for name, value in values.items()]
        chosen += [
            "coalesce(s.df_event_time, t.df_event_time) AS df_event_time",
            f"CASE WHEN s.df_op IS NULL THEN t.df_is_current ELSE {lives} END AS df_is_current",
            "coalesce(t.df_window, false) AS df_window",
        ]
        return (
            f"SELECT {', '.join(chosen)} FROM {self.table} AS t FULL OUTER JOIN ({rows}) AS s"
            f" ON {self._same_key('t', 's')}"
        )

    def bounds(self, staged: str = STAGED) -> str | None:
        """Return a query for the bounds of the key columns; None if they would not help.

        Its result has three columns for each of `bounded`: the smallest and the largest value as
        text, and whether there is no null.
        """
        aggregates = [
            f"CAST(min({value}) AS STRING), CAST(max({value}) AS STRING), count({value}) = count(*)"
            for value in (column.value("s") for column in self.bounded)
        ]
        return f"SELECT {', '.join(aggregates)} FROM {staged} AS s" if aggregates else None

    @property
    def bounded(self) -> Sequence[WrittenColumn]:
        """The key columns whose bounds are queried by `bounds`."""
        return [
            column
            for column in self.columns
            if column.staged in self.key and is_ordered(column.type)
        ]

    def within(self, bounds: Sequence[str | bool | None]) -> str:
        """Return the condition that limits keys to the bounds, so that files are skipped.

        `bounds` is the row that the query of the method `bounds` returned.
        """
        condition = ""
        for number, column in enumerate(self.bounded):
            low, high, complete = bounds[3 * number : 3 * number + 3]
            if complete and isinstance(low, str) and isinstance(high, str):
                ends = [f"CAST({literal(end)} AS {column.type})" for end in (low, high)]
                condition += f" AND t.{quoted(column.name)} BETWEEN {ends[0]} AND {ends[1]}"
        return condition

    def _values(self) -> list[str]:
        return [column.value("s") for column in self.columns]

    def _insert(self, names: Sequence[str], values: Sequence[str]) -> str:
        columns = [*(quoted(column.name) for column in self.columns), *names, *_PLACE_COLUMNS]
        return (
            f"INSERT INTO {self.table} ({', '.join(columns)})"
            f" SELECT {', '.join(values)}, {self._position('s')}, s.df_ordinal FROM {STAGED} AS s"
        )

    def _rows(self, meta: Sequence[str], *, rekey: bool) -> str:
        """Return a query for the staged rows with the names and types of the table."""
        if rekey:
            return self._rekeyed(meta)
        chosen = [f"{column.value('s')} AS {quoted(column.name)}" for column in self.columns]
        more = ["df_op", "df_absent", *meta]
        chosen += [*(f"s.{name}" for name in more), f"{self._position('s')} AS df_position"]
        return f"SELECT {', '.join(chosen)}, s.df_ordinal FROM {STAGED} AS s WHERE {_ALL}"

    def _rekeyed(self, meta: Sequence[str]) -> str:
        """Return a query for rows of a rekey step: filled rows of new, deletes of old keys.

        There is no delete for an old key that is also the new key of another row: that row replaces
        it.
        """
        named = {column.staged: column for column in self.columns}
        keys = [named[name] for name in self.key]
        current = " AND t.df_is_current" if "df_valid_from" in meta else ""
        moved = " AND ".join(f"t.{quoted(k.name)} <=> {k.value('s', 'df_old_')}" for k in keys)
        taken = " AND ".join(f"{k.value('o')} <=> {k.value('s', 'df_old_')}" for k in keys)
        position = f"{self._position('s')} AS df_position, s.df_ordinal"
        nothing = "CAST(NULL AS ARRAY<STRING>) AS df_absent"
        common = ", ".join([nothing, *(f"s.{name}" for name in meta), position])
        filled = [
            f"{self._new_value(column.staged, f't.{quoted(column.name)}', column.value('s'))}"
            f" AS {quoted(column.name)}"
            for column in self.columns
        ]
        old_keys = [
            f"{k.value('s', 'df_old_') if k in keys else f'CAST(NULL AS {k.type})'}"
            f" AS {quoted(k.name)}"
            for k in self.columns
        ]
        return (
            f"SELECT {', '.join(filled)}, s.df_op, {common} FROM {STAGED} AS s"
            f" LEFT JOIN {self.table} AS t ON {moved}{current}"
            f" UNION ALL SELECT {', '.join(old_keys)}, 'd' AS df_op, {common} FROM {STAGED} AS s"
            f" LEFT ANTI JOIN {STAGED} AS o ON {taken}"
        )

    def _filled(self, rows: str, within: str) -> str:
        """Return the query `rows` with absent values taken from the table's version of their key.

        A row lacks a value only if all earlier rows of its key lack it as well; then the value is
        still that of the table.
        """
        values = [
            f"{self._new_value(column.staged, f't.{name}', f'f.{name}', 'f')} AS {name}"
            for column in self.columns
            for name in [quoted(column.name)]
        ]
        rest = ["df_op", *_VALIDITY, "df_position", "df_ordinal", "df_first"]
        return (
            f"SELECT {', '.join(values)}, {', '.join(f'f.{name}' for name in rest)}"
            f" FROM ({rows}) AS f LEFT JOIN {self.table} AS t"
            f" ON t.df_is_current AND {self._same_key('t', 'f')}{within}"
        )

    def _assignment(self, name: str, staged: str) -> str:
        column = quoted(name)
        return f"t.{column} = {self._new_value(staged, f't.{column}', f's.{column}')}"

    def _new_value(self, staged: str, kept: str, value: str, row: str = "s") -> str:
        """Return the new value of a column: `value`, or `kept` if the row lacks one."""
        if staged not in self.absent:
            return value
        lacks = f"array_contains({row}.df_absent, {literal(staged)})"
        return f"CASE WHEN {lacks} THEN {kept} ELSE {value} END"

    def _same_key(self, left: str, right: str) -> str:
        columns = [quoted(name) for name in self._key_names()]
        return " AND ".join(f"{left}.{column} = {right}.{column}" for column in columns)

    def _key_names(self) -> Sequence[str]:
        return [column.name for column in self.columns if column.staged in self.key]

    def _position(self, row: str) -> str:
        return f"{row}.df_segment + {self.base}L" if self.base else f"{row}.df_segment"


@dataclass(frozen=True, slots=True)
class WrittenColumn:
    """A column of staged rows, and the table's column to which it is written.

    Attributes:
        staged: Its name in the staged rows.
        name: Its name in the table.
        staged_type: Its type in the staged rows.
        type: Its type in the table, which holds all values of the staged type.
    """

    staged: str
    name: str
    staged_type: str
    type: str

    def value(self, row: str, prefix: str = "") -> str:
        """Return the SQL of its value in a staged row, with the table's type."""
        column = f"{row}.{quoted(prefix + self.staged)}"
        return column if self.staged_type == self.type else f"CAST({column} AS {self.type})"


@dataclass(frozen=True, slots=True)
class Truncate:
    """A truncate: its place, and when it was committed, in microseconds since 1970 UTC."""

    position: int
    ordinal: int
    time_us: int

    @property
    def moment(self) -> str:
        """The time of its commit, in SQL."""
        return f"timestamp_micros({self.time_us})"

    @property
    def earlier(self) -> str:
        """The condition that a row `t` of the table is from before the truncate."""
        same = f"t.df_position = {self.position} AND t.df_ordinal < {self.ordinal}"
        return f"(t.df_position < {self.position} OR ({same}))"

    @property
    def deleted(self) -> str:
        """The assignments that mark a row deleted."""
        assignments = f"df_position = {self.position}, df_ordinal = {self.ordinal}"
        return f"df_deleted = true, df_event_time = {self.moment}, {assignments}"


def own_columns(mode: str, *, soft_deletes: bool) -> Mapping[str, str]:
    """Return the types, by name, of the columns that a table has besides the source's."""
    match mode:
        case "changelog":
            return _CHANGELOG | _PLACE_COLUMNS
        case "current":
            deleted = {"df_deleted": "boolean"} if soft_deletes else {}
            return {"df_event_time": "timestamp"} | deleted | _PLACE_COLUMNS
        case _:
            return _VALIDITY | {"df_is_current": "boolean"} | _PLACE_COLUMNS


def pending_columns() -> Mapping[str, str]:
    """Return the types, by name, of the own columns of a table of pending changes."""
    return _PENDING | _PLACE_COLUMNS


def _truncate_clause(truncate: Truncate, *, soft_deletes: bool) -> str:
    """Return the clause of a MERGE that truncates rows whose keys no applied row has."""
    if not soft_deletes:
        return f" WHEN NOT MATCHED BY SOURCE AND {truncate.earlier} THEN DELETE"
    return (
        f" WHEN NOT MATCHED BY SOURCE AND NOT t.df_deleted AND {truncate.earlier}"
        f" THEN UPDATE SET {truncate.deleted}"
    )


def quoted(*names: str) -> str:
    """Return the quoted name with these parts."""
    return ".".join(f"`{name.replace('`', '``')}`" for name in names)


def literal(value: str) -> str:
    """Return a string literal."""
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def sql_type(type_: ValueType) -> str:
    """Return the type of a column with such values; unsigned integers are not supported."""
    match type_.kind:
        case "integer":
            assert type_.signed
            return _INTEGERS[type_.bits]
        case "float":
            return "float" if type_.bits == 32 else "double"
        case "decimal":
            return f"decimal({type_.precision},{type_.scale})"
        case "timestamp":
            return "timestamp" if type_.zone else "timestamp_ntz"
        case "list":
            assert type_.element is not None
            return f"array<{sql_type(type_.element)}>"
        case _:
            return _SCALARS[type_.kind]


def holds(wide: str, narrow: str) -> bool:
    """Return whether a cast from type `narrow` to type `wide` keeps each value exactly."""
    same = wide == narrow
    as_text = wide == "string" and (narrow in _LIKE_TEXT or bool(_DECIMAL.fullmatch(narrow)))
    as_float = narrow in _EXACT.get(wide, ())
    as_integer = _DIGITS.get(wide, 0) > _DIGITS.get(narrow, 99)
    return same or as_text or as_float or as_integer or _holds_decimal(wide, narrow)


def is_ordered(type_: str) -> bool:
    """Return whether bounds of a column's values tell well which files can have a value."""
    return type_ in {*_DIGITS, "date", "timestamp", "timestamp_ntz"} or bool(_DECIMAL.match(type_))


def _holds_decimal(wide: str, narrow: str) -> bool:
    if (target := _DECIMAL.fullmatch(wide)) is None:
        return False
    digits, scale = int(target[1]), int(target[2])
    if (source := _DECIMAL.fullmatch(narrow)) is not None:
        return scale >= int(source[2]) and digits - scale >= int(source[1]) - int(source[2])
    return digits - scale >= _DIGITS.get(narrow, 99)
