"""Finds or makes the table that changes are applied to, and alters it so that it fits them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import orjson

from deltaforge_dagster.errors import TableRejected
from deltaforge_dagster.pipeline.lake.spark_failures import is_not_found
from deltaforge_dagster.sinks.base import SendGuard
from deltaforge_dagster.sinks.lake.config import LakeSinkConfig, TableLayout
from deltaforge_dagster.sinks.lake.dialect import (
    COLUMNS,
    COMMITTED,
    INT64_TIMESTAMPS,
    OWNER,
    PENDING,
    SOURCE,
    UNFILLED,
    LakeColumn,
    LakeDialect,
    properties_text,
)
from deltaforge_dagster.sinks.lake.pending import pending_name
from deltaforge_dagster.sinks.lake.statements import (
    WrittenColumn,
    holds,
    literal,
    own_columns,
    pending_columns,
    quoted,
    sql_type,
)
from deltaforge_dagster.sinks.tables.staged import StagedTable
from deltaforge_dagster.sinks.tables.writer import (
    TableColumns,
    TableOwner,
    column_changed,
    column_gone,
    other_source,
    table_gone,
)

if TYPE_CHECKING:  # PySpark is imported when a session is asked for
    from pyspark.sql import Row

    from deltaforge_dagster.pipeline.spark_client import SparkSession


@dataclass(frozen=True, slots=True)
class Ownership:
    """The property of a table that names its owner.

    Attributes:
        uid, pipeline, sink: See `TableOwner`; all are empty if the table has no owner.
        base: The number that is added to a segment's number to make the position of a row, so that
            rows of a former owner have lower positions.
    """

    uid: str = ""
    pipeline: str = ""
    sink: str = ""
    base: int = 0

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the owner in the property's text; no owner if the text is not such a property."""
        try:
            return cls(**orjson.loads(text))
        except (ValueError, TypeError):
            return cls()

    def to_json(self) -> str:
        """Return the text of the property."""
        return orjson.dumps(self).decode()

    def is_of(self, owner: TableOwner, *, incarnation: bool = True) -> bool:
        """Return whether the table belongs to a writer.

        If `incarnation` is false, it may also belong to an earlier incarnation of the pipeline.
        """
        same = (self.pipeline, self.sink) == (owner.pipeline, owner.sink_id)
        return same and (self.uid == owner.uid or not incarnation)


@dataclass(frozen=True, slots=True)
class TableCommit:
    """The changes that are applied to a table, and what is needed to apply them.

    Attributes:
        session: Executes the statements.
        dialect: Format of the table.
        config: Options of the sink.
        owner: Who writes.
        table: The changes.
        guard: Called before each statement that changes anything.
        exists: Whether the table has everything before these changes, so that it must not be made
            again.
        pending: Whether the table is the one with the pending changes of another one.
        series: What the commits are stamped with besides the owner; each series has numbers of its
            own.
    """

    session: SparkSession
    dialect: LakeDialect
    config: LakeSinkConfig
    owner: TableOwner
    table: StagedTable
    guard: SendGuard
    exists: bool
    pending: bool = False
    series: str = ""

    @property
    def stamp(self) -> str:
        """The writer, as commits are stamped with it."""
        return f"{self.owner.name}{self.series}"

    @property
    def label(self) -> str:
        """What messages call the table."""
        return table_label(self.dialect, self.owner, self.table.destination)

    @property
    def columns(self) -> Sequence[LakeColumn]:
        """The source's columns."""
        return [
            LakeColumn(
                column.name,
                sql_type(column.type),
                column.source_type,
                column.name in self.table.key,
            )
            for column in self.table.columns.columns
        ]

    @property
    def own_columns(self) -> Sequence[LakeColumn]:
        """The columns that the table has besides the source's."""
        types = own_columns(self.config.mode, soft_deletes=self.config.soft_deletes)
        if self.pending:
            types = pending_columns()
        return [LakeColumn(*column) for column in types.items()]

    @property
    def layout(self) -> TableLayout:
        """How a new table is partitioned and clustered."""
        return self.config.layout_of(*self.table.source)

    @property
    def unknown_columns(self) -> Mapping[str, Sequence[str]]:
        """Columns of `partition_by` and `cluster_by` that the table would not have, by option."""
        names = {column.name.lower() for column in (*self.columns, *self.own_columns)}
        wanted = {
            "partition_by": [partition.column for partition in self.layout.partition_by],
            "cluster_by": self.layout.cluster_by,
        }
        unknown = {
            option: [column for column in columns if column.lower() not in names]
            for option, columns in wanted.items()
        }
        return {option: columns for option, columns in unknown.items() if columns}

    def rows(self, query: str) -> Sequence[Row]:
        """Return the rows of a query."""
        return self.session.sql(query).collect()

    def execute(self, *statements: str) -> None:
        """Execute statements that change something."""
        for statement in statements:
            self.guard()
            self.session.sql(statement)


