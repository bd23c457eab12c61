"""Finds or creates the tables of a sink, and alters them to have the columns of staged rows.

The comment of a table says whose it is (`TableMark`). It cannot record which commits the table has,
because it is not written atomically with the rows; the versions of the rows tell that.

`column_type` says what a source's column is in ClickHouse, and `holds` which types of an existing
table hold its values.
"""

# ruff: noqa: S608 - names and texts in queries are quoted

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

import orjson

from deltaforge_dagster.errors import TableRejected
from deltaforge_dagster.sinks.base import SendGuard
from deltaforge_dagster.sinks.clickhouse.client import (
    ClickhouseClient,
    literal,
    quoted,
    table_name,
)
from deltaforge_dagster.sinks.tables.staged import StagedTable
from deltaforge_dagster.sinks.tables.writer import (
    TableColumns,
    TableOwner,
    column_changed,
    column_gone,
    other_source,
)
from deltaforge_dagster.sources.value_types import ValueType
from deltaforge_dagster.state.table_commits import TableFigures

VERSION, DELETED, OP, TIME, EVENT = "_version", "_deleted", "_op", "_source_ts", "_event_id"
"""The columns that tables have beside those of the source."""

ROW_COLUMNS = (OP, VERSION, DELETED, TIME)
"""Those of them that every table has, in every mode."""

MOMENT = "DateTime64(6, 'UTC')"
"""The type of timestamps. One without a time zone has the same date and time as in the source."""

_SCALARS = {
    "boolean": "Bool",
    "text": "String",
    "json": "String",
    "binary": "String",
    "geometry": "String",
    "uuid": "UUID",
    "date": "Date32",
    "timestamp": MOMENT,
}

_MARK = "deltaforge"
_REPLACING = re.compile(r"ReplacingMergeTree\([^)]*\b_version\b")

_CALL = re.compile(r"\w\(")
"""Matches a function in a sorting key, whose columns would be in it as well."""


@dataclass(frozen=True, slots=True)
class TableMark:
    """Whose a table is: the JSON object `{"deltaforge": {...}}` as its comment.

    Attributes:
        uid, pipeline, sink: See `TableOwner`.
        source: Name of the source's table.
        log: Identity of the server whose log the rows' positions are of.
        columns: What identifies columns of the source, by name (`StagedTable.identities`), as far
            as that is known.
    """

    uid: str
    pipeline: str
    sink: str
    source: str
    log: str
    columns: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_comment(cls, comment: str) -> Self | None:
        """Return the mark in a comment, None if there is none."""
        try:
            return cls(**orjson.loads(comment)[_MARK])
        except (ValueError, TypeError, KeyError):
            return None

    def to_comment(self) -> str:
        """Return the comment."""
        return orjson.dumps({_MARK: asdict(self)}).decode()


