"""Pending changes in SQL: their net effect, and a view of a table with its pending changes.

Only tables of current rows have pending changes. A table of pending changes has a row for each key
in each commit that was added to it: the last image of the key in that commit, in the columns of the
source; its place (`df_position`, `df_ordinal`) and time; in `df_op` `u` if the key has a row after
the commit, `d` if it has none; and in `df_absent` the columns, in lower case, whose values the
commit did not have.

Their net effect is one row per key: the last one, in which an absent column has its value from the
last row before it that has one. After a delete, the value is null. If no pending row has a value,
it is that of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from deltaforge_dagster.sinks.lake.statements import LATER, literal, quoted

SUFFIX = "_pending"
"""Suffix that makes a table's name that of the table with its pending changes."""

_META_COLUMNS = ("df_op", "df_event_time", "df_position", "df_ordinal")


def pending_name(destination: Sequence[str]) -> tuple[str, ...]:
    """Return the name of the table with the pending changes of a table."""
    return (*destination[:-1], destination[-1] + SUFFIX)


@dataclass(frozen=True, slots=True)
class SqlEngine:
    """The syntax of an engine where SQL dialects differ.

    Attributes:
        quote: Returns a quoted name.
        text: Returns a string literal.
        struct: Returns a struct of expressions, by the names of its fields.
    """

    quote: Callable[[str], str]
    text: Callable[[str], str]
    struct: Callable[[Mapping[str, str]], str]


def _spark_struct(fields: Mapping[str, str]) -> str:
    return f"struct({', '.join(f'{value} AS {name}' for name, value in fields.items())})"


def _duckdb_struct(fields: Mapping[str, str]) -> str:
    return f"struct_pack({', '.join(f'{name} := {value}' for name, value in fields.items())})"


def _standard_quote(name: str) -> str:
    escaped = name.replace('"', '""')
    return f'"{escaped}"'


def _standard_text(value: str) -> str:
    escaped = value.replace("'", "''")
    return f"'{escaped}'"


SPARK = SqlEngine(quoted, literal, _spark_struct)
DUCKDB = SqlEngine(_standard_quote, _standard_text, _duckdb_struct)


