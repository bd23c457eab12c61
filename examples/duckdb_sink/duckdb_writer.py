"""Applies staged changes to the tables of a DuckDB file, exactly once.

DuckDB has transactions. The rows of a commit, and the record that the table has this commit
(`COMMITS`), are written in one transaction: whatever dies when, the table has both or neither.
"""

# ruff: noqa: S608 - names in statements are quoted, and values are parameters

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import duckdb
import pyarrow as pa

from deltaforge_dagster.errors import DeltaforgeError, SinkUnavailable, TableRejected
from deltaforge_dagster.sinks.base import SendGuard
from deltaforge_dagster.sinks.tables.staged import (
    META,
    OLD_KEY,
    StagedStep,
    StagedTable,
    staged_batches,
)
from deltaforge_dagster.sinks.tables.writer import (
    TableColumns,
    TableOwner,
    WrittenTable,
    check_names,
    column_changed,
    column_gone,
    other_source,
    table_gone,
)

COMMITS = "deltaforge.commits"
"""The table that records whose each table is, and which commits it has."""


@dataclass(frozen=True, slots=True)
class TableRecord:
    """What `COMMITS` says about a table.

    Attributes:
        pipeline, sink: Who writes it; None if that was never recorded.
        uid: The series of commits that is numbered (`TableOwner.uid`).
        source: Name of the source's table.
        through: The last segment of its last commit.
        identities: What identifies columns of the source, by name (`StagedTable.identities`).
    """

    pipeline: str | None = None
    sink: str | None = None
    uid: str | None = None
    source: str | None = None
    through: int = -1
    identities: Mapping[str, str] = field(default_factory=dict)


class DuckdbWriter:
    """Applies staged changes to the tables of a file; implements `TableWriter`.

    It opens the file for each commit, because DuckDB lets nobody else open a file meanwhile.

    Args:
        path: The file.
        owner: Who writes.
    """

    def __init__(self, path: str, owner: TableOwner) -> None:
        self._path = path
        self._owner = owner
        self._connection: duckdb.DuckDBPyConnection | None = None

    def commit(
        self, table: StagedTable, through: int, guard: SendGuard, *, exists: bool = False
    ) -> WrittenTable:
        """Apply the changes of a table, unless it has them; see `CommitWriter.commit`."""
        with self._transaction(table, guard) as target:
            record = target.open(exists=exists)
            if through > record.through:
                record = target.fit(record)
                for step in table.steps:
                    target.apply(step)
                target.remember(replace(record, through=through))
            return WrittenTable(list(target.columns().items()))

    def recreate(self, table: StagedTable, guard: SendGuard) -> Sequence[tuple[str, str]]:
        """Replace a table by one without rows; see `TableWriter.recreate`."""
        with self._transaction(table, guard) as target:
            target.recreate()
            return list(target.columns().items())

    def close(self) -> None:
        """End what another thread is doing; the file is closed after each commit anyway."""
        connection = self._connection
        if connection is not None:
            connection.interrupt()

    @contextmanager
    def _transaction(self, table: StagedTable, guard: SendGuard) -> Iterator[DuckdbTable]:
        """Open the file, and provide the table in a transaction.

        DuckDB's own text of an error may have a value of a row, so it is neither shown nor chained.
        """
        guard()
        problem: DeltaforgeError | None = None
        where = f"sink {self._owner.sink_id}: {self._path}"
        try:
            with duckdb.connect(self._path) as connection:
                self._connection = connection
                target = DuckdbTable(connection, table, self._owner)
                target.check_names()
                connection.begin()
                yield target
                # The last moment: a run that has lost its lease must not commit behind another one.
                # What is not committed when the connection closes is undone.
                guard()
                connection.commit()
        except (duckdb.DataError, duckdb.IntegrityError, duckdb.ProgrammingError) as error:
            problem = TableRejected(f"{where} refuses the changes ({type(error).__name__})")
        except duckdb.Error as error:  # another process has the file open, the disk is full
            problem = SinkUnavailable(f"{where} cannot be written now ({type(error).__name__})")
        finally:
            self._connection = None
        if problem is not None:
            raise problem


