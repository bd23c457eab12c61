"""Compares a table of ClickHouse with rows of the source, and repairs it.

The rows of the source are applied to another table in the same database, with the columns and the
engine of the sink's table, by the code that applies commits (`writer.CurrentRows`). Then the server
compares the texts of both tables' values, as `FINAL` gives them.

ClickHouse has no transactions, and no older versions of a table, so a view may have something of a
commit that is under way.

A row that a repair inserts has the next version after that which the row had when it was compared.
So a later change of the same row wins, whether it comes before the repair or after it.
"""

# ruff: noqa: S608 - names and texts in queries are quoted

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from deltaforge_dagster.errors import PermissionMissing, TableRejected
from deltaforge_dagster.sinks.clickhouse.client import ClickhouseClient, quoted, table_name
from deltaforge_dagster.sinks.clickhouse.rows import RowMaker, SegmentPlace, VersionMaker
from deltaforge_dagster.sinks.clickhouse.sink_type import ClickhouseSinkConfig
from deltaforge_dagster.sinks.clickhouse.target import (
    DELETED,
    OP,
    ROW_COLUMNS,
    TIME,
    VERSION,
    ClickhouseTarget,
    TableMark,
    column_type,
    holds,
    table_label,
)
from deltaforge_dagster.sinks.clickhouse.writer import CurrentRows
from deltaforge_dagster.sinks.tables.comparer import (
    MOST_LISTED,
    ComparedRows,
    ComparedView,
    DifferenceKind,
    RowDifference,
)
from deltaforge_dagster.sinks.tables.staged import StagedTable
from deltaforge_dagster.sinks.tables.writer import TableOwner
from deltaforge_dagster.typed_rows.schema import TypedSchema

_KINDS: Sequence[DifferenceKind] = ("missing", "extra", "different")
_EXPECTED, _WINDOW, _COMPARED, _SEEN, _EXTRA = "expected", "window", "compared", "seen", "extra"
"""Tables for the time of a comparison: the rows that the source has, the window's keys, its rows
that differ, the keys of all windows, and those of extra rows."""


@dataclass(slots=True)
class ClickhouseComparer:
    """Compares one table of a sink; implements `TableComparer`.

    Args:
        config: Options of the sink.
        owner: Who writes the table.
        destination: Database and name of the table.
    """

    config: ClickhouseSinkConfig
    owner: TableOwner
    destination: tuple[str, ...]
    window_rows: int = field(default=100_000, init=False)
    exact: bool = field(default=False, init=False)
    keeps_windows: bool = field(default=False, init=False)
    keys: Sequence[str] = field(default=(), init=False)
    _client: ClickhouseClient | None = field(default=None, init=False)

    @contextmanager
    def view(self, front: int, *, locked: bool = False) -> Iterator[ComparedView]:  # noqa: ARG002
        """Provide the table as it is; see `TableComparer.view`."""
        try:
            yield ClickhouseView(self, self._connected(), front, self._columns())
        except PermissionMissing as error:
            raise TableRejected(str(error)) from None

    def close(self) -> None:
        """Drop the tables of the comparison, and disconnect."""
        client, self._client = self._client, None
        if client is not None:
            try:
                for name in (_EXPECTED, _WINDOW, _COMPARED, _SEEN, _EXTRA):
                    client.execute(self.label, f"DROP TABLE IF EXISTS {self.own(name)}")
            finally:
                client.close()

    @property
    def label(self) -> str:
        """What messages call the table."""
        return table_label(self.owner, self.destination)

    def place(self, name: str) -> tuple[str, ...]:
        """Return database and name of a table of the comparison."""
        *outer, table = self.destination
        digest = hashlib.sha256(f"{self.owner.name}/{table}".encode()).hexdigest()[:16]
        return (*outer, f"_deltaforge_{name}_{digest}")

    def own(self, name: str) -> str:
        """Return the same as it is written in queries."""
        return table_name(self.place(name))

    def _connected(self) -> ClickhouseClient:
        if self._client is None:
            client = ClickhouseClient(self.config, self.config.send_timeout_secs)
            # A process that was killed may have left it.
            client.execute(self.label, f"DROP TABLE IF EXISTS {self.own(_SEEN)}")
            self._client = client
        return self._client

    def _columns(self) -> Mapping[str, str]:
        """Return the types of the table's columns, by name.

        Raises:
            TableRejected: There is no such table, or another sink writes it.
        """
        target = ClickhouseTarget(
            self._connected(), self.owner, _named(self.destination), "current", False, _unguarded
        )
        existing = target.find()
        if existing is None:
            raise TableRejected(f"there is no {self.label}")
        mark = TableMark.from_comment(existing.comment)
        if mark is not None and (mark.pipeline, mark.sink) != (
            self.owner.pipeline,
            self.owner.sink_id,
        ):
            raise TableRejected(f"{self.label} is written by another sink")
        return existing.columns


