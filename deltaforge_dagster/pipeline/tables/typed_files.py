"""The first Spark job of a commit: types rows, and writes a file for each task and table.

A changelog's files are final. In other modes a file contains its rows by *bucket*, a part of all
keys: the second job (`fold`) reads all rows of a bucket, whichever task has written them.

Workers import this module: it needs no Spark.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import IO, Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from deltaforge_dagster.errors import TableRejected
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.kernels.message_text import Mask, Optional, concat
from deltaforge_dagster.pipeline.encode import files as encoded_files
from deltaforge_dagster.pipeline.encode.messages import FRAME_COLUMNS, Share
from deltaforge_dagster.pipeline.tables.columns import (
    SAME_NAMES,
    AddedColumns,
    RowNames,
    absent_names,
)
from deltaforge_dagster.pipeline.tables.keys import Words, key_hashes, normal
from deltaforge_dagster.pipeline.tables.reports import TaskReport, run_tasks
from deltaforge_dagster.processors.messages.envelope import (
    EventOrigin,
    is_snapshot,
    position_values,
)
from deltaforge_dagster.processors.messages.expansion import RowSelection, selected
from deltaforge_dagster.sinks.tables.staged import META, OLD_KEY, ChangePlace, TableMode
from deltaforge_dagster.typed_rows.schema import TypedSchema
from deltaforge_dagster.typed_rows.tables import (
    TypedRows,
    TypedTable,
    VersionName,
    typed_rows,
    typed_tables,
)

TableName: TypeAlias = "tuple[str, str | None, str]"
"""Database, schema and name of a table of the source."""

MAX_MEMORY = 256 << 20
"""Arrow memory of the rows that a task holds before it writes them."""

HASH = "df_hash"
"""In files of buckets: the hash of a row's key."""
_OLD_KEYS = uuid.UUID("3a4f1b0e-52c7-5f0c-9d6e-8b1f6f2f0c11")
"""Namespace of the event ids of deletes of old keys, which derive from the ids of the updates."""
_MESSAGES = "__wal_message"
"""The schema of logical messages (`frame`), which belong to no table."""
_REKEY = np.dtype([("old", "u8"), ("new", "u8"), ("segment", "i8"), ("ordinal", "i8")])


@dataclass(frozen=True, slots=True)
class StagePlan:
    """What is done with the changes of each table; the same for all tasks.

    Attributes:
        mode: What the tables hold.
        selection: The changes that the sink gets.
        origin: Where the changes come from.
        schemas: The columns of each table that the source has registered.
        declared: By full name of a table, the columns of its rows if it is not registered.
        unknown: The columns of all other tables: none, because all their fields are added as text.
        later: By table and version, the columns that the table did not have up to this version.
            Except in a changelog, its rows have the value of `added.fills` in them, or null, and do
            not lack them.
        renamed: By table and version, the names of columns in rows of versions whose names differ
            from the commit's.
        identities: For each registered table, what identifies its columns, by name
            (`StagedTable.identities`).
        added: The columns that were added to registered tables.
        keys: The key columns of each registered table.
        declared_keys: By full name of a table, its key columns.
        refused: Why tables cannot be staged until they are loaded again.
        skipped: Tables that are not staged.
    """

    mode: TableMode
    selection: RowSelection
    origin: EventOrigin
    schemas: Mapping[TableName, TypedSchema]
    declared: Mapping[str, TypedSchema]
    unknown: TypedSchema
    later: Mapping[tuple[TableName, str | None], frozenset[str]]
    renamed: Mapping[tuple[TableName, str | None], RowNames]
    identities: Mapping[TableName, Mapping[str, str]]
    added: Mapping[TableName, AddedColumns]
    keys: Mapping[TableName, tuple[str, ...]]
    declared_keys: Mapping[str, tuple[str, ...]]
    refused: Mapping[TableName, str]
    skipped: frozenset[TableName]

    def wants(self, name: TableName) -> bool:
        """Return whether changes of a table are staged."""
        if name[1] == _MESSAGES and self.mode != "changelog" and not self.key(name):
            return False
        return name not in self.skipped

    def schema(self, name: TableName) -> TypedSchema:
        """Return the columns of a table."""
        schema = self.schemas.get(name)
        return schema or self.declared.get(full_name(name), self.unknown)

    def key(self, name: TableName) -> tuple[str, ...]:
        """Return the key columns of a table."""
        return self.declared_keys.get(full_name(name)) or self.keys.get(name, ())

    def names(self, name: TableName, version: VersionName) -> RowNames:
        """Return the names of columns in rows of a table version."""
        return self.renamed.get((name, version.schema_version), SAME_NAMES)

    def check(self, name: TableName) -> None:
        """Check that rows of a table can be staged.

        Raises:
            TableRejected: They cannot be staged.
        """
        if name in self.refused:
            raise TableRejected(self.refused[name])
        if self.mode != "changelog" and not self.key(name):
            raise TableRejected(self.keyless(name))

    def keyless(self, name: TableName) -> str:
        """Return why a table without a key cannot be staged."""
        return (
            f"table {full_name(name)} has no primary key, or had none when rows of it were "
            f"written, and mode {self.mode} needs one: give it a key, name the columns of one "
            "under `keys`, or use mode changelog; then load it again"
        )


