"""Finds, creates and alters the table that changes are applied to.

All of it happens in the transaction of the commit, whose row in `commits` is locked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import psycopg

from deltaforge_dagster.errors import TableRejected
from deltaforge_dagster.sinks.postgres import commits
from deltaforge_dagster.sinks.postgres.commits import CommitsRow
from deltaforge_dagster.sinks.postgres.server import (
    bad_column,
    bad_name,
    literal,
    quoted,
    schema_and_table,
)
from deltaforge_dagster.sinks.postgres.sink_type import PostgresSinkConfig
from deltaforge_dagster.sinks.postgres.statements import TargetColumn, own_columns
from deltaforge_dagster.sinks.postgres.types import column_type, holds, new_type, staged_type, takes
from deltaforge_dagster.sinks.tables.staged import StagedTable
from deltaforge_dagster.sinks.tables.writer import (
    TableColumns,
    TableOwner,
    check_names,
    column_changed,
    column_gone,
    other_source,
    table_gone,
)
from deltaforge_dagster.state.table_commits import TableFigures
from deltaforge_dagster.typed_rows.schema import TypedColumn

_TABLES = {"r", "p"}
"""Kinds of relations that are tables, partitioned or not."""

_COLUMNS = """
SELECT a.attname, format_type(a.atttypid, a.atttypmod), t.typtype = 'e',
  CASE WHEN NOT c.collisdeterministic
    THEN c.collnamespace::regnamespace || '.' || quote_ident(c.collname) END
FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid \
LEFT JOIN pg_collation c ON c.oid = a.attcollation
WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum"""

_FIGURES = """
SELECT sum(CASE
    WHEN pg_stat_get_tuples_inserted(c.oid) + pg_stat_get_tuples_updated(c.oid) \
+ pg_stat_get_tuples_deleted(c.oid) > 0
    THEN pg_stat_get_live_tuples(c.oid)
    ELSE nullif(c.reltuples::bigint, -1) END)::bigint,
  sum(pg_table_size(c.oid))::bigint
FROM pg_class c
WHERE c.relkind <> 'p' \
AND (c.oid = %(table)s OR c.oid IN (SELECT relid FROM pg_partition_tree(%(table)s)))"""
"""Estimates of a table's rows and bytes, including those of its partitions.

The counters of changed rows lag a commit behind, and start from zero after a crash; then the
estimate of the last ANALYZE counts.
"""

_UNIQUE_KEYS = """
SELECT array_agg(a.attname::text ORDER BY a.attname::text)
FROM pg_index i CROSS JOIN unnest(i.indkey) WITH ORDINALITY AS k (number, place)
JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.number
WHERE i.indrelid = %s AND i.indisunique AND i.indisvalid AND i.indimmediate
  AND i.indpred IS NULL AND i.indexprs IS NULL AND k.place <= i.indnkeyatts
GROUP BY i.indexrelid"""

_PRIMARY_KEYS = "SELECT conname FROM pg_constraint WHERE conrelid = %s AND contype = 'p'"


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column of a table in the database.

    Attributes:
        name: Its name.
        type: Its type, as `format_type` names it.
        enum: Whether the type is enumerated.
        collation: Its collation in SQL, if different texts can be equal by it (nondeterministic).
    """

    name: str
    type: str
    enum: bool = False
    collation: str | None = None