@dataclass(slots=True)
class ClickhouseView:
    """The table as it is; implements `ComparedView`."""

    comparer: ClickhouseComparer
    client: ClickhouseClient
    through: int
    existing: Mapping[str, str]
    _columns: Sequence[str] = ()
    _applied: int = 0

    def load(self, rows: StagedTable) -> None:
        """Apply the rows of a window; see `ComparedView.load`."""
        self._apply(rows)
        expected = self.comparer.own(_EXPECTED)
        self._make(_WINDOW, f"SELECT {self._key()} FROM {expected} FINAL WHERE {DELETED} = 0")

    def change(self, changes: StagedTable) -> None:
        """Apply changes after the window was read; see `ComparedView.change`."""
        self._apply(changes)

    def differences(self) -> ComparedRows:
        """Compare the rows with the keys of the window; see `ComparedView.differences`."""
        window, seen = self.comparer.own(_WINDOW), self.comparer.own(_SEEN)
        self._execute(
            f"CREATE TABLE IF NOT EXISTS {seen} ENGINE = MergeTree ORDER BY tuple()"
            f" AS SELECT * FROM {window} WHERE false"
        )
        self._execute(f"INSERT INTO {seen} SELECT * FROM {window}")
        self._make(_COMPARED, self._compared())
        (rows,) = self._rows(f"SELECT count() AS rows FROM {window}")
        flags = [f"countIf(df_d{n}) AS df_c{n}" for n, _ in enumerate(self._values)]
        counts = [*(f"countIf(df_kind = '{kind}') AS {kind}" for kind in _KINDS), *flags]
        (count,) = self._rows(f"SELECT {', '.join(counts)} FROM {self.comparer.own(_COMPARED)}")
        kinds = {kind: int(count[kind]) for kind in _KINDS if int(count[kind])}
        columns = {
            name: int(count[f"df_c{n}"])
            for n, name in enumerate(self._values)
            if int(count[f"df_c{n}"])
        }
        listed = self._listed() if kinds else []
        return ComparedRows(int(rows["rows"]), kinds, columns, listed)

    def repair(self) -> bool:
        """Give the rows that differ the values that they should have; see `ComparedView.repair`."""
        names = [*self._names(), *self._values]
        values = [f"df_k{n}" for n, _ in enumerate(self._names())]
        values += [f"df_e{n}" for n, _ in enumerate(self._values)]
        compared = self.comparer.own(_COMPARED)
        self._insert(names, values, f"{compared} WHERE df_kind <> 'extra'", "u")
        keys = values[: len(self._names())]
        self._insert(self._names(), keys, f"{compared} WHERE df_kind = 'extra'", "d")
        return True

    def extra_rows(self) -> ComparedRows:
        """Return the rows whose keys no window had; see `ComparedView.extra_rows`."""
        self._make(_EXTRA, self._extra())
        extra = self.comparer.own(_EXTRA)
        (count,) = self._rows(f"SELECT count() AS rows FROM {extra}")
        shown = ", ".join(f"{_text(quoted(name))} AS {quoted(name)}" for name in self._names())
        query = f"SELECT {shown or '1'} FROM {extra} LIMIT {MOST_LISTED}"
        listed = [
            RowDifference("extra", {name: row[name] for name in self._names()})
            for row in self._rows(query)
        ]
        return ComparedRows(kinds={"extra": int(count["rows"])}, listed=listed)

    def remove_extra_rows(self) -> bool:
        """Delete the rows whose keys no window had; see `ComparedView.remove_extra_rows`."""
        if not self._names():
            raise TableRejected(
                f"{self.comparer.label} has rows, and the source has none and never had any since "
                "the journal begins; load the table again (deltaforge resync)"
            )
        keys = [quoted(name) for name in self._names()]
        self._insert(self._names(), keys, self.comparer.own(_EXTRA), "d")
        return True

    @property
    def _table(self) -> str:
        return table_name(self.comparer.destination)

    @property
    def _values(self) -> Sequence[str]:
        """The columns that are compared by value."""
        return [name for name in self._columns if name not in self._names()]

    def _names(self) -> Sequence[str]:
        return self.comparer.keys

    def _key(self, row: str = "") -> str:
        return ", ".join(row + quoted(name) for name in self._names())

    def _apply(self, table: StagedTable) -> None:
        """Apply staged rows to the table of expected rows."""
        types = self._fitting(table)
        comparer = self.comparer
        if not self._columns:  # those of the window count: changes may have older ones
            self._columns = [column.name for column in table.columns.columns]
            comparer.keys = table.key
            self._execute(f"DROP TABLE IF EXISTS {comparer.own(_EXPECTED)}")
            columns = ", ".join(f"{quoted(name)} {type_}" for name, type_ in types.items())
            self._execute(
                f"CREATE TABLE {comparer.own(_EXPECTED)} ({columns})"
                f" ENGINE = ReplacingMergeTree({VERSION}, {DELETED}) ORDER BY ({self._key()})"
            )
        # Versions of its own: later than those of what was applied before.
        order = {number: at for at, number in enumerate(sorted(table.segments), self._applied + 1)}
        self._applied += len(order)
        places = {number: SegmentPlace(at, at, 0.0) for number, at in order.items()}
        versions = VersionMaker(places, by_time=False)
        expected = replace(table, destination=comparer.place(_EXPECTED))
        target = ClickhouseTarget(
            self.client, comparer.owner, expected, "current", False, _unguarded
        )
        rows = CurrentRows(target, RowMaker(comparer.label, table, "current", types, versions))
        for step in table.steps:
            rows.apply(step)

    def _fitting(self, table: StagedTable) -> Mapping[str, str]:
        """Return the types that the table has for columns of staged rows, and for its own.

        Raises:
            TableRejected: The table lacks a column, or a column has a type without these values.
        """
        label, types = self.comparer.label, {}
        for column in table.columns.columns:
            own = self.existing.get(column.name)
            if own is None:
                raise TableRejected(f"{label} has no column {column.name}")
            if not holds(own, column_type(column.type)):
                raise TableRejected(
                    f"{label}: its column {column.name} has the type {own}, which does not hold "
                    "the values of the source's column"
                )
            types[column.name] = own
        return types | {name: self.existing[name] for name in ROW_COLUMNS}

    def _compared(self) -> str:
        """Return the query of the rows of the window that differ."""
        window = self.comparer.own(_WINDOW)
        chosen = [f"w.{quoted(name)} AS df_k{n}" for n, name in enumerate(self._names())]
        differs = []
        for number, name in enumerate(self._values):
            ours, theirs = f"e.{quoted(name)}", f"t.{quoted(name)}"
            differs.append(f"df_d{number}")
            chosen += [f"{ours} AS df_e{number}", f"{theirs} AS df_t{number}"]
            chosen.append(
                f"e.df_known AND t.df_known AND {_exact(ours)} <> {_exact(theirs)} AS df_d{number}"
            )
        kind = (
            "multiIf(e.df_known AND NOT t.df_known, 'missing',"
            " t.df_known AND NOT e.df_known, 'extra',"
            f" {' OR '.join(differs) or 'false'}, 'different', '')"
        )
        chosen += [f"{kind} AS df_kind", "v.df_newest AS df_version"]
        of_window = f"({self._key()}) IN (SELECT {self._key()} FROM {window})"
        return (
            f"SELECT {', '.join(chosen)} FROM {window} AS w"
            f" LEFT ANY JOIN (SELECT *, true AS df_known FROM {self.comparer.own(_EXPECTED)} FINAL"
            f" WHERE {DELETED} = 0) AS e ON {self._same_key('e')}"
            f" LEFT ANY JOIN (SELECT *, true AS df_known FROM {self._table} FINAL"
            f" WHERE {DELETED} = 0 AND {of_window}) AS t ON {self._same_key('t')}"
            f" LEFT ANY JOIN (SELECT {self._key()}, max({VERSION}) AS df_newest FROM {self._table}"
            f" WHERE {of_window} GROUP BY {self._key()}) AS v ON {self._same_key('v')}"
            " WHERE df_kind <> ''"
        )

    def _extra(self) -> str:
        """Return the query of the keys of rows that no window had, and no change has added."""
        rows = f"{self._table} FINAL WHERE {DELETED} = 0"
        if not self._names():
            return f"SELECT {VERSION} AS df_version FROM {rows}"
        tables = [self.comparer.own(_SEEN)] if self._exists(_SEEN) else []
        if self._columns:
            expected = self.comparer.own(_EXPECTED)
            tables.append(f"(SELECT {self._key()} FROM {expected} FINAL WHERE {DELETED} = 0)")
        unknown = "".join(f" AND ({self._key()}) NOT IN {table}" for table in tables)
        return f"SELECT {self._key()}, {VERSION} AS df_version FROM {rows}{unknown}"

    def _exists(self, name: str) -> bool:
        (answer,) = self._rows(f"EXISTS TABLE {self.comparer.own(name)}")
        return bool(answer["result"])

    def _same_key(self, row: str) -> str:
        return " AND ".join(f"w.{quoted(name)} = {row}.{quoted(name)}" for name in self._names())

    def _insert(
        self, names: Sequence[str], values: Sequence[str], source: str, operation: str
    ) -> None:
        """Insert rows, or deletes, with versions after those that rows had when compared."""
        own = {
            OP: f"'{operation}'",
            VERSION: "df_version + 1",
            DELETED: "1" if operation == "d" else "0",
            TIME: "now64(6, 'UTC')",
        }
        columns = ", ".join([*map(quoted, names), *own])
        self._execute(
            f"INSERT INTO {self._table} ({columns})"
            f" SELECT {', '.join([*values, *own.values()])} FROM {source}"
        )

    def _listed(self) -> list[RowDifference]:
        """Return the first rows of the window that differ."""
        names, keys = self._names(), [f"df_k{n}" for n, _ in enumerate(self._names())]
        texts = [*keys]
        for number, _ in enumerate(self._values):
            texts += [f"df_e{number}", f"df_t{number}"]
        chosen = [f"{_text(name)} AS x_{name}" for name in texts]
        chosen += ["df_kind", *(f"df_d{n}" for n, _ in enumerate(self._values))]
        rows = self._rows(
            f"SELECT {', '.join(chosen)} FROM {self.comparer.own(_COMPARED)}"
            f" ORDER BY {', '.join(keys)} LIMIT {MOST_LISTED}"
        )
        listed = []
        for row in rows:
            differing = [(n, name) for n, name in enumerate(self._values) if row[f"df_d{n}"]]
            listed.append(
                RowDifference(
                    row["df_kind"],
                    {name: row[f"x_df_k{n}"] for n, name in enumerate(names)},
                    [name for _, name in differing],
                    {name: row[f"x_df_e{n}"] for n, name in differing},
                    {name: row[f"x_df_t{n}"] for n, name in differing},
                )
            )
        return listed

    def _make(self, name: str, query: str) -> None:
        """Make a table of the comparison of the rows of a query."""
        self._execute(f"DROP TABLE IF EXISTS {self.comparer.own(name)}")
        self._execute(f"CREATE TABLE {self.comparer.own(name)} ENGINE = Memory AS {query}")

    def _rows(self, query: str) -> list[dict[str, Any]]:
        return self.client.rows(self.comparer.label, query)

    def _execute(self, query: str) -> None:
        self.client.execute(self.comparer.label, query)


def _unguarded() -> None:
    """Let everything pass: tables of the comparison are nobody else's."""


def _named(destination: tuple[str, ...]) -> StagedTable:
    """Return a table without changes, of which only the name matters."""
    return StagedTable(destination, ("", None, ""), TypedSchema(()), (), frozenset(), (), 0)


def _exact(value: str) -> str:
    """Return what is equal for the same values only: unlike NaN, and 0 and -0."""
    return f"(isNull({value}), ifNull(toString({value}), ''))"


def _text(value: str) -> str:
    return f"toValidUTF8(toString({value}))"