@dataclass(slots=True)
class LakeTarget:
    """A table that is written to, as it was last seen.

    Attributes:
        name: Its name in SQL.
        columns: Name and type of each column, by the name in lower case.
        base: See `Ownership`.
        committed: Number of the last commit that it is known to contain; -1 if none is known.
        identities: What identifies each column of the source, by name in lower case, as far as it
            is known.
        branch: The branch that the next commit writes to, which equals the table; None if there is
            none.
        token: The value that it has in common with the table of its pending changes (`PENDING`);
            None without such a table.
        unfilled: Values of columns that were added and are not filled in existing rows yet, by name
            in lower case (`StagedTable.fills`).
        int64_timestamps: Whether none of its files has timestamps as INT96.
    """

    name: str
    columns: dict[str, tuple[str, str]]
    base: int = 0
    committed: int = -1
    identities: dict[str, str] = field(default_factory=dict)
    branch: str | None = None
    token: str | None = None
    unfilled: dict[str, str] = field(default_factory=dict)
    int64_timestamps: bool = False

    def moves(self, commit: TableCommit) -> Sequence[tuple[str, str]]:
        """Return old and new names of columns to rename, in an order in which no name is taken.

        Raises:
            TableRejected: There is no such order, or it is not certain which column is which.
        """
        names = {folded: name for folded, (name, _) in self.columns.items()}
        columns = TableColumns(names, self.identities, str.lower)
        return columns.moves(commit.table, commit.label, commit.owner.resync_command(commit.table))

    def rename(self, commit: TableCommit, moves: Sequence[tuple[str, str]]) -> None:
        """Rename the columns that the table has, and store after each what identifies it."""
        for old, new in moves:
            if old.lower() in self.columns and new.lower() not in self.columns:
                properties = table_properties(commit.session, self.name)
                commit.execute(*commit.dialect.rename(self.name, old, new, properties))
                self.columns = columns_of(commit.session, self.name)
            if (identity := self.identities.get(old.lower())) is not None:
                self._note_identities(commit, self.identities | {new.lower(): identity})

    def identify(self, commit: TableCommit) -> None:
        """Store in the table what identifies its columns, if that is not stored yet."""
        identities = {name.lower(): identity for name, identity in commit.table.identities.items()}
        self._note_identities(commit, self.identities | identities)

    def _note_identities(self, commit: TableCommit, identities: Mapping[str, str]) -> None:
        present = {name: identity for name, identity in identities.items() if name in self.columns}
        if present != self.identities:
            text = properties_text({COLUMNS: identities_text(present)})
            commit.execute(f"ALTER TABLE {self.name} SET TBLPROPERTIES ({text})")
            self.identities = present

    def fit(self, commit: TableCommit) -> Sequence[WrittenColumn]:
        """Add and widen columns of the table; return where the columns of staged rows go.

        Raises:
            TableRejected: A column's type does not hold the values, or the table has lost a column.
        """
        missing = []
        for column in (*commit.columns, *commit.own_columns):
            existing = self.columns.get(column.name.lower())
            if existing is None:
                self._check_new(commit, column.name)
                missing.append(column)
            elif not holds(existing[1], commit.dialect.stored(column.type)):
                self._widen(commit, column)
        if missing:
            fills = {
                column.name.lower(): commit.table.fills[column.name]
                for column in missing
                if column.name in commit.table.fills and not commit.pending
            }
            # Stored first: a run that finds the columns must know that they are to be filled.
            if fills:
                self._note_unfilled(commit, self.unfilled | fills)
            commit.execute(*commit.dialect.add_columns(self.name, missing))
            self.columns = columns_of(commit.session, self.name)
        return [
            WrittenColumn(column.name, name, column.type, type_)
            for column in commit.columns
            for name, type_ in [self.columns[column.name.lower()]]
        ]

    def fill(self, commit: TableCommit, written: str) -> str:
        """Return the statement that fills added columns in the existing rows of the table.

        Args:
            commit: The commit.
            written: Name of the table or branch that statements write to.
        """
        assigned = [
            f"{quoted(self.columns[name][0])} = CAST({literal(text)} AS {self.columns[name][1]})"
            for name, text in self.unfilled.items()
        ]
        where = " WHERE df_is_current" if commit.config.mode == "history" else ""
        return f"UPDATE {written} SET {', '.join(assigned)}{where}"

    def filled(self, commit: TableCommit) -> None:
        """Store that the columns are filled."""
        self._note_unfilled(commit, {})

    def _note_unfilled(self, commit: TableCommit, unfilled: dict[str, str]) -> None:
        text = properties_text({UNFILLED: orjson.dumps(unfilled).decode() if unfilled else ""})
        commit.execute(f"ALTER TABLE {self.name} SET TBLPROPERTIES ({text})")
        self.unfilled = unfilled

    def _check_new(self, commit: TableCommit, name: str) -> None:
        """Check that a column that the table lacks is not one that it has lost."""
        identity = self.identities.get(name.lower())
        if identity is not None and identity == commit.table.identities.get(name):
            raise column_gone(commit.label, name, commit.owner.resync_command(commit.table))

    def _widen(self, commit: TableCommit, column: LakeColumn) -> None:
        name, old = self.columns[column.name.lower()]
        left = None if commit.pending else commit.table.left.get(name)
        if left is not None and left != old and not holds(old, left):
            command = commit.owner.resync_command(commit.table)
            raise column_changed(commit.label, name, (old, left), command)
        new = commit.dialect.stored(column.type)
        statements = commit.dialect.widen(self.name, name, old, new) if holds(new, old) else None
        if statements is None:
            raise TableRejected(
                f"{commit.label}: its column {name} has the type {old}, which does not hold the "
                f"values of the source's column, {new}; declare a type that it holds under the "
                f"sink's `types`, change the type of the table's column, or have the table loaded "
                f"again",
                remedy=commit.owner.resync_command(commit.table),
            )
        commit.execute(*statements)
        self.columns[column.name.lower()] = (name, new)