@dataclass(frozen=True, slots=True)
class PostgresTarget:
    """A table that a commit is applied to, in a transaction.

    Args:
        connection: The connection.
        config: Options of the sink.
        owner: Who writes.
        table: The changes.
        exists: Whether the table has everything before these changes.
    """

    connection: psycopg.Connection
    config: PostgresSinkConfig
    owner: TableOwner
    table: StagedTable
    exists: bool = False

    @property
    def name(self) -> tuple[str, str]:
        """Schema and name of the table."""
        return schema_and_table(self.table.destination)

    @property
    def sql(self) -> str:
        """Name of the table in SQL."""
        return quoted(*self.name)

    @property
    def label(self) -> str:
        """How messages name the table: sink and full name."""
        return f"PostgreSQL table {'.'.join(self.name)} of sink {self.owner.sink_id}"

    @property
    def resync_command(self) -> str:
        """The command that has the table loaded again."""
        return self.owner.resync_command(self.table)

    def check_names(self) -> None:
        """Check that PostgreSQL accepts the names of the table and of its columns.

        Raises:
            TableRejected: A name is too long, or reserved for system columns.
        """
        for part in self.name:
            if (why := bad_name(part)) is not None:
                raise TableRejected(
                    f"{self.label} cannot have the name {part}: {why}; give the sink a `table` "
                    "with shorter names"
                )
        check_names((column.name for column in self.table.columns.columns), self.label, bad_column)

    def open(self, before: CommitsRow) -> CommitsRow:
        """Find or create the table; return its new row for `deltaforge.commits`.

        Args:
            before: Its row so far.

        Raises:
            TableRejected: The table is gone, belongs to another sink, or is not a table.
        """
        claimed = CommitsRow(
            self.owner.pipeline,
            self.owner.sink_id,
            self.owner.uid,
            self.table.source_name,
            before.relation,
            columns=self.table.identities,
        )
        relation = self._relation()
        if relation is None:
            self._check_exists(gone=True)
            self.create()
            relation = self._relation()
            assert relation is not None
            return replace(claimed, relation=relation)
        empty = self._is_empty()
        remade = before.relation not in {None, relation} and empty
        self._check_owner(before, empty=empty)
        self._check_exists(gone=remade or before.pipeline is None)
        if self.exists and before.is_of(self.owner) and before.relation not in {None, relation}:
            raise TableRejected(
                f"{self.label} is another table than the one that was written: somebody has "
                "dropped it and made it again; if it has everything that the sink has written, "
                f"execute {commits.claim(self.name)}; otherwise have it loaded again",
                remedy=self.resync_command,
            )
        if remade:
            return replace(claimed, relation=relation)
        if before.owner != self.owner.uid:
            return replace(
                claimed, relation=relation, base=self._next_position(), columns=before.columns
            )
        return replace(before, relation=relation)

    def rename(self, row: CommitsRow) -> CommitsRow:
        """Rename columns that the source has renamed; return the table's row in `commits`.

        Raises:
            TableRejected: It is not certain which column is which, the table has another column
                with a new name, or it lacks a column that it had.
        """
        assert row.relation is not None
        identities = dict(row.columns or {})
        names = {column.name: column.name for column in self.columns(row.relation)}
        columns = TableColumns(names, identities)
        for old, new in columns.moves(self.table, self.label, self.resync_command):
            self._alter(f"RENAME COLUMN {quoted(old)} TO {quoted(new)}")
            names[new] = names.pop(old)
            if old in identities:
                identities[new] = identities.pop(old)
        for name, identity in self.table.identities.items():
            if name not in names and identities.get(name) == identity:
                raise column_gone(self.label, name, self.resync_command)
        return replace(row, columns=identities | dict(self.table.identities))

    def recreate(self, before: CommitsRow) -> CommitsRow:
        """Empty the table, or drop and create it; return its row for `deltaforge.commits`.

        A table with the columns and the key that a new one would get is only emptied: it keeps its
        grants, views and indexes.

        Raises:
            TableRejected: The table belongs to another sink.
        """
        relation = self._relation()
        if relation is not None:
            self._check_owner(before, empty=self._is_empty())
            if self._has_current_form():
                self.connection.execute(f"TRUNCATE {self.sql}")
            else:
                self.connection.execute(f"DROP TABLE {self.sql}")
                relation = None
        if relation is None:
            self.create()
        return CommitsRow(
            self.owner.pipeline,
            self.owner.sink_id,
            self.owner.uid,
            self.table.source_name,
            self._relation(),
            columns=self.table.identities,
        )

    def create(self) -> None:
        """Make the table, and its schema.

        Raises:
            TableRejected: The role may not; the message has the statement that lets it.
        """
        role, schema = quoted(self.connection.info.user), quoted(self.name[0])
        try:
            commits.make_schema(self.connection, self.name[0])
        except psycopg.errors.InsufficientPrivilege:
            raise TableRejected(
                f"{self.label}: there is no schema {schema}, and the role may not make it",
                remedy=f"CREATE SCHEMA {schema} AUTHORIZATION {role}",
            ) from None
        try:
            self._create()
        except psycopg.errors.InsufficientPrivilege:
            # Since PostgreSQL 15 not everybody may make tables in `public`.
            raise TableRejected(
                f"{self.label}: the role may not make tables in schema {schema}",
                remedy=f"GRANT USAGE, CREATE ON SCHEMA {schema} TO {role}",
            ) from None

    def _create(self) -> None:
        wanted = self._new_types()
        columns = [f"{quoted(name)} {type_}" for name, type_ in wanted.items()]
        key = ", ".join(map(quoted, self.table.key))
        if self.config.mode == "current":
            columns.append(f"PRIMARY KEY ({key})" if key else "")
        columns = [part for part in columns if part]
        self.connection.execute(f"CREATE TABLE {self.sql} ({', '.join(columns)})")
        if self.config.mode == "history" and key:
            self.connection.execute(
                f"CREATE UNIQUE INDEX ON {self.sql} ({key}) WHERE df_is_current"
            )
        text = f"written by deltaforge: {self.table.source_name}, mode {self.config.mode}"
        self.connection.execute(f"COMMENT ON TABLE {self.sql} IS {literal(text)}")

    def fit(self, relation: int, *, ours: bool) -> Sequence[TargetColumn]:
        """Return where columns of staged rows go, after adding and widening columns of the table.

        Args:
            relation: The oid of the table.
            ours: Whether this sink has written to the table before, or emptied it.

        Raises:
            TableRejected: A column's type does not hold the values, or the table has no index of
                its key.
        """
        existing = {column.name: column for column in self.columns(relation)}
        for name, type_ in self._new_types().items():
            if name not in existing:
                self._add(name, type_)
                existing[name] = TableColumn(name, type_)
        for column in self.table.columns.columns:
            if not takes(existing[column.name].type, column, enum=existing[column.name].enum):
                existing[column.name] = self._widened(existing[column.name], column)
        for name, type_ in self._own_columns().items():
            if not holds(existing[name].type, type_):
                raise TableRejected(
                    f"{self.label}: its column {name}, which is ours, has the type "
                    f"{existing[name].type} and not {type_}; rename it, "
                    "or have the table loaded again",
                    remedy=self.resync_command,
                )
        self._check_key(relation, ours=ours)
        return [
            TargetColumn(
                number,
                column.name,
                column.name,
                staged_type(column.type),
                target.type,
                target.collation,
            )
            for number, column in enumerate(self.table.columns.columns)
            for target in [existing[column.name]]
        ]

    def columns(self, relation: int) -> Sequence[TableColumn]:
        """Return the columns of the table."""
        return [TableColumn(*row) for row in self.connection.execute(_COLUMNS, [relation])]

    def figures(self, relation: int) -> TableFigures:
        """Return the server's estimates of rows and bytes, without the changes of this transaction.

        They are unknown for a new table.
        """
        row = self.connection.execute(_FIGURES, {"table": relation}).fetchone()
        assert row is not None
        rows, size = row
        return TableFigures(rows=rows, bytes=size, estimated=True)

    def _add(self, name: str, type_: str) -> None:
        """Add a column, and fill it in existing rows with the value that they have at the source.

        In a history, only current rows get the value.
        """
        column = quoted(name)
        if name == "df_deleted":
            self._alter(f"ADD COLUMN {column} {type_} DEFAULT false")
            return
        fill = self.table.fills.get(name)
        if fill is None:
            self._alter(f"ADD COLUMN {column} {type_}")
            return
        value = f"{literal(fill)}::{type_}"
        if self.config.mode == "history":
            self._alter(f"ADD COLUMN {column} {type_}")
            self.connection.execute(f"UPDATE {self.sql} SET {column} = {value} WHERE df_is_current")
        else:  # no row is written: the server stores the default of existing rows in its catalog
            self._alter(f"ADD COLUMN {column} {type_} DEFAULT {value}")
            self._alter(f"ALTER COLUMN {column} DROP DEFAULT")

    def _widened(self, existing: TableColumn, column: TypedColumn) -> TableColumn:
        wanted = column_type(column.type)
        if not holds(wanted, existing.type):
            raise TableRejected(
                f"{self.label}: its column {column.name} has the type {existing.type}, which does "
                f"not hold the values of the source's column, {wanted}; declare a type that it "
                "holds under the sink's `types`, change the type of the table's column, or have "
                "the table loaded again",
                remedy=self.resync_command,
            )
        left = self.table.left.get(column.name)
        if left not in {None, existing.type} and not holds(existing.type, left):
            types = (existing.type, left)
            raise column_changed(self.label, column.name, types, self.resync_command)
        name = quoted(column.name)
        self._alter(f"ALTER COLUMN {name} TYPE {wanted} USING CAST({name} AS {wanted})")
        return TableColumn(column.name, wanted)

    def _alter(self, change: str) -> None:
        self.connection.execute(f"ALTER TABLE {self.sql} {change}")

    def _check_key(self, relation: int, *, ours: bool) -> None:
        if self.config.mode != "current":
            return
        wanted = sorted(self.table.key)
        if wanted not in self._unique_keys(relation):
            names = ", ".join(map(quoted, self.table.key))
            if ours and names and self._is_empty():
                # Made or emptied when the source's table had another key, or none.
                for constraint in self._primary_keys(relation):
                    self._alter(f"DROP CONSTRAINT {quoted(constraint)}")
                self._alter(f"ADD PRIMARY KEY ({names})")
                return
            raise TableRejected(
                f"{self.label} has no primary key or unique index of exactly ({names}), by which "
                f"its rows are found; make one (ALTER TABLE {self.sql} ADD UNIQUE ({names})), or "
                "have the table loaded again",
                remedy=self.resync_command,
            )

    def _unique_keys(self, relation: int) -> Sequence[Sequence[str]]:
        return [row[0] for row in self.connection.execute(_UNIQUE_KEYS, [relation])]

    def _primary_keys(self, relation: int) -> Sequence[str]:
        return [row[0] for row in self.connection.execute(_PRIMARY_KEYS, [relation])]

    def _own_columns(self) -> Mapping[str, str]:
        return own_columns(self.config.mode, soft_deletes=self.config.soft_deletes)

    def _new_types(self) -> dict[str, str]:
        """Return the types of the columns that the table would get if created now, by name."""
        declared = self.config.types_of(*self.table.source)
        columns = {
            column.name: new_type(column, declared=column.name in declared)
            for column in self.table.columns.columns
        }
        return {**columns, **self._own_columns()}

    def _has_current_form(self) -> bool:
        """Return whether the table has the columns and the key that it would get if created now."""
        relation = self._relation()
        assert relation is not None
        today = {column.name: column.type for column in self.columns(relation)} == self._new_types()
        keys = self._unique_keys(relation)
        return today and ([sorted(self.table.key)] if self.config.mode == "current" else []) == keys

    def _relation(self) -> int | None:
        """Return the oid of the table, None if there is none.

        Raises:
            TableRejected: Something else has its name.
        """
        row = commits.relation(self.connection, self.name)
        if row is None:
            return None
        if row[1] not in _TABLES:
            raise TableRejected(
                f"{self.label}: something of that name exists and is no table (a view, perhaps); "
                "rename it, or change the sink's `table`"
            )
        return row[0]

    def _is_empty(self) -> bool:
        row = self.connection.execute(f"SELECT NOT EXISTS (SELECT FROM {self.sql})").fetchone()
        return row is not None and bool(row[0])

    def _next_position(self) -> int:
        """Return the first position after those of all rows; 0 if the table has no positions."""
        if "df_position" not in self._own_columns() or not self._has_positions():
            return 0
        row = self.connection.execute(f"SELECT max(df_position) + 1 FROM {self.sql}").fetchone()
        return int(row[0]) if row is not None and row[0] is not None else 0

    def _has_positions(self) -> bool:
        relation = self._relation()
        return relation is not None and any(
            column.name == "df_position" for column in self.columns(relation)
        )

    def _check_exists(self, *, gone: bool) -> None:
        if self.exists and gone:
            raise table_gone(self.label, self.resync_command)

    def _is_source(self) -> bool:
        """Return whether the table may be the one from which the changes come."""
        database, schema, name = self.table.source
        row = self.connection.execute(
            "SELECT current_database() = %s AND EXISTS (SELECT FROM pg_publication_tables"
            " WHERE (schemaname, tablename) = (%s, %s))",
            [database, *self.name],
        ).fetchone()
        return row is not None and bool(row[0]) and (schema, name) == self.name

    def _check_owner(self, row: CommitsRow, *, empty: bool) -> None:
        """Check that the sink may have the table.

        Raises:
            TableRejected: It may not.
        """
        if row.pipeline is None and self._is_source():
            raise TableRejected(
                f"{self.label} has database, schema and name of the source's table and is "
                "published, so the sink would write to its own source; change the sink's `dsn` or "
                f"`table`, or, if it is another server's, execute {commits.claim(self.name)}"
            )
        if row.pipeline is None and not empty:
            raise TableRejected(
                f"{self.label} exists, with rows that are not from DeltaForge; change the sink's "
                "`table`, or empty the table, or, if the rows are this sink's after all, "
                f"execute {commits.claim(self.name)}"
            )
        if row.pipeline and not row.is_of(self.owner):
            raise TableRejected(
                f"{self.label} belongs to sink {row.sink} of pipeline {row.pipeline}; change the "
                "sink's `table`, or, if that sink will never write to it again, "
                f"execute {commits.claim(self.name)}"
            )
        if row.pipeline and row.source and row.source != self.table.source_name:
            raise other_source(self.label, row.source, self.table.source_name)
