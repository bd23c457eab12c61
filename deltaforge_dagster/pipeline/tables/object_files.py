"""The Spark job of a commit of object files: one task writes the content of each object.

An object has the changes of one table and period (`ObjectForm`), in their order; in Parquet only
those of one *run*: consecutive changes of the table that have the same table version. A change
without a version, such as a truncate, belongs to the run around it. So which objects a commit has,
and which changes are in each, depends on the commit alone. That is why one task reads the whole
commit: several would divide the changes among them by rules that a later release may change.

The task holds few rows in memory: JSON lines are written at once, typed rows in groups. If a field
appears that a Parquet file has no column for, the object is continued in another file with this
column, and at the end the files are combined into one.

Workers import this module: it needs no Spark.
"""

from __future__ import annotations

import contextlib
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import IO, Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from deltaforge_dagster.errors import TableRejected
from deltaforge_dagster.kernels.message_text import Mask, Optional, concat
from deltaforge_dagster.pipeline.encode import files as encoded_files
from deltaforge_dagster.pipeline.encode.messages import Share
from deltaforge_dagster.pipeline.tables.columns import absent_names
from deltaforge_dagster.pipeline.tables.reports import TaskReport, run_tasks
from deltaforge_dagster.pipeline.tables.typed_files import (
    TableName,
    check_values,
    chosen_rows,
    frames,
    full_name,
    is_op,
    place_of,
)
from deltaforge_dagster.processors.messages.envelope import (
    EventOrigin,
    is_snapshot,
    native_envelope,
    position_values,
)
from deltaforge_dagster.processors.messages.expansion import RowSelection
from deltaforge_dagster.sinks.tables.staged import (
    AFTER,
    BEFORE,
    IMAGE_META,
    ChangePlace,
    ObjectForm,
    ObjectPart,
)
from deltaforge_dagster.typed_rows.schema import TypedSchema
from deltaforge_dagster.typed_rows.tables import TypedRows, table_versions, typed_rows

MAX_MEMORY = 128 << 20
"""Arrow memory of the typed rows that a task holds before it writes them."""

_FEW_VALUES = ["op", "source_db", "source_schema", "source_table", "schema_version", "tx_id"]
"""Columns of Parquet files that are written with dictionary encoding."""

_TO_THE_END = np.iinfo(np.int64).max

_DIGITS: Mapping[str, int] = {"segment": 12, "ordinal": 10}
"""Number of digits of each part of a `sequence`."""

_UNITS: Mapping[str, str] = {"year": "Y", "month": "M", "day": "D", "hour": "h"}

_Key: TypeAlias = "tuple[TableName, ObjectPart]"
_Runs: TypeAlias = "Iterator[tuple[str | None, _Places]]"
_Places: TypeAlias = "npt.NDArray[np.int64]"


@dataclass(frozen=True, slots=True)
class ObjectPlan:
    """What is done with the changes of each table.

    Attributes:
        form: The form of the objects.
        selection: The changes that the sink gets.
        origin: Where the changes come from.
        schemas: The columns of each table version, by table and fingerprint, the newest last; not
            used for JSON lines.
        declared: By full name of a table, the columns of its rows if it is not registered.
        unknown: The columns of all other tables: none, because all their fields are added as text.
        skipped: Tables that are not staged.
    """

    form: ObjectForm
    selection: RowSelection
    origin: EventOrigin
    schemas: Mapping[TableName, Mapping[str, TypedSchema]]
    declared: Mapping[str, TypedSchema]
    unknown: TypedSchema
    skipped: frozenset[TableName]

    def wants(self, name: TableName) -> bool:
        """Return whether changes of a table are staged."""
        return name not in self.skipped

    def first_version(self, name: TableName) -> str | None:
        """Return the version of changes without one that come before all that have one."""
        return next(iter(self.schemas.get(name, ())), None)

    def schema(self, name: TableName, version: str | None) -> TypedSchema:
        """Return the columns of a table version."""
        schema = self.schemas.get(name, {}).get(version or "")
        return schema or self.declared.get(full_name(name), self.unknown)