def full_name(name: TableName) -> str:
    """Return the name as in `TableSchema.full_name`."""
    db, schema, table = name
    return f"{schema or db}.{table}"


@dataclass(slots=True)
class TypedFile:
    """A table's rows that one task has written; or what the task knows of a table without rows.

    Attributes:
        table: The table.
        path: The file; None without rows.
        rows: Number of rows.
        changes: Number of changes of the source.
        first, last: Places of the first and the last change.
        added: Names of fields that the table's columns do not have.
        absent: Names of columns that some rows lack.
        inserts: Whether all rows are inserts.
        buckets: For each batch of the file, its bucket and its number of rows; empty for a
            changelog.
        truncates: Segment, ordinal and event time of each truncate; empty for a changelog.
        rekeys: Records of type `_REKEY`, one for each update that changes the key and lacks values.
        error: Why the table cannot be staged.
    """

    table: TableName
    path: str | None = None
    rows: int = 0
    changes: int = 0
    first: ChangePlace | None = None
    last: ChangePlace | None = None
    added: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    inserts: bool = True
    buckets: list[tuple[int, int]] = field(default_factory=list)
    truncates: list[tuple[int, int, int]] = field(default_factory=list)
    rekeys: npt.NDArray[Any] = field(default_factory=lambda: np.empty(0, _REKEY))
    error: str | None = None

    def report(self) -> TaskReport:
        """Return what `of_report` reads."""
        data = self.rekeys.tobytes()
        self.rekeys = np.empty(0, _REKEY)
        fields = asdict(self)
        del fields["rekeys"]
        return TaskReport(fields, data)

    @classmethod
    def of_report(cls, report: TaskReport) -> TypedFile:
        """Return the file that a task has reported."""
        fields = dict(report.fields)
        for name in ("first", "last"):
            fields[name] = fields[name] and ChangePlace(**fields[name])
        db, schema, table = fields.pop("table")
        return cls((db, schema, table), **fields, rekeys=np.frombuffer(report.data, _REKEY))