def open_target(commit: TableCommit) -> LakeTarget:
    """Return the table of a commit; make it if it does not exist.

    Raises:
        TableRejected: The table is gone, is not this sink's, or lacks columns of its layout.
    """
    name = commit.dialect.table(commit.table.destination)
    if commit.exists and not table_exists(commit, name):
        raise table_gone(commit.label, commit.owner.resync_command(commit.table))
    # A table that exists keeps the columns by which it is partitioned, even if the source has
    # dropped them. So only a new table needs them among the source's columns.
    if not commit.unknown_columns or not table_exists(commit, name):
        _create(commit, {}, replace=False)
    properties = table_properties(commit.session, name)
    target = LakeTarget(name, columns_of(commit.session, name), token=properties.get(PENDING))
    target.int64_timestamps = properties.get(INT64_TIMESTAMPS) == "true"
    target.base = _take_ownership(commit, target, properties)
    return target


def replaceable(commit: TableCommit) -> Mapping[str, str] | None:
    """Return the properties of the table that a commit may replace; None if there is no table.

    Raises:
        TableRejected: The table is not this sink's.
    """
    name = commit.dialect.table(commit.table.destination)
    if not table_exists(commit, name):
        return None
    properties = table_properties(commit.session, name)
    _checked_owner(commit, name, properties)
    return properties


def replace_table(commit: TableCommit, token: str | None, *, exists: bool) -> None:
    """Replace the table of a commit by one without rows and commits; make it if there is none.

    The statement is not fenced. In Iceberg, if a killed run has sent it and Spark executes it only
    after a successor has replaced the table and added rows, it removes these rows. But the
    statement starts no job and takes only a moment, while a successor has to wait for the lease and
    for a session.

    Args:
        commit: The commit.
        token: The new table's `PENDING` (`LakeTarget.token`); None without a table of pending
            changes.
        exists: Whether there is a table, which the sink may replace (`replaceable`).

    Raises:
        TableRejected: The table would lack columns of its layout.
    """
    stamps = {} if token is None else {PENDING: token}
    if exists and commit.dialect.branches is not None:
        # A table that is replaced keeps the properties that the statement does not set.
        stamps[COMMITTED] = ""
    _create(commit, stamps, replace=exists)


_LAID_OUT = {"partition_by": "partitioned", "cluster_by": "clustered"}


def check_layout(commit: TableCommit) -> None:
    """Check that a commit's table has the columns by which it is partitioned and clustered.

    Raises:
        TableRejected: It lacks one.
    """
    for option, columns in commit.unknown_columns.items():
        raise TableRejected(
            f"{commit.label} cannot be {_LAID_OUT[option]} by {', '.join(columns)}, which "
            f"{commit.table.source_name} does not have; correct the sink's `{option}`"
        )


def _create(commit: TableCommit, stamps: Mapping[str, str], *, replace: bool) -> None:
    check_layout(commit)
    dialect, destination = commit.dialect, commit.table.destination
    owned = Ownership(commit.owner.uid, commit.owner.pipeline, commit.owner.sink_id)
    commit.execute(
        *dialect.prepare(destination),
        dialect.create(
            destination,
            [*commit.columns, *commit.own_columns],
            commit.layout,
            {
                OWNER: owned.to_json(),
                SOURCE: commit.table.source_name,
                COLUMNS: identities_text(commit.table.identities),
                INT64_TIMESTAMPS: "true",
                **stamps,
            },
            replace=replace,
        ),
    )