@dataclass(frozen=True, slots=True)
class FoundTable:
    """A table as it is.

    Attributes:
        engine: Its engine with the arguments.
        comment: Its comment.
        sorted_by: The columns that it is sorted by.
        sorting_key: The same as it was declared; it may have expressions.
        partitioned_by: The columns that it is partitioned by.
        columns: Type of each column, by name.
    """

    engine: str
    comment: str
    sorted_by: Sequence[str]
    sorting_key: str
    partitioned_by: Sequence[str]
    columns: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ClickhouseTarget:
    """A table of a sink.

    Attributes:
        client: Executes queries.
        owner: Who writes.
        table: The changes.
        mode: What the table holds.
        makes: Whether the sink may make and change tables.
        guard: Called before each statement that changes anything.
    """

    client: ClickhouseClient
    owner: TableOwner
    table: StagedTable
    mode: str
    makes: bool
    guard: SendGuard

    @property
    def label(self) -> str:
        """What messages call the table."""
        return table_label(self.owner, self.table.destination)

    @property
    def name(self) -> str:
        """Its name as it is written in queries."""
        return table_name(self.table.destination)

    @property
    def mark(self) -> TableMark:
        """What the comment of the table says."""
        owner = self.owner
        return TableMark(
            owner.uid,
            owner.pipeline,
            owner.sink_id,
            self.table.source_name,
            owner.log,
            self.table.identities,
        )

    @property
    def resync_command(self) -> str:
        """The command that has the table loaded again."""
        return self.owner.resync_command(self.table)

    def execute(self, query: str) -> None:
        """Execute a statement that changes something."""
        self.guard()
        self.client.execute(self.label, query)

    def find(self) -> FoundTable | None:
        """Return the table as it is, None if there is none."""
        tables = self._catalog("engine_full, comment, sorting_key")
        if not tables:
            return None
        database, name = map(literal, self.table.destination)
        columns = self.client.rows(
            self.label,
            "SELECT name, type, is_in_sorting_key, is_in_partition_key FROM system.columns"
            f" WHERE database = {database} AND table = {name} ORDER BY position",
        )
        (row,) = tables
        return FoundTable(
            row["engine_full"],
            row["comment"],
            [column["name"] for column in columns if column["is_in_sorting_key"]],
            row["sorting_key"],
            [column["name"] for column in columns if column["is_in_partition_key"]],
            {column["name"]: column["type"] for column in columns},
        )

    def figures(self) -> TableFigures:
        """Return rows and bytes of all parts of the table.

        Replaced rows count until the server has merged them.
        """
        counted = self._catalog("total_rows, total_bytes")
        if not counted or counted[0]["total_rows"] is None:
            return TableFigures()
        rows, size = (counted[0][name] for name in ("total_rows", "total_bytes"))
        return TableFigures(
            rows=int(rows), bytes=None if size is None else int(size), estimated=True
        )

    def _catalog(self, columns: str) -> list[dict[str, Any]]:
        """Return these columns of the table's row in `system.tables`; empty if there is none."""
        database, name = map(literal, self.table.destination)
        return self.client.rows(
            self.label,
            f"SELECT {columns} FROM system.tables WHERE database = {database} AND name = {name}",
        )

    def create(self, *, replace: bool = False) -> None:
        """Make the table, or replace it by one without rows.

        Raises:
            TableRejected: It has no key.
        """
        verb = "CREATE OR REPLACE TABLE" if replace else "CREATE TABLE IF NOT EXISTS"
        columns = [f"{quoted(name)} {type_}" for name, type_ in self._wanted_types().items()]
        version = quoted(VERSION)
        # Each commit asks for rows from a version on, to see whether it was delivered before.
        columns.append(f"INDEX deltaforge_version {version} TYPE minmax GRANULARITY 1")
        keys = [quoted(name) for name in self.table.key]
        if self.mode == "current" and not keys:
            raise TableRejected(
                f"{self.label}: {self.table.source_name} has no primary key, which mode current "
                "needs: name the columns of a key under `keys`, or use mode changelog"
            )
        if self.mode == "current":
            engine = f"ReplacingMergeTree({version}, `_deleted`) ORDER BY ({', '.join(keys)})"
        else:
            # Without the window, a table that is not replicated ignores deduplication tokens.
            engine = (
                f"MergeTree ORDER BY ({', '.join([*keys, version])})"
                " SETTINGS allow_nullable_key = 1, non_replicated_deduplication_window = 1000"
            )
        comment = literal(self.mark.to_comment())
        self.execute(
            f"{verb} {self.name} ({', '.join(columns)}) ENGINE = {engine} COMMENT {comment}"
        )

    def check_owned(self, existing: FoundTable) -> TableMark | None:
        """Return the mark of a table that the sink may write to; None if it has none.

        Raises:
            TableRejected: The table is somebody else's, or has the rows of another table.
        """
        mark = TableMark.from_comment(existing.comment)
        claim = f"ALTER TABLE {self.name} MODIFY COMMENT ''"
        if mark is None:
            if self.makes and self._has_rows():
                raise TableRejected(
                    f"{self.label} exists, with rows that are not from this sink; empty it, have "
                    "the sink write to another table, or set `auto_create: false` to add to the "
                    "rows that it has"
                )
            return None
        if mark.source != self.table.source_name:
            raise other_source(self.label, mark.source, self.table.source_name)
        if (mark.pipeline, mark.sink) != (self.owner.pipeline, self.owner.sink_id):
            raise TableRejected(
                f"{self.label} belongs to sink {mark.sink} of pipeline {mark.pipeline}; change the "
                "sink's `table`, or, if that sink will never write to it again, empty the table "
                f"and execute {claim}"
            )
        return mark

    def rename(self, existing: FoundTable, mark: TableMark | None) -> FoundTable:
        """Rename columns that the source has renamed; return the table afterwards.

        The comment of the table is updated after each renamed column.

        Raises:
            TableRejected: It is not certain which column is which, or the table cannot have the
                names.
        """
        identities = {} if mark is None else dict(mark.columns)
        names = {name: name for name in existing.columns}
        columns = TableColumns(names, identities)
        moves = columns.moves(self.table, self.label, self.resync_command)
        for old, new in moves:
            change = f"RENAME COLUMN {quoted(old)} TO {quoted(new)}"
            if old in {*existing.sorted_by, *existing.partitioned_by}:
                raise TableRejected(
                    f"{self.label}: the source has renamed column {old} to {new}, and the table "
                    "is sorted or partitioned by it; have the table loaded again",
                    remedy=self.resync_command,
                )
            if not self.makes:
                raise TableRejected(
                    f"{self.label}: the source has renamed column {old} to {new}, and "
                    f"`auto_create` is false: execute ALTER TABLE {self.name} {change}"
                )
            self._alter(change)
            if old in identities:
                identities[new] = identities.pop(old)
                self._comment(replace(self.mark, columns=identities).to_comment())
        return (self.find() or existing) if moves else existing

    def claim(self, existing: FoundTable) -> FoundTable:
        """Write the sink's mark into the table's comment; return the table afterwards.

        The mark also contains what identifies the columns that the table has. If the sink may not
        change tables, nothing is written.
        """
        mark = TableMark.from_comment(existing.comment)
        columns = {} if mark is None else dict(mark.columns)
        for name, identity in self.table.identities.items():
            if name in existing.columns:
                columns[name] = identity
        comment = replace(self.mark, columns=columns).to_comment()
        if not self.makes or existing.comment == comment:
            return existing
        self._comment(comment)
        return replace(existing, comment=comment)

    def _comment(self, comment: str) -> None:
        self.execute(f"ALTER TABLE {self.name} MODIFY COMMENT {literal(comment)}")

    def fit(self, existing: FoundTable) -> Mapping[str, str]:
        """Return the types of the table's columns, after adding and widening columns.

        Raises:
            TableRejected: The table cannot have the rows.
        """
        if self.mode == "current":
            self._check_form(existing)
        columns = dict(existing.columns)
        changes = []
        for name, wanted in self._wanted_types().items():
            actual = columns.get(name)
            if actual is None:
                self._check_new(existing, name)
                # The default is for rows that exist already; rows inserted later have the column.
                fill = self.table.fills.get(name)
                default = (
                    "" if fill is None else f" DEFAULT CAST({literal(fill)}, {literal(wanted)})"
                )
                changes.append(f"ADD COLUMN IF NOT EXISTS {quoted(name)} {wanted}{default}")
            elif holds(actual, wanted):
                continue
            elif holds(wanted, actual) and name not in {
                *existing.sorted_by,
                *own_columns(self.mode),
            }:
                left = self.table.left.get(name)
                if left not in {None, actual} and not holds(actual, left):
                    raise column_changed(self.label, name, (actual, left), self.resync_command)
                wider = plain(wanted)
                wanted = nullable(wider) if is_nullable(actual) else wider  # noqa: PLW2901
                changes.append(f"MODIFY COLUMN {quoted(name)} {wanted}")
            else:
                raise TableRejected(
                    f"{self.label}: its column {name} has the type {actual}, which does not hold "
                    f"the values of {plain(wanted)}; declare a type that it holds under the "
                    "sink's `types`, change the column's type, or have the table loaded again",
                    remedy=self.resync_command,
                )
            columns[name] = wanted
        if changes:
            statement = f"ALTER TABLE {self.name} {', '.join(changes)}"
            if not self.makes:
                raise TableRejected(
                    f"{self.label} lacks columns, or has types that do not hold their values, and "
                    f"`auto_create` is false: execute {statement}"
                )
            self._alter(", ".join(changes))
        return columns

    def _check_new(self, existing: FoundTable, name: str) -> None:
        """Check that a column that the table lacks has not been dropped from it.

        Raises:
            TableRejected: The table had the column.
        """
        mark = TableMark.from_comment(existing.comment)
        identity = None if mark is None else mark.columns.get(name)
        if identity is not None and identity == self.table.identities.get(name):
            raise column_gone(self.label, name, self.resync_command)

    def _alter(self, change: str) -> None:
        self.guard()
        self.client.execute(self.label, f"ALTER TABLE {self.name} {change}", {"alter_sync": "1"})

    def _check_form(self, existing: FoundTable) -> None:
        key = list(self.table.key)
        if not _REPLACING.search(existing.engine):
            raise TableRejected(
                f"{self.label} has no engine ReplacingMergeTree(_version, _deleted), without "
                "which it would keep old rows; drop it, or have it loaded again",
                remedy=self.resync_command,
            )
        if set(existing.sorted_by) != set(key) or _CALL.search(existing.sorting_key):
            raise TableRejected(
                f"{self.label} is sorted by {existing.sorting_key}, but the key of its rows is "
                f"{', '.join(key)}, by which they are replaced; have it loaded again",
                remedy=self.resync_command,
            )
        if not set(existing.partitioned_by) <= set(key):
            raise TableRejected(
                f"{self.label} is partitioned by {', '.join(existing.partitioned_by)}, and rows of "
                "different partitions do not replace one another; partition it by key columns "
                "only, or not at all"
            )

    def _wanted_types(self) -> dict[str, str]:
        """Return the types that the columns have if the sink makes the table."""
        bare = self.table.key if self.mode == "current" else ()
        wanted = {}
        for column in self.table.columns.columns:
            type_ = column_type(column.type)
            wanted[column.name] = type_ if column.name in bare else nullable(type_)
        return wanted | own_columns(self.mode)

    def _has_rows(self) -> bool:
        return bool(self.client.rows(self.label, f"SELECT 1 AS one FROM {self.name} LIMIT 1"))


