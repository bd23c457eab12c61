"""The SQL that applies staged rows to a table, for each mode.

The rows of a step are in a temporary table (`STAGED`). Its columns have names of our own: `c0` is
the first column of the table, `o0` the old value of the first key column, `a0` whether the row
lacks the value of `c0`; others are named as in staged files. Everything happens in the transaction
that also remembers the commit, so no statement is ever repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deltaforge_dagster.sinks.postgres.server import quoted
from deltaforge_dagster.sinks.postgres.types import is_exact
from deltaforge_dagster.sinks.tables.staged import TableMode

STAGED = "deltaforge_staged"
"""The temporary table."""

_STAGED_TABLE = f"pg_temp.{STAGED}"
_TIMESTAMP = "timestamp with time zone"
_CHANGELOG = {
    "df_op": "text",
    "df_event_time": _TIMESTAMP,
    "df_source_position": "text",
    "df_tx_id": "text",
    "df_event_id": "text",
    "df_schema_version": "text",
}
_PLACE_COLUMNS = {"df_position": "bigint", "df_ordinal": "bigint"}
_VALIDITY = {"df_valid_from": _TIMESTAMP, "df_valid_to": _TIMESTAMP}
_STAGED_META = {
    "df_op": "text",
    "df_segment": "bigint",
    "df_ordinal": "bigint",
    **_CHANGELOG,
    **_VALIDITY,
}


def own_columns(mode: TableMode, *, soft_deletes: bool) -> Mapping[str, str]:
    """Return the types of the columns that a table has beside those of its source, by name."""
    match mode:
        case "changelog":
            return _CHANGELOG | _PLACE_COLUMNS
        case "current":
            return {"df_deleted": "boolean"} if soft_deletes else {}
        case "history":
            return _VALIDITY | {"df_is_current": "boolean"} | _PLACE_COLUMNS


def staged_meta(mode: TableMode, *, exact_keys: bool) -> Sequence[str]:
    """Return the columns of staged files, beside the table's, that the statements of a mode read.

    Args:
        mode: The mode.
        exact_keys: See `PostgresStatements.exact_keys`.
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
        """Whether values that differ in staged rows always differ in the table, too."""
        return self.collation is None and is_exact(self.type)

    def value(self, row: str, prefix: str = "c") -> str:
        """Return its value in a staged row, with type and collation of the table's column."""
        sql = f"{row}.{prefix}{self.number}"
        if self.staged_type != self.type:
            sql = f"CAST({sql} AS {self.type})"
        return sql if self.collation is None else f"{sql} COLLATE {self.collation}"

    def sent(self, row: str) -> str:
        """Return its value in a row of the table, with the type that staged rows have."""
        sql = f"{row}.{quoted(self.name)}"
        return sql if self.staged_type == self.type else f"CAST({sql} AS {self.staged_type})"


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
        """Whether keys that differ in staged rows always differ in the table, too."""
        return all(column.exact for column in self.keys)

    @property
    def lacked(self) -> Sequence[TargetColumn]:
        """The columns whose values some rows lack."""
        return [column for column in self.columns if column.staged in self.absent]

    def stage(self, meta: Sequence[str], *, absent: bool, rekey: bool) -> str:
        """Return the statement that makes the temporary table.

        It has the columns in the order in which they are sent.
        """
        fields = [f"c{column.number} {column.staged_type}" for column in self.columns]
        fields += [f"{name} {_STAGED_META[name]}" for name in meta]
        if absent:
            fields += [f"a{column.number} boolean" for column in self.lacked]
        if rekey:
            fields += [f"o{column.number} {column.staged_type}" for column in self.keys]
        return f"CREATE TEMPORARY TABLE {STAGED} ({', '.join(fields)}) ON COMMIT DROP"

    def copy(self) -> str:
        """Return the statement with which rows are sent to the temporary table."""
        return f"COPY {_STAGED_TABLE} FROM STDIN (FORMAT binary)"

    def unstage(self) -> str:
        """Return the statement that drops the temporary table."""
        return f"DROP TABLE {_STAGED_TABLE}"

    def append(self) -> str:
        """Return the statement that adds every row of a changelog."""
        return self._insert({name: f"s.{name}" for name in _CHANGELOG})

    def truncated_changelog(self) -> str:
        """Return the statement that adds a row about a truncate.

        Its parameters are position, ordinal and time.
        """
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
        return (
            f"UPDATE {self._escaped} SET df_valid_to = %s, df_is_current = false"
            " WHERE df_is_current"
        )

    def merge_current(self, *, absent: bool, soft_deletes: bool) -> str:
        """Return the statement that applies rows, one per key, to a table of current rows.

        Of rows whose keys are equal in the table, the last one counts: if an update has changed the
        key, that is the row with the new key, not the delete of the old one, which has the same
        segment and ordinal.

        Rows are merged in the order of the key. So the server visits each page of the key's index
        once, and also each page of the table if its rows lie in that order. In any other order it
        would read and write the same pages several times.

        Args:
            absent: Whether rows say which values they lack.
            soft_deletes: Whether deleted rows stay, marked.
        """
        lacked = self.lacked if absent else []
        chosen = [f"{column.value('f')} AS c{column.number}" for column in self.columns]
        chosen += ["f.df_op", *(f"f.a{column.number}" for column in lacked)]
        changed, names, values = [], [], []
        for column in self.columns:
            name, value = quoted(column.name), f"s.c{column.number}"
            names.append(name)
            values.append(value)
            if column in lacked:
                value = f"CASE WHEN s.a{column.number} THEN t.{name} ELSE {value} END"
            changed.append(f"{name} = {value}")
        deletion = "DELETE"
        if soft_deletes:
            deletion = "UPDATE SET df_deleted = true"
            changed.append("df_deleted = false")
            names.append("df_deleted")
            values.append("false")
        order = ", ".join(f"c{column.number}" for column in self.keys)
        last = ""
        if not self.exact_keys:
            last = f"DISTINCT ON ({order}) "
            order += ", f.df_segment DESC, f.df_ordinal DESC, f.df_op = 'd'"
        return (
            f"MERGE INTO {self.table} AS t"
            f" USING (SELECT {last}{', '.join(chosen)} FROM {_STAGED_TABLE} AS f ORDER BY {order})"
            f" AS s ON {self._same_key('c')}"
            f" WHEN MATCHED AND s.df_op = 'd' THEN {deletion}"
            f" WHEN MATCHED THEN UPDATE SET {', '.join(changed)}"
            f" WHEN NOT MATCHED AND s.df_op <> 'd' THEN"
            f" INSERT ({', '.join(names)}) VALUES ({', '.join(values)})"
        )

    def fill(self, *, rekey: bool, current: bool) -> str:
        """Return the statement that completes staged rows from the table's rows of their keys.

        Args:
            rekey: Whether that is the row of the old key.
            current: Whether the table has versions of rows, of which the current one counts.
        """
        filled = [
            f"c{column.number} = CASE WHEN s.a{column.number} THEN {column.sent('t')}"
            f" ELSE s.c{column.number} END"
            for column in self.lacked
        ]
        incomplete = " OR ".join(f"s.a{column.number}" for column in self.lacked)
        match = self._same_staged_key("o" if rekey else "c")
        return (
            f"UPDATE {_STAGED_TABLE} AS s SET {', '.join(filled)} FROM {self.table} AS t"
            f" WHERE {match} AND ({incomplete}){' AND t.df_is_current' if current else ''}"
        )

    def delete_old(self, *, soft_deletes: bool) -> str:
        """Return the statement that deletes the rows of old keys, or marks them deleted.

        It must come before `merge_current`: an old key may be the new key of another row.
        """
        match = self._same_staged_key("o")
        if soft_deletes:
            return (
                f"UPDATE {self.table} AS t SET df_deleted = true"
                f" FROM {_STAGED_TABLE} AS s WHERE {match}"
            )
        return f"DELETE FROM {self.table} AS t USING {_STAGED_TABLE} AS s WHERE {match}"

    def close_old(self) -> str:
        """Return the statement that ends the current versions of old keys.

        It must come before `add_versions`: an old key may be the new key of another row.
        """
        return (
            f"UPDATE {self.table} AS t SET df_valid_to = s.df_valid_from, df_is_current = false"
            f" FROM {_STAGED_TABLE} AS s WHERE {self._same_staged_key('o')} AND t.df_is_current"
        )

    def close(self) -> str:
        """Return the statement that ends the current versions of keys.

        They end when the first staged rows of the keys begin.
        """
        keys = ", ".join(column.value("f") for column in self.keys)
        first = (
            f"SELECT DISTINCT ON ({keys}) f.* FROM {_STAGED_TABLE} AS f"
            f" ORDER BY {keys}, f.df_segment, f.df_ordinal"
        )
        return (
            f"UPDATE {self.table} AS t SET df_valid_to = s.df_valid_from, df_is_current = false"
            f" FROM ({first}) AS s WHERE {self._same_staged_key('c')} AND t.df_is_current"
        )

    def add_versions(self) -> str:
        """Return the statement that adds the versions of a history."""
        further = {name: f"s.{name}" for name in _VALIDITY} | {
            "df_is_current": "s.df_valid_to IS NULL"
        }
        return self._insert(further) + " WHERE s.df_op <> 'd'"

    @property
    def _escaped(self) -> str:
        """The table's name in a statement with parameters."""
        return self.table.replace("%", "%%")

    def _insert(self, further: Mapping[str, str]) -> str:
        names = [*(quoted(column.name) for column in self.columns), *further, *_PLACE_COLUMNS]
        values = [column.value("s") for column in self.columns]
        position = [f"s.df_segment + {self.base}", "s.df_ordinal"]
        return (
            f"INSERT INTO {self.table} ({', '.join(names)})"
            f" SELECT {', '.join([*values, *further.values(), *position])}"
            f" FROM {_STAGED_TABLE} AS s"
        )

    def _same_key(self, prefix: str) -> str:
        """Return the condition that a row `s` with the table's types has the key of its row `t`."""
        return " AND ".join(
            f"t.{quoted(column.name)} = s.{prefix}{column.number}" for column in self.keys
        )

    def _same_staged_key(self, prefix: str) -> str:
        """Return the condition that a staged row `s` has the key of the table's row `t`."""
        return " AND ".join(
            f"t.{quoted(column.name)} = {column.value('s', prefix)}" for column in self.keys
        )