@dataclass(slots=True)
class ObjectFile:
    """The content of an object, as the task has written it.

    Attributes:
        table: The table.
        part: What its changes have in common.
        path: The file; None if the table cannot be staged.
        rows: Number of changes.
        first, last: Places of the first and the last one.
        added: Names of fields that the table version does not have.
        error: Why the table cannot be staged.
    """

    table: TableName
    part: ObjectPart
    path: str | None = None
    rows: int = 0
    first: ChangePlace | None = None
    last: ChangePlace | None = None
    added: list[str] = field(default_factory=list)
    error: str | None = None

    def report(self) -> TaskReport:
        """Return what `of_report` reads."""
        return TaskReport(asdict(self))

    @classmethod
    def of_report(cls, report: TaskReport) -> ObjectFile:
        """Return the file that a task has reported."""
        fields = dict(report.fields)
        for name in ("first", "last"):
            fields[name] = fields[name] and ChangePlace(**fields[name])
        part = ObjectPart(**fields.pop("part"))
        db, schema, table = fields.pop("table")
        return cls((db, schema, table), part, **fields)


@dataclass(frozen=True, slots=True)
class ObjectJob:
    """The Spark job; pickled for its only task.

    Attributes:
        journal_url: Where the segments are.
        plan: What is done with the changes.
        segments: The segments, in order.
        folder: Where files go.
        name: What their names begin with.
    """

    journal_url: str
    plan: ObjectPlan
    segments: Sequence[Share]
    folder: str
    name: str

    def run(self, numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run the task; called by Spark. Yields columns of `reports.REPORT`."""
        return run_tasks(numbers, self._task)

    def _task(self, number: int) -> Iterator[TaskReport]:
        assert number == 0
        with contextlib.ExitStack() as unfinished:
            objects = _Objects(self.plan, f"{self.folder}/{self.name}", unfinished)
            for frame in frames(self.journal_url, self.segments):
                rows = chosen_rows(frame, self.plan.selection, self.plan.wants)
                if rows.num_rows:
                    objects.accept(rows)
            for object_file in objects.finished():
                yield object_file.report()


class _Objects:
    """The objects of a commit.

    Args:
        plan: What is done with the changes.
        prefix: What the paths of their files begin with.
        unfinished: Discards the files that are not finished.
    """

    def __init__(self, plan: ObjectPlan, prefix: str, unfinished: contextlib.ExitStack) -> None:
        self._plan = plan
        self._prefix = prefix
        self._unfinished = unfinished
        self._writers: dict[_Key, _ObjectContent] = {}
        self._files: dict[_Key, ObjectFile] = {}
        self._runs: dict[TableName, _Run] = {}
        self._schemas: dict[tuple[TableName, str | None], TypedSchema] = {}
        self._failed: dict[TableName, ObjectFile] = {}

    def accept(self, rows: pa.RecordBatch) -> None:
        """Add changes to their objects."""
        began = _periods(rows, self._plan.form.period)
        lines = self._plan.form.format == "jsonl"
        texts = native_envelope(self._plan.origin, rows) if lines else None
        for name, version, places in self._of_runs(rows):
            if name in self._failed:
                continue
            of_version = rows if len(places) == rows.num_rows else rows.take(places)
            try:
                content = (
                    self._typed(name, version, of_version)
                    if texts is None
                    else _as_lines(name, texts.take(pa.array(places, pa.int64())), of_version)
                )
            except TableRejected as error:
                at = place_of(of_version, 0)
                self._failed[name] = ObjectFile(
                    name, ObjectPart(None, None), first=at, error=str(error)
                )
                continue
            self._add(name, self._run(name, version), of_version, content, began[places])
        if sum(writer.memory for writer in self._writers.values()) > MAX_MEMORY:
            for writer in self._writers.values():
                writer.flush()

    def finished(self) -> Iterator[ObjectFile]:
        """Finish the files; yield them, and the tables that cannot be staged."""
        yield from self._failed.values()
        for key in (*self._writers,):
            self._finish(key)
        for (name, part), file in self._files.items():
            assert file.path is not None
            if name in self._failed:
                encoded_files.remove(file.path)
                continue
            if not self._runs[name].number:
                file.part = replace(part, run=None)
            yield file

    def _of_runs(self, rows: pa.RecordBatch) -> Iterator[tuple[TableName, str | None, _Places]]:
        """Yield the runs of rows, each table's in order: table, version, numbers of the rows."""
        versions: dict[TableName, list[tuple[str | None, _Places]]] = {}
        parquet = self._plan.form.format == "parquet"
        for table_version, places in table_versions(rows, np.ones(rows.num_rows, np.bool_)):
            of_table = versions.setdefault(
                (table_version.db, table_version.schema, table_version.table), []
            )
            of_table.append((table_version.schema_version if parquet else None, places))
        for name, parts in versions.items():
            run = self._runs.get(name)
            before = run.version if run is not None else self._plan.first_version(name)
            for version, places in _in_runs(parts, before if parquet else None):
                yield name, version, places

    def _run(self, name: TableName, version: str | None) -> _Run:
        """Return the run of a table's next changes; a new one finishes the files of the last."""
        run = self._runs.get(name)
        if run is not None and run.version == version:
            return run
        for key in [key for key in self._writers if key[0] == name]:
            self._finish(key)
        self._runs[name] = run = _Run(version, 0 if run is None else run.number + 1)
        return run

    def _finish(self, key: _Key) -> None:
        name, part = key
        file = self._files[key]
        file.path = self._writers.pop(key).finish()
        if part.version is not None:
            file.added = self._added(name, part.version)

    def _added(self, name: TableName, version: str | None) -> list[str]:
        """Return the fields that rows had so far, and their table version does not have."""
        schema = self._schemas.get((name, version))
        if schema is None:
            return []
        of_source = len(self._plan.schema(name, version).columns)
        return [column.name for column in schema.columns[of_source:]]

    def _add(
        self,
        name: TableName,
        run: _Run,
        rows: pa.RecordBatch,
        content: pa.Table,
        began: _Places,
    ) -> None:
        """Add the content of rows to the objects of their periods."""
        for time in np.unique(began):
            places = np.flatnonzero(began == time)
            period = None if self._plan.form.period is None else int(time)
            part = ObjectPart(period, run.version, run.number)
            key = name, part
            if key not in self._writers:
                self._writers[key] = self._writer()
                self._files[key] = ObjectFile(name, part, first=place_of(rows, int(places[0])))
            file = self._files[key]
            file.rows += len(places)
            file.last = place_of(rows, int(places[-1]))
            all_rows = len(places) == content.num_rows
            self._writers[key].add(
                content if all_rows else content.take(pa.array(places, pa.int64()))
            )

    def _writer(self) -> _ObjectContent:
        form = self._plan.form
        if form.format == "parquet":
            return _ParquetWriter(self._prefix, form, self._unfinished)
        return _LineWriter(self._prefix, form, self._unfinished)

    def _typed(self, name: TableName, version: str | None, rows: pa.RecordBatch) -> pa.Table:
        """Return changes of a table version as a Parquet object has them.

        Raises:
            TableRejected: A value does not fit its type.
        """
        key = name, version
        schema = self._schemas.get(key) or self._plan.schema(name, version)
        after, before = rows.column("after"), _before_images(rows)
        typed = _images(name, after, schema, rows)
        old = _images(name, before, typed.schema, rows)
        if old.schema != typed.schema:
            typed = _images(name, after, old.schema, rows)
        self._schemas[key] = old.schema
        added = {*self._added(name, version)}
        lacking = _lacking(BEFORE, old, before, added) | _lacking(AFTER, typed, after, added)
        columns = _meta(self._plan.origin, rows)
        columns["absent"] = absent_names(lacking, rows.num_rows)
        for prefix, images in ((BEFORE, old), (AFTER, typed)):
            for column, values in zip(images.schema.columns, images.batch.columns, strict=True):
                columns[prefix + column.name] = values
        fields = [*IMAGE_META]
        for prefix in (BEFORE, AFTER):
            fields += [
                column.field.with_name(prefix + column.name) for column in old.schema.columns
            ]
        return pa.Table.from_arrays(list(columns.values()), schema=pa.schema(fields))


@dataclass(frozen=True, slots=True)
class _Run:
    """The version of consecutive changes of a table, and the run's number in the commit."""

    version: str | None
    number: int


class _ObjectContent(ABC):
    """Writes the content of an object.

    Args:
        prefix: What the paths of files begin with.
        form: Their form.
        unfinished: Discards files that are not finished.
    """

    ending: str

    def __init__(self, prefix: str, form: ObjectForm, unfinished: contextlib.ExitStack) -> None:
        self.memory = 0
        self._prefix = prefix
        self._form = form
        self._unfinished = unfinished

    @abstractmethod
    def add(self, content: pa.Table) -> None:
        """Add rows."""

    @abstractmethod
    def flush(self) -> None:
        """Write what is held in memory."""

    @abstractmethod
    def finish(self) -> str:
        """Finish the file, and return its path."""

    def _path(self) -> str:
        return f"{self._prefix}.{uuid.uuid4().hex}.{self.ending}"


class _LineWriter(_ObjectContent):
    """Writes texts, one per line."""

    ending = "jsonl"

    def __init__(self, prefix: str, form: ObjectForm, unfinished: contextlib.ExitStack) -> None:
        super().__init__(prefix, form, unfinished)
        self._file = self._path()
        self._opened = contextlib.ExitStack()
        unfinished.push(self._opened)
        self._stream: Any = self._opened.enter_context(encoded_files.new_file(self._file))
        if form.compression != "none":
            plain = pa.PythonFile(self._stream, "w")
            self._stream = self._opened.enter_context(
                pa.CompressedOutputStream(plain, cast("Any", form.compression))
            )

    def add(self, content: pa.Table) -> None:
        """Add rows with the column `text`."""
        for texts in content.column("text").chunks:
            self._stream.write(_lines(cast("pa.StringArray", texts)))

    def flush(self) -> None:
        """Do nothing: lines are not held in memory."""

    def finish(self) -> str:
        """Finish the file, and return its path."""
        self._opened.close()
        return self._file


class _ParquetWriter(_ObjectContent):
    """Writes typed rows."""

    ending = "parquet"

    def __init__(self, prefix: str, form: ObjectForm, unfinished: contextlib.ExitStack) -> None:
        super().__init__(prefix, form, unfinished)
        self._waiting: list[pa.Table] = []
        self._schema: pa.Schema | None = None
        self._file: _OpenParquet | None = None
        self._paths: list[str] = []

    def add(self, content: pa.Table) -> None:
        """Add rows with the columns of the object, to which columns may have been added."""
        if self._schema is not None and content.schema != self._schema:
            self._close()
        self._schema = content.schema
        self._waiting.append(content)
        self.memory += content.nbytes

    def flush(self) -> None:
        """Write what is held in memory, as a row group."""
        if not self._waiting or self._schema is None:
            return
        if self._file is None:
            self._file = self._new_file(self._schema)
        self._file.writer.write_table(pa.concat_tables(self._waiting).combine_chunks())
        self._waiting.clear()
        self.memory = 0

    def finish(self) -> str:
        """Finish the file, and return its path."""
        self._close()
        if len(self._paths) == 1:
            return self._paths[0]
        assert self._schema is not None  # the last one has all columns
        combined = self._new_file(self._schema)
        for path in self._paths:
            with contextlib.closing(encoded_files.open_file(path)) as file:
                parquet = pq.ParquetFile(cast("IO[bytes]", file))
                for group in range(parquet.num_row_groups):
                    combined.writer.write_table(
                        _widened(parquet.read_row_group(group), self._schema)
                    )
        combined.close()
        encoded_files.remove(*self._paths)
        return combined.path

    def _close(self) -> None:
        self.flush()
        if self._file is not None:
            self._paths.append(self._file.path)
            self._file.close()
            self._file = None

    def _new_file(self, schema: pa.Schema) -> _OpenParquet:
        opened = contextlib.ExitStack()
        self._unfinished.push(opened)
        path = self._path()
        file = opened.enter_context(encoded_files.new_file(path))
        writer = pq.ParquetWriter(
            cast("IO[bytes]", file),
            schema,
            version="2.6",
            compression=self._form.compression,
            use_dictionary=cast("Any", _FEW_VALUES),
        )
        return _OpenParquet(path, opened.enter_context(writer), opened)


@dataclass(frozen=True, slots=True)
class _OpenParquet:
    path: str
    writer: pq.ParquetWriter
    opened: contextlib.ExitStack

    def close(self) -> None:
        self.opened.close()


def _periods(rows: pa.RecordBatch, period: str | None) -> _Places:
    """Return when the period of each row's event time began, in seconds since 1970 UTC."""
    if period is None:
        return np.zeros(rows.num_rows, np.int64)
    times = rows.column("ts_us").to_numpy().astype("datetime64[us]")
    return times.astype(f"datetime64[{_UNITS[period]}]").astype("datetime64[s]").astype(np.int64)


def _in_runs(versions: Sequence[tuple[str | None, _Places]], before: str | None) -> _Runs:
    """Yield the runs of a table's rows in order: their version, and the numbers of the rows.

    Args:
        versions: Each version with the numbers of its rows. Rows of version None belong to the run
            before them.
        before: The version of the run before the first row.
    """
    names = [before, *(version for version, _ in versions)]
    places = np.concatenate([part for _, part in versions])
    codes = np.repeat(np.arange(1, len(names)), [len(part) for _, part in versions])
    codes[np.array([name is None for name in names])[codes]] = 0
    order = np.argsort(places)
    places, codes = places[order], codes[order]
    latest = np.maximum.accumulate(np.where(codes > 0, np.arange(1, len(codes) + 1), 0))
    codes = np.concatenate([[0], codes])[latest]
    begins = [0, *(np.flatnonzero(np.diff(codes)) + 1), len(codes)]
    for start, stop in pairwise(begins):
        yield names[codes[start]], places[start:stop]


def _before_images(rows: pa.RecordBatch) -> pa.Array[Any]:
    """Return the images before the changes; for a delete without such an image, its key."""
    before = rows.column("before")
    keys = is_op(rows, "d") & before.is_null().to_numpy(zero_copy_only=False)
    if not keys.any():
        return before
    return cast("pa.Array[Any]", pc.if_else(pa.array(keys), rows.column("key"), before))


def _images(
    name: TableName, images: pa.Array[Any], schema: TypedSchema, rows: pa.RecordBatch
) -> TypedRows:
    if images.null_count == len(images):  # nothing to read, as in inserts
        columns = [pa.nulls(len(images), column.type) for column in schema.arrow]
        return TypedRows(schema, pa.RecordBatch.from_arrays(columns, schema=schema.arrow), {}, ())
    typed = typed_rows(cast("pa.StringArray", images), schema)
    check_values(name, typed, rows)
    return typed


def _lacking(
    prefix: str, typed: TypedRows, images: pa.Array[Any], added: set[str]
) -> dict[str, Mask]:
    """Return by column name in the object which images lack this column of the table version."""
    valid = images.is_valid().to_numpy(zero_copy_only=False)
    return {
        prefix + name: ~present.to_numpy(zero_copy_only=False) & valid
        for name, present in typed.present.items()
        if name not in added
    }


def _meta(origin: EventOrigin, rows: pa.RecordBatch) -> dict[str, pa.Array[Any]]:
    """Return the columns of `IMAGE_META`, except the last."""

    def text(name: str) -> pa.Array[Any]:
        return rows.column(name).cast(pa.string())

    return {
        "op": text("op"),
        "op_ts": rows.column("ts_us").view(IMAGE_META.field("op_ts").type),
        "source_db": text("db"),
        "source_schema": text("schema"),
        "source_table": text("table"),
        "source_position": _positions(origin, rows),
        "source_snapshot": pa.array(is_snapshot(rows)),
        "event_id": rows.column("event_id"),
        "schema_version": text("schema_version"),
        "tx_id": text("tx_id"),
        "sequence": _sequences(rows),
    }


def _sequences(rows: pa.RecordBatch) -> pa.StringArray:
    """Return the places of changes in the journal as texts that sort in the same order."""
    parts = [
        pc.utf8_lpad(cast("pa.StringArray", rows.column(name).cast(pa.string())), digits, "0")
        for name, digits in _DIGITS.items()
    ]
    return cast("pa.StringArray", pc.binary_join_element_wise(*cast("Any", parts), "-"))


def _positions(origin: EventOrigin, rows: pa.RecordBatch) -> pa.Array[Any]:
    """Return the positions of changes in the source's log; null for snapshot rows.

    Their forms are `lsn:<LSN>`, `binlog:file=<file>,pos=<end>` and `seq:<number>`.
    """
    fields = [part for part in origin.position_fields if part.column in {"file", "pos"}]
    pieces: list[str | Optional] = []
    if len(fields) > 1:
        for number, part in enumerate(fields):
            pieces += ["," if number else "binlog:", f"{part.name}="]
            pieces.append(Optional("", position_values(part, rows)))
    else:
        for part in fields:
            pieces += [
                "lsn:" if part.form == "lsn" else "seq:",
                Optional("", position_values(part, rows)),
            ]
    has_position = ~is_snapshot(rows) & rows.column("pos").is_valid().to_numpy(zero_copy_only=False)
    texts = concat(rows.num_rows, pieces)
    return cast(
        "pa.Array[Any]", pc.if_else(pa.array(has_position), texts, pa.scalar(None, pa.string()))
    )


def _as_lines(name: TableName, texts: pa.Array[Any], rows: pa.RecordBatch) -> pa.Table:
    """Return events as a table with the column `text`, each with its `sequence`.

    A raw payload gets no `sequence`, because it has no place for one.

    Raises:
        TableRejected: A raw payload has a line break.
    """
    raw = rows.column("raw_payload")
    any_raw = pc.any(raw).as_py()
    if any_raw:
        broken = pc.and_(raw, pc.match_substring(cast("Any", texts), "\n"))
        if pc.any(broken).as_py():
            row = int(np.flatnonzero(broken.to_numpy(zero_copy_only=False))[0])
            at = place_of(rows, row)
            raise TableRejected(
                f"table {full_name(name)}, segment {at.segment}, ordinal {at.ordinal}: a raw "
                "payload has a line break, so it is no line; write it to a sink whose messages are "
                "not lines, or escape it in a processor"
            )
    numbered: Any = pc.binary_join_element_wise(
        pc.binary_replace_slice(cast("Any", texts), -1, _TO_THE_END, ',"sequence":"'),
        cast("Any", _sequences(rows)),
        '"}',
        "",
    )
    return pa.table({"text": pc.if_else(raw, texts, numbered) if any_raw else numbered})


def _lines(texts: pa.StringArray) -> memoryview:
    """Return texts with a line break after each.

    Line breaks within a text become blanks; JSON has them between tokens only.
    """
    joined = cast("pa.StringArray", pc.binary_join_element_wise(cast("Any", texts), "", "\n"))
    lines = _bytes(joined)
    if np.count_nonzero(np.frombuffer(lines, np.uint8) == ord("\n")) == len(texts):
        return lines
    flat: Any = pc.replace_substring(cast("Any", texts), "\n", " ")
    return _bytes(cast("pa.StringArray", pc.binary_join_element_wise(flat, "", "\n")))


def _bytes(texts: pa.StringArray) -> memoryview:
    _, ends, data = texts.buffers()
    if ends is None or data is None:
        return memoryview(b"")
    offsets = np.frombuffer(memoryview(ends), np.int32)[texts.offset :][: len(texts) + 1]
    return memoryview(data)[offsets[0] : offsets[-1]]


def _widened(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return rows with all columns of a schema; columns that the rows lack are null."""
    columns = [
        rows.column(column.name)
        if column.name in rows.column_names
        else pa.nulls(rows.num_rows, column.type)
        for column in schema
    ]
    return pa.table(cast("Any", columns), schema=schema)