@dataclass(frozen=True, slots=True)
class TypingJob:
    """The Spark job; pickled for its tasks.

    Attributes:
        journal_url: Where the segments are.
        plan: What is done with the changes.
        tasks: The shares of segments that each task reads.
        buckets: Number of buckets.
        folder: Where files go.
        name: What their names begin with.
    """

    journal_url: str
    plan: StagePlan
    tasks: Sequence[Sequence[Share]]
    buckets: int
    folder: str
    name: str

    def run(self, numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run the tasks with these numbers; called by Spark. Yields columns of `reports.REPORT`."""
        return run_tasks(numbers, self._task)

    def _task(self, number: int) -> Iterator[TaskReport]:
        tables: dict[TableName, _TableRows] = {}
        memory = 0
        for frame in frames(self.journal_url, self.tasks[number]):
            memory += self._accept(frame, tables)
            if memory > MAX_MEMORY:
                yield from self._written(tables)
                tables, memory = {}, 0
        yield from self._written(tables)

    def _accept(self, frame: pa.RecordBatch, tables: dict[TableName, _TableRows]) -> int:
        """Add the rows of a frame to those of their tables; return the memory that they take."""

        def rows_of(name: TableName) -> _TableRows:
            if name not in tables:
                tables[name] = _TableRows(self.plan, name)
            return tables[name]

        frame = chosen_rows(frame, self.plan.selection, self.plan.wants)
        if not frame.num_rows:
            return 0
        for name, places in _truncates(frame):
            rows_of(name).truncate(frame.take(places))

        def schema_of(version: VersionName) -> TypedSchema:
            name = version.db, version.schema, version.table
            return self.plan.names(name, version).of_rows(rows_of(name).schema)

        memory = 0
        for typed in typed_tables(frame, schema_of):
            version = typed.version
            rows = rows_of((version.db, version.schema, version.table))
            memory += rows.accept(typed, frame)
        return memory

    def _written(self, tables: Mapping[TableName, _TableRows]) -> Iterator[TaskReport]:
        for rows in tables.values():
            extension = "parquet" if self.plan.mode == "changelog" else "arrow"
            path = f"{self.folder}/{self.name}.{uuid.uuid4().hex}.{extension}"
            yield rows.written(path, self.buckets).report()


class _TableRows:
    """The rows of one table that a task has read and not written yet."""

    def __init__(self, plan: StagePlan, name: TableName) -> None:
        self.schema = plan.schema(name)
        self._plan = plan
        self._key = plan.key(name)
        self._source_columns = len(self.schema.columns)
        self._batches: list[pa.RecordBatch] = []
        self._file = TypedFile(name)

    def truncate(self, rows: pa.RecordBatch) -> None:
        """Add truncates."""
        self._count(rows)
        self._file.inserts = False
        if self._plan.mode != "changelog":
            times = rows.select(["segment", "ordinal", "ts_us"]).to_pylist()
            self._file.truncates += [tuple(truncate.values()) for truncate in times]
        else:
            self._batches.append(self._changes(rows, {}))

    def accept(self, typed: TypedTable, frame: pa.RecordBatch) -> int:
        """Add rows; return the memory that they take."""
        rows = frame if len(typed.places) == frame.num_rows else frame.take(typed.places)
        self._count(rows)
        if self._file.error is not None:
            return 0
        try:
            self._plan.check(self._file.table)
            names = self._plan.names(self._file.table, typed.version)
            if names is not SAME_NAMES:
                typed = replace(typed, rows=names.renamed(typed.rows, self.schema))
            self.schema = typed.rows.schema
            check_values(self._file.table, typed.rows, rows)
            batch = (
                self._logged(typed, rows)
                if self._plan.mode == "changelog"
                else self._keyed(typed, rows)
            )
        except TableRejected as error:
            self._file.error = str(error)
            self._batches.clear()
            return 0
        self._batches.append(batch)
        return batch.nbytes

    def written(self, path: str, buckets: int) -> TypedFile:
        """Write the file, and return the report of it."""
        self._file.added = [column.name for column in self.schema.columns[self._source_columns :]]
        if not self._batches or self._file.error is not None:
            return self._file
        table = pa.concat_tables(
            [pa.Table.from_batches([batch]) for batch in self._batches], promote_options="default"
        )
        self._batches.clear()
        self._file.path, self._file.rows = path, table.num_rows
        if self._plan.mode == "changelog":
            write_parquet(path, table)
        else:
            self._file.buckets = _write_buckets(path, table, buckets)
        return self._file

    def _count(self, rows: pa.RecordBatch) -> None:
        file = self._file
        file.changes += rows.num_rows
        first, last = place_of(rows, 0), place_of(rows, rows.num_rows - 1)
        if file.first is None or first < file.first:
            file.first = first
        if file.last is None or last > file.last:
            file.last = last

    def _logged(self, of_version: TypedTable, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows of a changelog, with a delete of the old key before an update of it."""
        typed = of_version.rows
        self._file.inserts &= bool(is_op(rows, "c").all())
        updates = is_op(rows, "u")
        lacking = _lacking(typed, updates | is_op(rows, "d"))
        columns = dict(zip(typed.batch.schema.names, typed.batch.columns, strict=True))
        old = None
        if self._key and columns.keys() >= set(self._key):
            names = self._plan.names(self._file.table, of_version.version)
            keys, missing = self._full_key(typed, rows, names)
            columns |= keys
            lacking |= {
                name: lacking[name] & missing[name] for name in self._key if name in lacking
            }
            old = self._old_key(columns, rows, np.flatnonzero(updates), names)
        changes = self._changes(rows, columns, lacking)
        self._add_absent(lacking)
        if old is None:
            return changes
        ended = self._ended(rows, old, names)
        places = np.concatenate([2 * np.arange(len(changes)) + 1, 2 * old.rows])
        return _joined(changes, ended).take(pa.array(np.argsort(places), pa.int64()))

    def _ended(self, rows: pa.RecordBatch, old: _OldKeys, names: RowNames) -> pa.RecordBatch:
        """Return deletes of rows with old keys, as changes of a changelog with their own ids."""
        typed = self._typed_images(rows, "before", old.rows, names, self.schema)
        columns = dict(zip(typed.batch.schema.names, typed.batch.columns, strict=True))
        columns |= dict(zip(self._key, old.columns, strict=True))
        lacking = _lacking(typed, np.ones(len(old.rows), np.bool_))
        for name in self._key:
            lacking.pop(name, None)
        self._add_absent(lacking)
        changes = rows.take(pa.array(old.rows, pa.int64()))
        ids = [
            str(uuid.uuid5(_OLD_KEYS, str(event_id)))
            for event_id in changes.column("event_id").to_pylist()
        ]
        changes = _with_column(changes, "op", pa.array(["d"] * len(ids)).dictionary_encode())
        return self._changes(_with_column(changes, "event_id", pa.array(ids)), columns, lacking)

    def _changes(
        self,
        rows: pa.RecordBatch,
        columns: Mapping[str, pa.Array[Any]],
        lacking: Mapping[str, Mask] | None = None,
    ) -> pa.RecordBatch:
        """Return changes with the columns of `META`."""
        meta = _places(rows, absent_names(lacking or {}, rows.num_rows)) | {
            "df_source_position": _position(self._plan.origin, rows),
            "df_tx_id": rows.column("tx_id"),
            "df_event_id": rows.column("event_id"),
            "df_schema_version": rows.column("schema_version"),
        }
        fields = {**columns, **{name: meta[name] for name in META.names}}
        return pa.RecordBatch.from_pydict(fields)

    def _keyed(self, of_version: TypedTable, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows of a table with a key, ready to be folded.

        An update that changes the key and lacks no values becomes a delete of the old key and an
        update of the new one.
        """
        typed, count = of_version.rows, rows.num_rows
        names = self._plan.names(self._file.table, of_version.version)
        later = self._plan.later.get((self._file.table, of_version.version.schema_version), ())
        columns = dict(zip(typed.batch.schema.names, typed.batch.columns, strict=True))
        updates = is_op(rows, "u")
        self._file.inserts &= bool(is_op(rows, "c").all())
        if added := self._plan.added.get(self._file.table):
            columns |= {
                name: pa.repeat(cast("Any", added.fills[name]), count)
                for name in later
                if name in added.fills
            }
        columns |= self._full_key(typed, rows, names)[0]
        self._check_key(columns, rows)
        old = self._old_key(columns, rows, np.flatnonzero(updates), names)
        lacking = _lacking(typed, updates)
        for name in (*self._key, *later):
            lacking.pop(name, None)
        self._add_absent(lacking)
        changed, partial = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
        if old is not None:
            changed[old.rows] = True
            for mask in lacking.values():
                partial |= mask
            partial &= changed
        keys = [columns[name] for name in self._key]
        hashes = key_hashes(keys)
        fields = columns | _places(rows, absent_names(lacking, count))
        fields[HASH] = pa.array(hashes)
        if old is None:
            return pa.RecordBatch.from_pydict(fields)
        of_partial = partial[old.rows]
        self._rekeyed(old.hashes[of_partial], hashes[partial], rows, np.flatnonzero(partial))
        if partial.any():
            takes = np.full(count, -1)
            takes[old.rows[of_partial]] = np.flatnonzero(of_partial)
            index = pa.array(takes, pa.int64(), mask=takes < 0)
            fields |= {
                OLD_KEY + name: column.take(index)
                for name, column in zip(self._key, old.columns, strict=True)
            }
        deleted_keys = old.filtered(~of_partial)
        batch = pa.RecordBatch.from_pydict(fields)
        if not len(deleted_keys.rows):
            return batch
        return _joined(batch, self._deletes(batch, deleted_keys))

    def _deletes(self, batch: pa.RecordBatch, deleted_keys: _OldKeys) -> pa.RecordBatch:
        """Return deletes of old keys, at the places of the updates that changed them."""
        size = len(deleted_keys.rows)
        columns = {column.name: pa.nulls(size, column.type) for column in batch.schema}
        columns |= dict(zip(self._key, deleted_keys.columns, strict=True))
        for name in ("df_segment", "df_ordinal", "df_event_time"):
            columns[name] = batch.column(name).take(deleted_keys.rows)
        columns["df_op"] = pa.array(["d"] * size).dictionary_encode()
        columns[HASH] = pa.array(deleted_keys.hashes)
        return pa.RecordBatch.from_pydict(columns)

    def _rekeyed(
        self, old: Words, new: Words, rows: pa.RecordBatch, places: npt.NDArray[np.int64]
    ) -> None:
        records = np.empty(len(places), _REKEY)
        records["old"], records["new"] = old, new
        for name in ("segment", "ordinal"):
            records[name] = rows.column(name).to_numpy()[places]
        self._file.rekeys = np.concatenate([self._file.rekeys, records])

    def _add_absent(self, lacking: Mapping[str, Mask]) -> None:
        names = {name for name, mask in lacking.items() if mask.any()}
        self._file.absent = sorted(names | set(self._file.absent))

    @property
    def _key_schema(self) -> TypedSchema:
        """The key columns. A column that no row has had yet is text, as it will be then."""
        by_name = {column.name: column for column in self.schema.columns}
        missing = [name for name in self._key if name not in by_name]
        by_name |= {column.name: column for column in self.schema.with_added(missing).columns}
        return TypedSchema(tuple(by_name[name] for name in self._key), self.schema.marks_unchanged)

    def _full_key(
        self, typed: TypedRows, rows: pa.RecordBatch, row_names: RowNames
    ) -> tuple[dict[str, pa.Array[Any]], dict[str, Mask]]:
        """Return the key columns, and which rows lack them nevertheless.

        A value that the row image lacks is taken from the image of the key, otherwise from the
        image before the change.
        """
        schema = self._key_schema
        names = typed.batch.schema.names
        columns: dict[str, pa.Array[Any]] = {}
        missing: dict[str, Mask] = {}
        for number, name in enumerate(self._key):
            if name in names:
                columns[name] = typed.batch.column(name)
                in_image = typed.present.get(name)
                missing[name] = (
                    np.zeros(rows.num_rows, np.bool_) if in_image is None else ~_numpy(in_image)
                )
            else:
                columns[name] = pa.nulls(rows.num_rows, schema.arrow.field(number).type)
                missing[name] = np.ones(rows.num_rows, np.bool_)
        for image in ("key", "before"):
            wanted = np.logical_or.reduce(list(missing.values())) & _numpy(
                rows.column(image).is_valid()
            )
            if not wanted.any():
                continue
            images = self._typed_key(rows, image, np.flatnonzero(wanted), row_names)
            for name, present in images.present.items():
                filled = np.zeros(rows.num_rows, np.bool_)
                filled[wanted] = present
                filled &= missing[name]
                values = images.columns[name].filter(pa.array(filled[wanted]))
                columns[name] = _replaced(columns[name], filled, values)
                missing[name] &= ~filled
        return columns, missing

    def _check_key(self, columns: Mapping[str, pa.Array[Any]], rows: pa.RecordBatch) -> None:
        """Check that every row has a value of each key column.

        Raises:
            TableRejected: A row has no value of a key column.
        """
        for name in self._key:
            column = columns[name]
            if column.null_count:
                row = int(np.flatnonzero(_numpy(column.is_null()))[0])
                raise TableRejected(
                    f"table {full_name(self._file.table)}, {_text(place_of(rows, row))}: a change "
                    f"without a value of the key column {name}; name other columns under `keys`, "
                    "or have the source log this column with every change"
                )

    def _typed_key(
        self, rows: pa.RecordBatch, image: str, at: npt.NDArray[np.int64], names: RowNames
    ) -> _KeyImages:
        typed = self._typed_images(rows, image, at, names, self._key_schema)
        return _KeyImages(
            {name: typed.batch.column(name) for name in self._key},
            {
                name: _numpy(typed.present[name])
                if name in typed.present
                else np.ones(len(at), np.bool_)
                for name in self._key
            },
        )

    def _typed_images(
        self,
        rows: pa.RecordBatch,
        image: str,
        at: npt.NDArray[np.int64],
        names: RowNames,
        schema: TypedSchema,
    ) -> TypedRows:
        """Return the columns of `schema` from the image of the rows `at`."""
        images = cast("pa.StringArray", rows.column(image).take(at))
        typed = typed_rows(images, names.of_rows(schema), other_fields=False)
        if names is not SAME_NAMES:
            typed = names.renamed(typed, schema)
        check_values(self._file.table, typed, rows.take(at) if typed.misfits else rows)
        return typed

    def _old_key(
        self,
        columns: Mapping[str, pa.Array[Any]],
        rows: pa.RecordBatch,
        updates: npt.NDArray[np.int64],
        names: RowNames,
    ) -> _OldKeys | None:
        """Return the old keys of the updates that change the key; None if no update does."""
        updates = updates[_numpy(rows.column("before").is_valid())[updates]]
        if not len(updates):
            return None
        images = self._typed_key(rows, "before", updates, names)
        changed = np.zeros(len(updates), np.bool_)
        old = []
        for name in self._key:
            new = columns[name].take(updates)
            present = images.present[name] & _numpy(images.columns[name].is_valid())
            before = _replaced(new, present, images.columns[name].filter(pa.array(present)))
            changed |= _numpy(pc.not_equal(normal(before), normal(new)))
            old.append(before)
        if not changed.any():
            return None
        kept = [column.filter(pa.array(changed)) for column in old]
        return _OldKeys(updates[changed], kept, key_hashes(kept))


@dataclass(frozen=True, slots=True)
class _KeyImages:
    """The key columns of some images, and which images have them."""

    columns: Mapping[str, pa.Array[Any]]
    present: Mapping[str, Mask]


@dataclass(frozen=True, slots=True)
class _OldKeys:
    """The old keys of updates that change the key: numbers of the rows, key columns, and hashes."""

    rows: npt.NDArray[np.int64]
    columns: Sequence[pa.Array[Any]]
    hashes: Words

    def filtered(self, mask: Mask) -> _OldKeys:
        """Return the old keys in a mask."""
        columns = [column.filter(pa.array(mask)) for column in self.columns]
        return _OldKeys(self.rows[mask], columns, self.hashes[mask])


def frames(journal_url: str, shares: Iterable[Share]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of shares of segments, in their order."""
    journal = Journal(journal_url)
    for share in shares:
        yield from journal.share(
            share.path, FRAME_COLUMNS, ordinals=share.ordinals, part=share.part, of=share.of
        )


def chosen_rows(
    frame: pa.RecordBatch, selection: RowSelection, wants: Callable[[TableName], bool]
) -> pa.RecordBatch:
    """Return the selected changes of the wanted tables, without DDL, which has no table."""
    chosen = selected(selection, frame).to_numpy(zero_copy_only=False)
    chosen &= ~is_op(frame, "ddl")
    codes, names = table_codes(frame)
    chosen &= np.array([wants(name) for name in names], np.bool_)[codes]
    return frame if chosen.all() else frame.filter(pa.array(chosen))


def check_values(name: TableName, typed: TypedRows, rows: pa.RecordBatch) -> None:
    """Raise an error about the first value that does not fit.

    Raises:
        TableRejected: A value does not fit its type.
    """
    for misfit in typed.misfits:
        where = f"table {full_name(name)}, {_text(place_of(rows, misfit.row))}"
        if misfit.column is None:
            raise TableRejected(
                f"{where}: the row image cannot be stored in columns: {misfit.reason}"
            )
        types = {column.name: column.type.name for column in typed.schema.columns}
        raise TableRejected(
            f"{where}: a value of column {misfit.column} does not fit its type "
            f"{types[misfit.column]}: {misfit.reason}; declare the column's type as text under "
            "`types`"
        )


def table_codes(frame: pa.RecordBatch) -> tuple[npt.NDArray[np.int64], list[TableName]]:
    """Return the number of each row's table, and the tables with these numbers."""
    names = [
        cast("pa.DictionaryArray[Any, Any]", frame.column(name))
        for name in ("db", "schema", "table")
    ]
    codes = np.zeros(frame.num_rows, np.int64)
    for column in names:
        size = len(column.dictionary)
        codes = codes * (size + 1) + column.indices.fill_null(size).to_numpy()
    _, first, codes = np.unique(codes, return_index=True, return_inverse=True)
    tables = [
        cast("TableName", tuple(column[row].as_py() for column in names)) for row in first.tolist()
    ]
    return codes, tables


def write_parquet(path: str, table: pa.Table) -> None:
    """Write a file that Spark reads.

    Only columns that are dictionaries already get dictionary encoding, and there are no statistics:
    either would take as long as everything else.
    """
    dictionaries: Any = [
        column.name for column in table.schema if pa.types.is_dictionary(column.type)
    ]
    with encoded_files.new_file(path) as file:
        pq.write_table(
            table,
            cast("IO[bytes]", file),
            version="2.6",
            compression="zstd",
            use_dictionary=dictionaries,
            write_statistics=False,
        )


def _write_buckets(path: str, table: pa.Table, buckets: int) -> list[tuple[int, int]]:
    """Write a batch for each bucket; return the bucket and the number of rows of each batch."""
    of_row = (table.column(HASH).to_numpy() % np.uint64(buckets)).astype(np.int64)
    rows_of = np.bincount(of_row, minlength=buckets)
    if buckets > 1:
        table = table.take(np.argsort(of_row, kind="stable"))
    batches = [(bucket, rows) for bucket, rows in enumerate(rows_of.tolist()) if rows]
    options = pa.ipc.IpcWriteOptions(compression="lz4", unify_dictionaries=True)
    plain = table.set_column(
        table.schema.get_field_index("df_op"), "df_op", table.column("df_op").cast(pa.string())
    )
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(encoded_files.new_file(path))
        writer = stack.enter_context(pa.ipc.new_file(file, plain.schema, options=options))
        start = 0
        for _, rows in batches:
            (batch,) = plain.slice(start, rows).combine_chunks().to_batches()
            writer.write_batch(batch)
            start += rows
    return batches


def _truncates(frame: pa.RecordBatch) -> Iterator[tuple[TableName, npt.NDArray[np.int64]]]:
    """Yield the tables that are truncated, with the numbers of the rows of the truncates."""
    rows = np.flatnonzero(is_op(frame, "t"))
    if not len(rows):
        return
    codes, names = table_codes(frame)
    for code, name in enumerate(names):
        places = rows[codes[rows] == code]
        if len(places):
            yield name, places


def is_op(frame: pa.RecordBatch, op: str) -> Mask:
    """Return a mask of the rows with an operation."""
    column = cast("pa.DictionaryArray[Any, Any]", frame.column("op"))
    names = column.dictionary.to_pylist()
    if op not in names:
        return np.zeros(frame.num_rows, np.bool_)
    return cast("Mask", column.indices.to_numpy() == names.index(op))


def _lacking(typed: TypedRows, rows: Mask) -> dict[str, Mask]:
    """Return by column name which of these rows lack the column."""
    masks = {name: ~_numpy(present) & rows for name, present in typed.present.items()}
    return {name: mask for name, mask in masks.items() if mask.any()}


def _places(rows: pa.RecordBatch, names: pa.Array[Any]) -> dict[str, pa.Array[Any]]:
    """Return the columns of `META` that all modes need."""
    return {
        "df_op": rows.column("op"),
        "df_segment": rows.column("segment"),
        "df_ordinal": rows.column("ordinal"),
        "df_event_time": rows.column("ts_us").view(META.field("df_event_time").type),
        "df_absent": names,
    }


def _position(origin: EventOrigin, rows: pa.RecordBatch) -> pa.Array[Any]:
    """Return the positions of changes in the source's log as in events; null for snapshot rows.

    The file and the position of a binlog have a colon between them.
    """
    fields = [part for part in origin.position_fields if part.column in {"file", "pos"}]
    pieces: list[str | Optional] = []
    for part in fields:
        pieces += [":"] if pieces else []
        pieces.append(Optional("", position_values(part, rows)))
    has_position = ~is_snapshot(rows) & _numpy(rows.column("pos").is_valid())
    texts = concat(rows.num_rows, pieces)
    return cast(
        "pa.Array[Any]", pc.if_else(pa.array(has_position), texts, pa.scalar(None, pa.string()))
    )


def _replaced(column: pa.Array[Any], mask: Mask, values: pa.Array[Any]) -> pa.Array[Any]:
    """Return a column with other values where the mask is set, one value for each such row.

    Arrow's own functions for this do not support UUIDs.
    """
    index: npt.NDArray[np.int64] = np.arange(len(column))
    index[mask] = len(column) + np.arange(len(values))
    return pa.concat_arrays([column, values]).take(pa.array(index, pa.int64()))


def _joined(*batches: pa.RecordBatch) -> pa.RecordBatch:
    tables = [pa.Table.from_batches([batch]) for batch in batches]
    (joined,) = pa.concat_tables(tables).unify_dictionaries().combine_chunks().to_batches()
    return joined


def _with_column(rows: pa.RecordBatch, name: str, column: pa.Array[Any]) -> pa.RecordBatch:
    """Return rows with other values of a column."""
    return rows.set_column(rows.schema.get_field_index(name), name, column)


def place_of(rows: pa.RecordBatch, row: int) -> ChangePlace:
    """Return the place of a row."""
    return ChangePlace(rows.column("segment")[row].as_py(), rows.column("ordinal")[row].as_py())


def _text(change: ChangePlace) -> str:
    return f"segment {change.segment}, ordinal {change.ordinal}"


def _numpy(mask: pa.Array[Any]) -> Mask:
    return cast("Mask", mask.to_numpy(zero_copy_only=False))