@dataclass(frozen=True, slots=True)
class PendingRows:
    """The pending changes of a table.

    Attributes:
        table: The table to read them from, in SQL.
        columns: The columns of the source that it has.
        key: The columns among them that are the key.
        engine: The engine that reads them.
    """

    table: str
    columns: Sequence[str]
    key: Sequence[str]
    engine: SqlEngine = SPARK

    def absent(self, through: int) -> str:
        """Return a query for the columns, in lower case, that rows up to a position lack."""
        return (
            f"SELECT DISTINCT explode(df_absent) AS name FROM {self.table}"
            f" WHERE df_position <= {through}"
        )

    def folded(self, through: int, absent: Collection[str]) -> str:
        """Return a query for the net effect of the rows up to a position, as staged rows.

        Args:
            through: The position.
            absent: The columns that some of these rows lack, in lower case.
        """
        lacking = [name for name in self._values if name.lower() in absent]
        sure = [name for name in self._values if name.lower() not in absent]
        values = [f"df_last.{self._last_name(name)} AS {self._quoted(name)}" for name in sure]
        values += [f"{self._value('f', name)} AS {self._quoted(name)}" for name in lacking]
        names = [
            f"CASE WHEN f.{self._last_name(name)} IS NULL THEN {literal(name)} END"
            for name in lacking
        ]
        array = f"filter(array({', '.join(names)}), name -> name IS NOT NULL)"
        chosen = [
            *map(self._quoted, self.key),
            *values,
            "df_last.df_op",
            f"{array if names else 'CAST(NULL AS ARRAY<STRING>)'} AS df_absent",
            "df_last.df_event_time",
            "df_last.df_position AS df_segment",
            "df_last.df_ordinal",
        ]
        latest = self._latest(sure, f" WHERE df_position <= {through}")
        return f"SELECT {', '.join(chosen)} FROM ({latest}) AS f"

    def view(self, table: str, columns: Sequence[str]) -> str:
        """Return a query for the rows of a table with its pending changes applied.

        Pending changes are read before the table. So if they are folded meanwhile, no change is
        missed: it is found in at least one of the two, and if in both, the pending one is ignored.
        Their keys are few, so Spark broadcasts them to the tasks that read the table's files.

        Args:
            table: The table, in SQL.
            columns: The columns of the source that it has.
        """
        same = " AND ".join(
            f"t.{key} IS NOT DISTINCT FROM s.{key}" for key in map(self._quoted, self.key)
        )
        own = {name.lower() for name in self.columns}
        keys = {name.lower() for name in self.key}
        meta = _META_COLUMNS[1:]
        kept = [*(f"t.{self._quoted(name)}" for name in columns), *(f"t.{name}" for name in meta)]
        changed: list[str] = []
        for name in columns:
            column = self._quoted(name)
            if name.lower() in keys:
                changed.append(f"s.{column}")
            elif name.lower() in own:
                last = f"s.{self._last_name(name)}"
                value = (
                    f"CASE WHEN {last} IS NULL THEN t.{column} ELSE {self._value('s', name)} END"
                )
                changed.append(f"{value} AS {column}")
            else:
                changed.append(f"t.{column}")
        changed += [f"s.df_last.{name} AS {name}" for name in meta]
        later = LATER.replace("s.df_", "s.df_last.df_")
        return (
            f"WITH df_pending AS (\n  {self._latest((), '')}\n)\n"
            f"SELECT /*+ BROADCAST(s) */ {', '.join(kept)}\n"
            f"FROM {table} AS t ANTI JOIN df_pending AS s ON {same} AND {later}\n"
            "UNION ALL\n"
            f"SELECT {', '.join(changed)}\n"
            f"FROM df_pending AS s LEFT JOIN (\n"
            f"  SELECT /*+ BROADCAST(s) */ t.* FROM {table} AS t"
            f" SEMI JOIN df_pending AS s ON {same}\n"
            f") AS t ON {same}\n"
            f"WHERE s.df_last.df_op <> 'd' AND (t.df_position IS NULL OR {later})"
        )

    @property
    def _values(self) -> Sequence[str]:
        keys = {name.lower() for name in self.key}
        return [name for name in self.columns if name.lower() not in keys]

    def _latest(self, sure: Collection[str], where: str) -> str:
        """Return a query for each key's last row, and the last values of columns that rows lack."""
        order = self.engine.struct({"p": "df_position", "o": "df_ordinal"})
        fields = {name: name for name in _META_COLUMNS}
        fields |= {self._last_name(name): self._quoted(name) for name in sure}
        aggregates = [f"max_by({self.engine.struct(fields)}, {order}) AS df_last"]
        for name in self._values:
            if name not in sure:
                value = self.engine.struct({"op": "df_op", "v": self._quoted(name)})
                has_value = (
                    "df_op = 'd' OR df_absent IS NULL"
                    f" OR NOT array_contains(df_absent, {self.engine.text(name.lower())})"
                )
                aggregates.append(
                    f"max_by({value}, {order}) FILTER (WHERE {has_value})"
                    f" AS {self._last_name(name)}"
                )
        keys = ", ".join(map(self._quoted, self.key))
        return f"SELECT {keys}, {', '.join(aggregates)} FROM {self.table}{where} GROUP BY {keys}"

    def _value(self, row: str, name: str) -> str:
        last = f"{row}.{self._last_name(name)}"
        return f"CASE WHEN {last}.op <> 'd' THEN {last}.v END"

    def _last_name(self, name: str) -> str:
        """Return the name of the field with the last value of a column."""
        return f"df_v{self.columns.index(name)}"

    def _quoted(self, name: str) -> str:
        return self.engine.quote(name)