def table_label(owner: TableOwner, destination: Sequence[str]) -> str:
    """Return what messages call a table."""
    return f"ClickHouse table {'.'.join(destination)} of sink {owner.sink_id}"


def reserved(mode: str) -> Any:
    """Return the function that says why a table has no column of a name, for `check_names`."""
    reserved_names = {name.lower() for name in own_columns(mode)}

    def why(name: str) -> str | None:
        return "it is a column of the sink's own" if name.lower() in reserved_names else None

    return why


def own_columns(mode: str) -> dict[str, str]:
    """Return the types of the columns that a table has beside those of the source, by name."""
    columns = {
        OP: "LowCardinality(String)",
        VERSION: "UInt128",
        DELETED: "UInt8",
        TIME: MOMENT,
    }
    return columns | ({EVENT: "String"} if mode == "changelog" else {})


def column_type(type_: ValueType) -> str:
    """Return the type of values that are not null."""
    match type_.kind:
        case "integer":
            return f"{'' if type_.signed else 'U'}Int{type_.bits}"
        case "float":
            return f"Float{type_.bits}"
        case "decimal":
            return f"Decimal({type_.precision}, {type_.scale})"
        case "list":
            assert type_.element is not None
            return f"Array({nullable(column_type(type_.element))})"
        case kind:
            return _SCALARS[kind]


