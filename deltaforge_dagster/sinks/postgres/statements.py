"""The SQL that applies staged rows to a table, for each mode.

The rows of a step are in a temporary table (`STAGED`). Its columns have names of our own: `c0` is the first column of the
table, `o0` the old value of the first key column, `a0` whether the row lacks the value of `c0`; others are named as in
staged files. Everything happens in the transaction that also remembers the commit, so no statement is ever repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deltaforge_dagster.sinks.postgres.names import quoted
from deltaforge_dagster.sinks.postgres.types import is_exact
from deltaforge_dagster.sinks.tables.staged import TableMode

STAGED = "deltaforge_staged"
"""The temporary table."""

_FROM = f"pg_temp.{STAGED}"
_MOMENT = "timestamp with time zone"
_CHANGELOG = {
    "df_op": "text",
    "df_event_time": _MOMENT,
    "df_source_position": "text",
    "df_tx_id": "text",
    "df_event_id": "text",
    "df_schema_version": "text",
}
_PLACE = {"df_position": "bigint", "df_ordinal": "bigint"}
_VALIDITY = {"df_valid_from": _MOMENT, "df_valid_to": _MOMENT}
_STAGED_META = {
    "df_op": "text",
    "df_segment": "bigint",
    "df_ordinal": "bigint",
    **_CHANGELOG,
    **_VALIDITY,
}


def own_columns(mode: TableMode, *, soft_deletes: bool) -> Mapping[str, str]:
    """Return the columns that a table has beside those of its source, by name their types."""
    match mode:
        case "changelog":
            return _CHANGELOG | _PLACE
        case "current":
            return {"df_deleted": "boolean"} if soft_deletes else {}
        case "history":
            return _VALIDITY | {"df_is_current": "boolean"} | _PLACE


def staged_meta(mode: TableMode, *, exact_keys: bool) -> Sequence[str]:
    """Return the columns of staged files, beside those of the table, that the statements of a mode read.

    Args:
        mode: The mode.
        exact_keys: Whether the table takes no two of the staged keys for the same.
    """
    match mode:
        case "changelog":
            return [*_CHANGELOG, "df_segment", "df_ordinal"]
        case "current":
            return ["df_op"] if exact_keys else ["df_op", "df_segment", "df_ordinal"]
        case "history":
            return ["df_op", "df_segment", "df_ordinal", *_VALIDITY]


@dataclass(frozen=True, slots=True)
class TargetColumn:
    """A column of staged rows, and where it goes.

    Attributes:
        number: Its number in the staged rows.
        staged: Its name in the staged files.
        name: Its name in the table.
        staged_type: Its type in the temporary table.
        type: Its type in the table.
        collation: The collation by which the table compares it, in SQL; None for that of its type.
    """

    number: int
    staged: str
    name: str
    staged_type: str
    type: str
    collation: str | None = None

    @property
    def exact(self) -> bool:
        """Whether the table takes no two different values of staged rows for the same."""
        return self.collation is None and is_exact(self.type)

    def value(self, row: str, prefix: str = "c") -> str:
        """Return its value in a staged row, as the table has it and compares it."""
        found = f"{row}.{prefix}{self.number}"
        if self.staged_type != self.type:
            found = f"CAST({found} AS {self.type})"
        return found if self.collation is None else f"{found} COLLATE {self.collation}"

    def sent(self, row: str) -> str:
        """Return its value in a row of the table, as a staged row has it."""
        found = f"{row}.{quoted(self.name)}"
        return found if self.staged_type == self.type else f"CAST({found} AS {self.staged_type})"


@dataclass(frozen=True, slots=True)
class PostgresStatements:
    """Makes the statements of one table.

    Args:
        table: Name of the table in SQL.
        columns: The columns of staged rows.
        key: Names of the key columns in the staged files.
        absent: Those of columns whose values some rows lack.
        base: What is added to a segment's number to make it a position.
    """

    table: str
    columns: Sequence[TargetColumn]
    key: Sequence[str]
    absent: frozenset[str]
    base: int

    @property
    def keys(self) -> Sequence[TargetColumn]:
        """The key columns."""
        return [column for column in self.columns if column.staged in self.key]

    @property
    def exact_keys(self) -> bool:
        """Whether the table takes no two of the staged keys for the same."""
        return all(column.exact for column in self.keys)

    @property
    def lacked(self) -> Sequence[TargetColumn]:
        """The columns whose values some rows lack."""
        return [column for column in self.columns if column.staged in self.absent]

    def stage(self, meta: Sequence[str], *, absent: bool, rekey: bool) -> str:
        """Return the statement that makes the temporary table, with the columns in the order in which they are sent."""
        fields = [f"c{one.number} {one.staged_type}" for one in self.columns]
        fields += [f"{name} {_STAGED_META[name]}" for name in meta]
        if absent:
            fields += [f"a{one.number} boolean" for one in self.lacked]
        if rekey:
            fields += [f"o{one.number} {one.staged_type}" for one in self.keys]
        return f"CREATE TEMPORARY TABLE {STAGED} ({', '.join(fields)}) ON COMMIT DROP"

    def copy(self) -> str:
        """Return the statement with which rows are sent to the temporary table."""
        return f"COPY {_FROM} FROM STDIN (FORMAT binary)"

    def unstage(self) -> str:
        """Return the statement that drops the temporary table."""
        return f"DROP TABLE {_FROM}"

    def append(self) -> str:
        """Return the statement that adds every row of a changelog."""
        return self._insert({name: f"s.{name}" for name in _CHANGELOG})

    def truncated_changelog(self) -> str:
        """Return the statement that adds a row about a truncate, given position, ordinal and time."""
        return (
            f"INSERT INTO {self._escaped} (df_op, df_position, df_ordinal, df_event_time)"
            " VALUES ('t', %s, %s, %s)"
        )

    def truncate_current(self, *, soft_deletes: bool) -> str:
        """Return the statement that deletes all rows, or marks them deleted."""
        if not soft_deletes:
            return f"DELETE FROM {self.table}"
        return f"UPDATE {self.table} SET df_deleted = true WHERE df_deleted IS DISTINCT FROM true"

    def truncate_history(self) -> str:
        """Return the statement that ends all versions that are current, given the time."""
        return f"UPDATE {self._escaped} SET df_valid_to = %s, df_is_current = false WHERE df_is_current"

    def merge_current(self, *, absent: bool, soft_deletes: bool) -> str:
        """Return the statement that applies rows, one per key, to a table of current rows.

        Of keys that the table takes for the same, the last row counts: if an update has changed the key, that is the one
        with the new key, not the delete of the old one, which has the same place.

        They are merged in the order of the key. So the server visits each page of the key's index once, and also each page
        of the table if its rows lie in that order. In any other order it would read and write the same pages several times.

        Args:
            absent: Whether rows say which values they lack.
            soft_deletes: Whether deleted rows stay, marked.
        """
        lacked = self.lacked if absent else []
        chosen = [f"{one.value('f')} AS c{one.number}" for one in self.columns]
        chosen += ["f.df_op", *(f"f.a{one.number}" for one in lacked)]
        changed, names, values = [], [], []
        for one in self.columns:
            name, value = quoted(one.name), f"s.c{one.number}"
            names.append(name)
            values.append(value)
            if one in lacked:
                value = f"CASE WHEN s.a{one.number} THEN t.{name} ELSE {value} END"
            changed.append(f"{name} = {value}")
        gone = "DELETE"
        if soft_deletes:
            gone = "UPDATE SET df_deleted = true"
            changed.append("df_deleted = false")
            names.append("df_deleted")
            values.append("false")
        order = ", ".join(f"c{one.number}" for one in self.keys)
        last = ""
        if not self.exact_keys:
            last = f"DISTINCT ON ({order}) "
            order += ", f.df_segment DESC, f.df_ordinal DESC, f.df_op = 'd'"
        return (
            f"MERGE INTO {self.table} AS t USING (SELECT {last}{', '.join(chosen)} FROM {_FROM} AS f"
            f" ORDER BY {order}) AS s ON {self._same('c')}"
            f" WHEN MATCHED AND s.df_op = 'd' THEN {gone}"
            f" WHEN MATCHED THEN UPDATE SET {', '.join(changed)}"
            f" WHEN NOT MATCHED AND s.df_op <> 'd' THEN"
            f" INSERT ({', '.join(names)}) VALUES ({', '.join(values)})"
        )

    def fill(self, *, rekey: bool, current: bool) -> str:
        """Return the statement that gives staged rows the values that they lack, from the table's row of their key.

        Args:
            rekey: Whether that is the row of the old key.
            current: Whether the table has versions of rows, of which the current one counts.
        """
        filled = [
            f"c{one.number} = CASE WHEN s.a{one.number} THEN {one.sent('t')} ELSE s.c{one.number} END"
            for one in self.lacked
        ]
        some = " OR ".join(f"s.a{one.number}" for one in self.lacked)
        same = self._same_staged("o" if rekey else "c")
        return (
            f"UPDATE {_FROM} AS s SET {', '.join(filled)} FROM {self.table} AS t"
            f" WHERE {same} AND ({some}){' AND t.df_is_current' if current else ''}"
        )

    def delete_old(self, *, soft_deletes: bool) -> str:
        """Return the statement that deletes the rows of old keys, or marks them deleted; some may be new keys of others."""
        same = self._same_staged("o")
        if soft_deletes:
            return f"UPDATE {self.table} AS t SET df_deleted = true FROM {_FROM} AS s WHERE {same}"
        return f"DELETE FROM {self.table} AS t USING {_FROM} AS s WHERE {same}"

    def close_old(self) -> str:
        """Return the statement that ends the current versions of old keys; some may be new keys of others."""
        return (
            f"UPDATE {self.table} AS t SET df_valid_to = s.df_valid_from, df_is_current = false"
            f" FROM {_FROM} AS s WHERE {self._same_staged('o')} AND t.df_is_current"
        )

    def close(self) -> str:
        """Return the statement that ends the current versions of keys, when their first staged rows begin."""
        keys = ", ".join(one.value("f") for one in self.keys)
        first = (
            f"SELECT DISTINCT ON ({keys}) f.* FROM {_FROM} AS f"
            f" ORDER BY {keys}, f.df_segment, f.df_ordinal"
        )
        return (
            f"UPDATE {self.table} AS t SET df_valid_to = s.df_valid_from, df_is_current = false"
            f" FROM ({first}) AS s WHERE {self._same_staged('c')} AND t.df_is_current"
        )

    def add_versions(self) -> str:
        """Return the statement that adds the versions of a history."""
        more = {name: f"s.{name}" for name in _VALIDITY} | {
            "df_is_current": "s.df_valid_to IS NULL"
        }
        return self._insert(more) + " WHERE s.df_op <> 'd'"

    @property
    def _escaped(self) -> str:
        """The table's name in a statement with parameters."""
        return self.table.replace("%", "%%")

    def _insert(self, more: Mapping[str, str]) -> str:
        names = [*(quoted(one.name) for one in self.columns), *more, *_PLACE]
        values = [one.value("s") for one in self.columns]
        place = [f"s.df_segment + {self.base}", "s.df_ordinal"]
        return (
            f"INSERT INTO {self.table} ({', '.join(names)})"
            f" SELECT {', '.join([*values, *more.values(), *place])} FROM {_FROM} AS s"
        )

    def _same(self, prefix: str) -> str:
        """Return the condition that rows with the table's types have the key of a row of the table."""
        return " AND ".join(f"t.{quoted(one.name)} = s.{prefix}{one.number}" for one in self.keys)

    def _same_staged(self, prefix: str) -> str:
        """Return the same condition for staged rows."""
        return " AND ".join(f"t.{quoted(one.name)} = {one.value('s', prefix)}" for one in self.keys)
