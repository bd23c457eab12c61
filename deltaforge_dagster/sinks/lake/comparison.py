"""SQL that compares a version of a table with the rows that it should have, and repairs the table.

What it should have is in a view with the columns that `Statements.applied` describes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deltaforge_dagster.sinks.lake.statements import WrittenColumn, quoted

LAST_ORDINAL = 1 << 62
"""The ordinal of rows that a repair has written: later than all changes of their segment."""

_INEXACT = ("float", "double", "array<float>", "array<double>")
"""Types of which Spark calls different values equal: 0 and -0."""


def alive(row: str, mode: str, *, soft_deletes: bool) -> str:
    """Return the condition that a row of a table is one that the source has now."""
    if mode == "history":
        return f"{row}.df_is_current"
    return f"NOT {row}.df_deleted" if soft_deletes else "true"


@dataclass(frozen=True, slots=True)
class WindowComparison:
    """Compares a table with the rows that it should have.

    Args:
        expected: The view of these rows.
        table: The view of the table's rows, without those that are not alive.
        columns: The columns that are compared, those of the key included.
        key: The columns among them that are the key.
    """

    expected: str
    table: str
    columns: Sequence[WrittenColumn]
    key: Sequence[str]

    @property
    def values(self) -> Sequence[WrittenColumn]:
        """The columns that are compared by value."""
        return [column for column in self.columns if column.name not in self.key]

    def compared(self) -> str:
        """Return a query for the keys of the window, a row each.

        Its columns are the key (`k0`, ...), the values that the row should have (`e0`, ...), and
        those that it has (`t0`, ...), whether they differ (`d0`, ...), what is wrong, `df_kind`,
        null for nothing, and whether the source has the row, `df_expected`.
        """
        keys = ", ".join(f"e.{quoted(name)}" for name in self.key)
        joined = [f"e.{quoted(name)} AS k{number}" for number, name in enumerate(self.key)]
        for number, column in enumerate(self.values):
            name = quoted(column.name)
            joined += [f"e.{name} AS e{number}", f"t.{name} AS t{number}"]
            joined.append(f"{_differs(column, f'e.{name}', f't.{name}')} AS d{number}")
        joined += [
            "e.df_is_current AS df_expected",
            "e.df_event_time",
            f"count(t.df_present) OVER (PARTITION BY {keys}) AS df_copies",
            f"row_number() OVER (PARTITION BY {keys} ORDER BY e.df_window) AS df_number",
        ]
        anything = " OR ".join([f"d{number}" for number, _ in enumerate(self.values)] or ["false"])
        return (
            "SELECT c.*, CASE WHEN df_copies > 1 THEN 'duplicate'"
            " WHEN df_expected AND df_copies = 0 THEN 'missing'"
            " WHEN NOT df_expected AND df_copies = 1 THEN 'extra'"
            f" WHEN df_expected AND ({anything}) THEN 'different' END AS df_kind"
            f" FROM (SELECT {', '.join(joined)} FROM {self.expected} AS e"
            f" LEFT JOIN (SELECT *, true AS df_present FROM {self.table}) AS t"
            f" ON {self._same_key('e', 't')} WHERE e.df_window) AS c WHERE df_number = 1"
        )

    def counts(self, compared: str) -> str:
        """Return a query for the number of `rows`, of each kind, and of each column (`c0`, ...)."""
        kinds = ("missing", "extra", "different", "duplicate")
        counts = [f"count_if(df_kind = '{kind}') AS {kind}" for kind in kinds]
        counts += [
            f"count_if(df_kind = 'different' AND d{number}) AS c{number}"
            for number, _ in enumerate(self.values)
        ]
        return f"SELECT count(*) AS rows, {', '.join(counts)} FROM {compared}"

    def listed(self, compared: str, most: int) -> str:
        """Return a query for the first rows that differ, with their values as text."""
        chosen = ["df_kind", *(f"d{number}" for number, _ in enumerate(self.values))]
        keys = [f"k{number}" for number, _ in enumerate(self.key)]
        named = dict(zip(self.key, keys, strict=True))
        types = {column.name: column.type for column in self.columns}
        chosen += [f"{_text(name, types[key])} AS {name}" for key, name in named.items()]
        for number, column in enumerate(self.values):
            for name in (f"e{number}", f"t{number}"):
                chosen.append(f"{_text(name, column.type)} AS {name}")
        ordered = f"SELECT * FROM {compared} WHERE df_kind IS NOT NULL ORDER BY {', '.join(keys)}"
        return f"SELECT {', '.join(chosen)} FROM ({ordered} LIMIT {most})"

    def extra_keys(self, seen: Sequence[str]) -> str:
        """Return a query for the keys of rows that neither views of keys nor changes have."""
        keys = ", ".join(f"t.{quoted(name)}" for name in self.key)
        joins = [f" LEFT ANTI JOIN {view} AS s ON {self._same_key('t', 's')}" for view in seen]
        changed = (
            f" LEFT ANTI JOIN (SELECT * FROM {self.expected} WHERE df_is_current) AS e"
            f" ON {self._same_key('t', 'e')}"
        )
        return f"SELECT {keys} FROM {self.table} AS t{''.join(joins)}{changed}"

    def _same_key(self, left: str, right: str) -> str:
        names = [quoted(name) for name in self.key]
        return " AND ".join(f"{left}.{name} = {right}.{name}" for name in names)


@dataclass(frozen=True, slots=True)
class RowRepair:
    """Makes rows of a table what they should be, in one statement.

    Rows of the source `s` have the key, the values, an `df_event_time`, and an action: `u` to
    update the row of the key, `d` to delete its rows, `x` to delete or mark them, `i` to insert it.

    Args:
        written: The table, or the branch of it that the statement writes to.
        columns: The columns that are written, those of the key included.
        key: The columns among them that are the key.
        position: The place of the rows that are written.
        soft_deletes: Whether deleted rows are marked.
    """

    written: str
    columns: Sequence[WrittenColumn]
    key: Sequence[str]
    position: int
    soft_deletes: bool

    def window(self, compared: str, values: Sequence[WrittenColumn]) -> str:
        """Return the statement that repairs the keys of a window (`WindowComparison.compared`)."""
        chosen = [f"k{number} AS {quoted(name)}" for number, name in enumerate(self.key)]
        chosen += [f"e{number} AS {quoted(column.name)}" for number, column in enumerate(values)]
        rows = (
            f"SELECT {', '.join(chosen)}, df_event_time, df_action FROM {compared}"
            " LATERAL VIEW explode(CASE WHEN df_kind = 'different' THEN array('u')"
            " WHEN df_expected THEN array('d', 'i') ELSE array('x') END) AS df_action"
            " WHERE df_kind IS NOT NULL"
        )
        return self._merge(rows, [column.name for column in self.columns])

    def removal(self, extra: str) -> str:
        """Return the statement that removes rows of keys (`WindowComparison.extra_keys`)."""
        own = "'x' AS df_action, current_timestamp() AS df_event_time"
        rows = f"SELECT DISTINCT *, {own} FROM {extra}"
        return self._merge(rows, [])

    def _merge(self, rows: str, names: Sequence[str]) -> str:
        place = {"df_position": f"{self.position}L", "df_ordinal": f"{LAST_ORDINAL}L"}
        place["df_event_time"] = "s.df_event_time"
        values = {quoted(name): f"s.{quoted(name)}" for name in names} | place
        same = " AND ".join(f"t.{quoted(name)} = s.{quoted(name)}" for name in self.key)
        clauses = []
        if self.soft_deletes:
            marks = _assigned({"df_deleted": "true"} | place)
            clauses.append(f"WHEN MATCHED AND s.df_action = 'x' THEN UPDATE SET {marks}")
        if names:
            clauses.append(
                f"WHEN MATCHED AND s.df_action = 'u' THEN UPDATE SET {_assigned(values)}"
            )
        clauses.append("WHEN MATCHED THEN DELETE")
        if names:
            inserted = values | ({"df_deleted": "false"} if self.soft_deletes else {})
            clauses.append(
                f"WHEN NOT MATCHED AND s.df_action = 'i' THEN INSERT ({', '.join(inserted)})"
                f" VALUES ({', '.join(inserted.values())})"
            )
        return (
            f"MERGE INTO {self.written} AS t USING ({rows}) AS s"
            f" ON {same} AND s.df_action <> 'i' {' '.join(clauses)}"
        )


def _assigned(values: dict[str, str]) -> str:
    return ", ".join(f"t.{name} = {value}" for name, value in values.items())


def _differs(column: WrittenColumn, left: str, right: str) -> str:
    """Return the condition that two values of a column differ."""
    if column.type not in _INEXACT:
        return f"NOT {left} <=> {right}"
    return f"NOT CAST({left} AS STRING) <=> CAST({right} AS STRING)"


def _text(value: str, type_: str) -> str:
    return f"hex({value})" if type_ == "binary" else f"CAST({value} AS STRING)"