class DuckdbTable:
    """One table, in a transaction.

    Args:
        connection: The file.
        table: The changes.
        owner: Who writes.
    """

    def __init__(
        self, connection: duckdb.DuckDBPyConnection, table: StagedTable, owner: TableOwner
    ) -> None:
        self._connection = connection
        self._table = table
        self._owner = owner
        self._name = ".".join(map(quoted, table.destination))
        self._label = f"DuckDB table {'.'.join(table.destination)} of sink {owner.sink_id}"
        self._resync = owner.resync_command(table)

    def check_names(self) -> None:
        """Check that a table can have columns of these names."""
        check_names((column.name for column in self._table.columns.columns), self._label)

    def open(self, *, exists: bool) -> TableRecord:
        """Find or create the table; return what is recorded about it.

        Args:
            exists: See `CommitWriter.commit`.

        Raises:
            TableRejected: It is gone, or not this sink's.
        """
        record = self._record()
        self._check_owner(record)
        if record.pipeline is None or not self.columns():
            if exists:
                raise table_gone(self._label, self._resync)
            return self.recreate()
        if record.uid != self._owner.uid:
            # The journal has begun anew, and numbers segments from the start. Changes that the
            # table has may come again; in a table of current rows they change nothing.
            return replace(record, uid=self._owner.uid, through=-1)
        return record

    def recreate(self) -> TableRecord:
        """Make the table anew, without rows; return what is recorded about it.

        Raises:
            TableRejected: It is not this sink's.
        """
        self._check_owner(self._record())
        if len(self._table.destination) > 1:
            self._execute(f"CREATE SCHEMA IF NOT EXISTS {quoted(self._table.destination[0])}")
        # No primary key: DuckDB checks it before a deleted row of the same transaction is gone.
        columns = (f"{quoted(name)} {type_}" for name, type_ in self._wanted().items())
        self._execute(f"CREATE OR REPLACE TABLE {self._name} ({', '.join(columns)})")
        record = TableRecord(
            self._owner.pipeline,
            self._owner.sink_id,
            self._owner.uid,
            self._table.source_name,
            identities=self._table.identities,
        )
        self.remember(record)
        return record

    def fit(self, record: TableRecord) -> TableRecord:
        """Rename and add columns as the source has done; return what is recorded then.

        Raises:
            TableRejected: It is not certain which column is which, or one has another type.
        """
        identities = {name.lower(): identity for name, identity in record.identities.items()}
        names = {name.lower(): name for name in self.columns()}
        columns = TableColumns(names, identities, str.lower)
        for old, new in columns.moves(self._table, self._label, self._resync):
            self._execute(f"ALTER TABLE {self._name} RENAME {quoted(old)} TO {quoted(new)}")
            if old.lower() in identities:
                identities[new.lower()] = identities.pop(old.lower())
        existing = {name.lower(): type_ for name, type_ in self.columns().items()}
        added: dict[str, str] = {}
        for name, type_ in self._wanted().items():
            if name.lower() not in existing:
                if name.lower() in identities:
                    raise column_gone(self._label, name, self._resync)
                self._execute(f"ALTER TABLE {self._name} ADD COLUMN {quoted(name)} {type_}")
                added[name] = type_
            elif existing[name.lower()] != type_:
                types = (type_, existing[name.lower()])
                raise column_changed(self._label, name, types, self._resync)
        self._fill_added(added)
        new_identities = {n.lower(): identity for n, identity in self._table.identities.items()}
        return replace(record, identities=identities | new_identities)

    def apply(self, step: StagedStep) -> None:
        """Apply a step."""
        if step.kind == "truncate":
            self._execute(f"DELETE FROM {self._name}")
            return
        self._stage(step)
        key = self._table.key
        if step.kind == "rekey":
            old = " AND ".join(f"t.{quoted(name)} = s.{quoted(OLD_KEY + name)}" for name in key)
            self._fill(old)
            self._execute(f"DELETE FROM {self._name} AS t USING staged AS s WHERE {old}")
        same = " AND ".join(f"t.{quoted(name)} = s.{quoted(name)}" for name in key)
        if step.kind == "rows":
            self._fill(same)
        self._execute(f"DELETE FROM {self._name} AS t USING staged AS s WHERE {same}")
        names = ", ".join(quoted(column.name) for column in self._table.columns.columns)
        self._execute(
            f"INSERT INTO {self._name} ({names}) SELECT {names} FROM staged WHERE df_op <> 'd'"
        )

    def remember(self, record: TableRecord) -> None:
        """Record what the table has, in the transaction that gives it to the table."""
        name = json.dumps(self._table.destination)
        self._execute(f"DELETE FROM {COMMITS} WHERE name = ?", name)
        self._execute(
            f"INSERT INTO {COMMITS} VALUES (?, ?, ?, ?, ?, ?, ?)",
            name,
            record.pipeline,
            record.sink,
            record.uid,
            record.source,
            record.through,
            json.dumps(dict(record.identities)),
        )

    def columns(self) -> Mapping[str, str]:
        """Return name and type of each column of the table; nothing if there is no table."""
        *schema, name = self._table.destination
        rows = self._execute(
            "SELECT column_name, data_type FROM duckdb_columns() WHERE table_name = ?"
            " AND schema_name = ? AND database_name = current_database() ORDER BY column_index",
            name,
            *(schema or ["main"]),
        )
        return dict(rows.fetchall())

    def _record(self) -> TableRecord:
        self._execute("CREATE SCHEMA IF NOT EXISTS deltaforge")
        self._execute(
            f"CREATE TABLE IF NOT EXISTS {COMMITS} (name VARCHAR, pipeline VARCHAR, sink VARCHAR,"
            " uid VARCHAR, source VARCHAR, through BIGINT, identities JSON)"
        )
        row = self._execute(
            f"SELECT * EXCLUDE (name) FROM {COMMITS} WHERE name = ?",
            json.dumps(self._table.destination),
        ).fetchone()
        if row is None:
            return TableRecord()
        *fields, identities = row
        return TableRecord(*fields, json.loads(identities))

    def _check_owner(self, record: TableRecord) -> None:
        if record.pipeline is None:
            if self.columns() and self._execute(f"FROM {self._name} LIMIT 1").fetchone():
                raise TableRejected(
                    f"{self._label} exists, with rows that are not this sink's; empty it, or "
                    "change the sink's `table`"
                )
            return
        if (record.pipeline, record.sink) != (self._owner.pipeline, self._owner.sink_id):
            raise TableRejected(
                f"{self._label} belongs to sink {record.sink} of pipeline {record.pipeline}; "
                f"change the sink's `table`, or delete the table and its row in {COMMITS}"
            )
        if record.source != self._table.source_name:
            raise other_source(self._label, record.source or "", self._table.source_name)

    def _wanted(self) -> Mapping[str, str]:
        """Return name and type of the columns that rows have now: DuckDB knows Arrow's types."""
        schema = self._table.columns.arrow
        self._connection.register("wanted", pa.RecordBatchReader.from_batches(schema, []))
        described = self._execute("DESCRIBE FROM wanted").fetchall()
        self._connection.unregister("wanted")
        return {name: type_ for name, type_, *_ in described}

    def _fill_added(self, types: Mapping[str, str]) -> None:
        """Give rows that are there the values that the source gave them in added columns.

        DuckDB (1.4) refuses to alter a table that the same transaction has updated, so this comes
        after all columns were added.

        Args:
            types: The types of the columns, by name.
        """
        fills = {name: fill for name, fill in self._table.fills.items() if name in types}
        if fills:
            values = ", ".join(f"{quoted(name)} = CAST(? AS {types[name]})" for name in fills)
            self._execute(f"UPDATE {self._name} SET {values}", *fills.values())

    def _stage(self, step: StagedStep) -> None:
        """Read the rows of a step into the temporary table `staged`."""
        columns = self._table.columns.arrow
        fields = [*columns, META.field("df_op"), META.field("df_absent")]
        if step.kind == "rekey":
            fields += [columns.field(name).with_name(OLD_KEY + name) for name in self._table.key]
        create = "CREATE OR REPLACE TEMP TABLE staged AS FROM batch"
        empty = pa.RecordBatchReader.from_batches(pa.schema(fields), [])
        self._read(create, empty)
        # Batch by batch, so that an error of the file is raised here and not within DuckDB.
        for batch in staged_batches(step, pa.schema(fields)):
            self._read("INSERT INTO staged FROM batch", pa.Table.from_batches([batch]))

    def _read(self, statement: str, rows: pa.RecordBatchReader | pa.Table) -> None:
        self._connection.register("batch", rows)
        self._execute(statement)
        self._connection.unregister("batch")

    def _fill(self, same: str) -> None:
        """Complete staged rows that lack values from the table's rows.

        Args:
            same: The condition that the table's row `t` is that of the staged row `s`.
        """
        for name in self._table.absent:
            column = quoted(name)
            self._execute(
                f"UPDATE staged AS s SET {column} = t.{column} FROM {self._name} AS t"
                f" WHERE {same} AND list_contains(s.df_absent, ?)",
                name,
            )

    def _execute(self, statement: str, *parameters: Any) -> duckdb.DuckDBPyConnection:
        return self._connection.execute(statement, parameters)


def quoted(name: str) -> str:
    """Return a name as SQL has it."""
    return '"' + name.replace('"', '""') + '"'