def nullable(type_: str) -> str:
    """Return the type that has null, too. Arrays cannot be null."""
    return type_ if type_.startswith("Array(") else f"Nullable({type_})"


def is_nullable(type_: str) -> bool:
    """Return whether a column of a type can be null."""
    return _unwrapped(type_, "LowCardinality").startswith("Nullable(")


def plain(type_: str) -> str:
    """Return a type without `LowCardinality` and `Nullable`.

    They do not change what values there are beside null.
    """
    return _unwrapped(_unwrapped(type_, "LowCardinality"), "Nullable")


def holds(target: str, wanted: str) -> bool:
    """Return whether a column of type `target` holds all values of type `wanted`, null aside."""
    target, wanted = plain(target), plain(wanted)
    if target.startswith("Array(") and wanted.startswith("Array("):
        target, wanted = _unwrapped(target, "Array"), _unwrapped(wanted, "Array")
        return (is_nullable(target) or not is_nullable(wanted)) and holds(target, wanted)
    if target == wanted:
        return True
    for pattern, fits in _FITTING:
        if (old := pattern.fullmatch(target)) and (new := pattern.fullmatch(wanted)):
            return fits(old, new)
    return False


def _integer_fits(old: re.Match[str], new: re.Match[str]) -> bool:
    if old[1] == new[1]:
        return int(old[2]) >= int(new[2])
    return not old[1] and int(old[2]) > int(new[2])


def _float_fits(old: re.Match[str], new: re.Match[str]) -> bool:
    return int(old[1]) >= int(new[1])


def _decimal_fits(old: re.Match[str], new: re.Match[str]) -> bool:
    digits, scale = int(old[1]), int(old[2])
    return scale >= int(new[2]) and digits - scale >= int(new[1]) - int(new[2])


def _time_fits(old: re.Match[str], new: re.Match[str]) -> bool:
    """Return whether the unit is the same: with a finer one, `DateTime64` ends earlier."""
    return old[1] == new[1]


_FITTING = (
    (re.compile(r"(U?)Int(\d+)"), _integer_fits),
    (re.compile(r"Float(\d+)"), _float_fits),
    (re.compile(r"Decimal\((\d+), (\d+)\)"), _decimal_fits),
    (re.compile(r"DateTime64\((\d+)(?:, '[^']*')?\)"), _time_fits),
)


def _unwrapped(type_: str, name: str) -> str:
    return type_[len(name) + 1 : -1] if type_.startswith(f"{name}(") else type_