def configure(session: SparkSession, settings: Mapping[str, str]) -> None:
    """Set in a session what it needs to read or write the tables of a sink."""
    for name, value in settings.items():
        session.conf.set(name, value)


def table_properties(session: SparkSession, name: str) -> Mapping[str, str]:
    """Return the properties of a table, given by its name in SQL."""
    return {row.key: row.value for row in session.sql(f"SHOW TBLPROPERTIES {name}").collect()}


def table_label(dialect: LakeDialect, owner: TableOwner, destination: Sequence[str]) -> str:
    """Return what messages call a table."""
    return f"{dialect.name} table {'.'.join(destination)} of sink {owner.sink_id}"


def _take_ownership(commit: TableCommit, target: LakeTarget, properties: Mapping[str, str]) -> int:
    """Return the base of positions, after making the table this sink's unless it already is."""
    ownership = _checked_owner(commit, target.name, properties)
    if ownership is not None:
        target.identities = orjson.loads(properties.get(COLUMNS) or "{}")
        target.unfilled = orjson.loads(properties.get(UNFILLED) or "{}")
        return ownership.base
    pending_table = commit.dialect.table(pending_name(commit.table.destination))
    tables = [target.name] if "df_position" in target.columns else []
    tables += (
        [pending_table] if target.token is not None and table_exists(commit, pending_table) else []
    )
    lasts = [
        commit.rows(f"SELECT max(df_position) AS last FROM {table}")[0].last for table in tables
    ]
    base = max((last + 1 for last in lasts if last is not None), default=0)
    owner = commit.owner
    owned = Ownership(owner.uid, owner.pipeline, owner.sink_id, base)
    changed = {
        OWNER: owned.to_json(),
        SOURCE: commit.table.source_name,
        COLUMNS: "{}",  # a former owner's identities mean nothing to the new one
    }
    if OWNER not in properties:  # somebody has made the table for the sink, without rows
        changed[INT64_TIMESTAMPS] = "true"
        target.int64_timestamps = True
    commit.execute(f"ALTER TABLE {target.name} SET TBLPROPERTIES ({properties_text(changed)})")
    return owned.base


def _checked_owner(
    commit: TableCommit, name: str, properties: Mapping[str, str]
) -> Ownership | None:
    """Return the owner of a table that is this sink's; None if the sink may take it over.

    Raises:
        TableRejected: The sink may not take it over.
    """
    source = properties.get(SOURCE, commit.table.source_name)
    if source != commit.table.source_name:
        raise other_source(commit.label, source, commit.table.source_name)
    claim = f"ALTER TABLE {name} SET TBLPROPERTIES ('{OWNER}' = '{{}}')"
    if OWNER in properties:
        ownership = Ownership.from_json(properties[OWNER])
        if ownership.is_of(commit.owner):
            return ownership
        if ownership.uid and not ownership.is_of(commit.owner, incarnation=False):
            raise TableRejected(
                f"{commit.label} belongs to sink {ownership.sink} of pipeline "
                f"{ownership.pipeline}; change the sink's `table`, or, if that sink will never "
                f"write to it again, execute {claim}"
            )
    elif has_rows(commit, name):
        raise TableRejected(
            f"{commit.label} exists, with rows that are not from DeltaForge; change the sink's "
            f"`table`, or empty the table, or, if the rows are this sink's after all, execute "
            f"{claim}"
        )
    elif commit.exists:
        raise table_gone(commit.label, commit.owner.resync_command(commit.table))
    return None


def table_exists(commit: TableCommit, name: str) -> bool:
    """Return whether there is a table of a name.

    Any other problem with the table or its location does not mean that it is gone, and is raised.
    """
    from pyspark.errors import PySparkException  # noqa: PLC0415 - slow

    try:
        commit.rows(f"SHOW TBLPROPERTIES {name}")
    except PySparkException as error:
        if is_not_found(error):
            return False
        raise
    return True


def has_rows(commit: TableCommit, name: str) -> bool:
    """Return whether a table, given by its name in SQL, has any row."""
    return bool(commit.rows(f"SELECT 1 FROM {name} LIMIT 1"))


def identities_text(identities: Mapping[str, str]) -> str:
    """Return the property `COLUMNS` for columns with these identities, by name."""
    return orjson.dumps({name.lower(): identity for name, identity in identities.items()}).decode()


def columns_of(session: SparkSession, table: str) -> dict[str, tuple[str, str]]:
    """Return the columns of a table: name and type, by the name in lower case."""
    fields = session.table(table).schema.fields
    return {column.name.lower(): (column.name, column.dataType.simpleString()) for column in fields}
