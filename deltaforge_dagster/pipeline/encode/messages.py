"""Make messages from the change frame: in Spark's tasks, or in the run if there are few rows.

A `MessagePlan` says which columns the messages of a pipeline's sinks need, each distinct one once,
and makes them from batches of the change frame. It is pickled for Spark: a task reads its share of
the segment files (`Share`), makes the messages with the kernels of `processors`, and writes them as
an encoded file. So the rows go from the journal to the encoded file inside one Python process, and
the JVM only distributes the work; moving the rows from Java to Python would cost more than
everything else.

Workers import this module: it needs no Spark.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.config.sinks import (
    AvroEncoding,
    CloudEventsEnvelope,
    DebeziumEnvelope,
    Envelope,
    MessageSinkConfig,
    SinkFilter,
)
from deltaforge_dagster.config.templates import Template, compile_template
from deltaforge_dagster.errors import UnsupportedEvent
from deltaforge_dagster.frame import FRAME
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.kernels import avro_bytes
from deltaforge_dagster.pipeline.encode import files as encoded_files
from deltaforge_dagster.processors.messages import envelope as envelopes
from deltaforge_dagster.processors.messages import expansion, routing
from deltaforge_dagster.processors.messages.avro.envelope import MESSAGES_TYPE, AvroEnvelope
from deltaforge_dagster.processors.messages.avro.schema import AvroTables
from deltaforge_dagster.processors.messages.envelope import EventOrigin
from deltaforge_dagster.processors.messages.expansion import RowSelection
from deltaforge_dagster.sinks.base import MessageSchema
from deltaforge_dagster.sinks.registry import MessageSinkType, sink_types
from deltaforge_dagster.sources.registry import PositionField, source_types
from deltaforge_dagster.tables import TableSchema
from deltaforge_dagster.typed_rows.tables import VersionName

MAX_BATCH_ROWS = 10_000
MAX_BATCH_BYTES = 8 << 20
"""Limits of a message batch: large enough to be efficient, small enough to be in memory several
times. The bytes are those of the frame; a single row may exceed them.
"""

_UNUSED = {"row"}
FRAME_COLUMNS = [name for name in FRAME.names if name not in _UNUSED]
"""Columns of the change frame that messages may need."""

_Make: TypeAlias = "Callable[[pa.RecordBatch], pa.Array[Any]]"


@dataclass(frozen=True, slots=True)
class Route:
    """Names of the columns that hold one sink's messages; see `sinks.base.MESSAGES`.

    Attributes:
        template: Template of the destination.
        key: Template of the key; None for the default key.
        columns: For each column of `MESSAGES` the name of the encoded column.
        unresolved: Column that names the variable without a value if a destination is null; None if
            every destination has a value.
        empty: Column that names the variables that are empty text in a key; None if none can be.
        selected: Boolean column of the rows that the sink gets; None if it gets all.
        schemas: The schemas of messages in Avro, whose column `value` is of
            `avro.envelope.MESSAGES_TYPE`; None for JSON.
    """

    template: Template
    key: Template | None
    columns: Mapping[str, str]
    unresolved: str | None
    empty: str | None
    selected: str | None
    schemas: tuple[MessageSchema, ...] | None = None


@dataclass(slots=True)
class MessagePlan:
    """The messages of all sinks of one pipeline that get messages.

    Attributes:
        splits: Whether any sink gets a key update as delete and insert.
        tombstones: Whether any sink gets tombstones.
        routes: By sink id, the columns that hold its messages.
        columns: The function that makes each column; columns copied from the frame are not listed.
        avro: By column with messages in Avro, what makes its schemas; empty in the plans that
            `with_versions` returns, which go to tasks.
    """

    splits: bool
    tombstones: bool
    routes: dict[str, Route] = field(default_factory=dict)
    columns: dict[str, _Make] = field(default_factory=dict)
    avro: dict[str, AvroTables] = field(default_factory=dict)
    _names: dict[tuple[str, str], str] = field(default_factory=dict)

    @classmethod
    def of(cls, spec: PipelineSpec) -> MessagePlan:
        """Return the plan of a pipeline."""
        origin = source_origin(spec)
        sinks: list[tuple[MessageSinkType[Any], MessageSinkConfig]] = [
            (kind, sink.config)
            for sink in spec.spec.sinks
            if isinstance(kind := sink_types()[sink.type], MessageSinkType)
            and isinstance(sink.config, MessageSinkConfig)
        ]
        selections = [_selection(kind, config) for kind, config in sinks]
        plan = cls(
            splits=any(selection.splits for selection in selections),
            tombstones=any(selection.tombstones for selection in selections),
        )
        plan.columns[_IDEMPOTENCY_KEY] = functools.partial(routing.idempotency_key, origin)
        for (kind, config), selection in zip(sinks, selections, strict=True):
            plan.routes[config.id] = plan._route(kind, config, selection, origin)
            if isinstance(config.encoding, AvroEncoding):
                tables = _avro_tables(spec, config.encoding, origin)
                plan.avro.setdefault(plan.routes[config.id].columns["value"], tables)
        return replace(plan.with_versions(()), avro=plan.avro)

    def with_versions(self, versions: Iterable[tuple[VersionName, TableSchema]]) -> MessagePlan:
        """Return the plan for rows of these table versions; a plan without Avro stays as it is."""
        if not self.avro:
            return self
        registered = list(versions)
        columns, schemas = dict(self.columns), {}
        for name, tables in self.avro.items():
            avro_tables = (tables.of_no_table, *(tables.of(*version) for version in registered))
            numbers = {version: number for number, (version, _) in enumerate(registered, start=1)}
            make = columns[name]
            assert isinstance(make, AvroEnvelope)
            columns[name] = replace(make, tables=avro_tables, numbers=numbers)
            schemas[name] = tuple(MessageSchema(table.text, table.record) for table in avro_tables)
        routes = {
            sink: replace(route, schemas=schemas.get(route.columns["value"]))
            for sink, route in self.routes.items()
        }
        return replace(self, routes=routes, columns=columns, avro={})

    def batches(self, frame: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the messages of batches of the change frame, in the order of its rows.

        The messages of one change have its ordinal and are in one batch. The column `unmade` names
        the columns of a row that cannot be made, because they would exceed Arrow's limit of 2 GiB;
        it is null for all other rows.
        """
        for whole in frame:
            for rows in _cut(whole):
                try:
                    yield self._messages(rows)
                except UnsupportedEvent:
                    for row in range(rows.num_rows):
                        yield self._messages_of_change(rows.slice(row, 1))

    @property
    def _expands(self) -> bool:
        return self.splits or self.tombstones

    def _messages(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        if self._expands:
            rows = expansion.expand(rows, splits=self.splits, tombstones=self.tombstones)
        taken, makers = self._makers(rows)
        return _table(taken | {name: make() for name, make in makers.items()})

    def _messages_of_change(self, row: pa.RecordBatch) -> pa.RecordBatch:
        """Return the messages of one change, and which of their columns cannot be made."""
        unmade: list[str] = []
        if self._expands:
            try:
                row = expansion.expand(row, splits=self.splits, tombstones=self.tombstones)
            except UnsupportedEvent:
                unmade += self.columns
                row = expansion.unexpanded(row)
        taken, makers = self._makers(row)
        arrays: dict[str, pa.Array[Any]] = {}
        for name, make in makers.items():
            try:
                arrays[name] = make()
            except UnsupportedEvent:
                unmade.append(name)
                avro = isinstance(self.columns[name], AvroEnvelope)
                arrays[name] = pa.nulls(row.num_rows, MESSAGES_TYPE if avro else pa.string())
        return _table(taken | arrays, " ".join(unmade) or None)

    def _makers(
        self, rows: pa.RecordBatch
    ) -> tuple[dict[str, pa.Array[Any]], dict[str, Callable[[], pa.Array[Any]]]]:
        """Return the columns that are copied from the frame, and functions that make the others."""
        own, extra = rows, {}
        if self._expands:
            own, extra["change_id"] = expansion.identified(rows)
        makers: dict[str, Callable[[], pa.Array[Any]]] = {
            name: functools.partial(make, own if name == _IDEMPOTENCY_KEY else rows)
            for name, make in self.columns.items()
        }
        return {name: own.column(name) for name in _COPIED_COLUMNS} | extra, makers

    def _route(
        self,
        kind: MessageSinkType[Any],
        config: MessageSinkConfig,
        selection: RowSelection,
        origin: EventOrigin,
    ) -> Route:
        template = compile_template(config.destination)
        key = None if config.key is None else compile_template(config.key)
        columns = {name: name for name in ("ordinal", "event_id", "idempotency_key", "headers")}
        if self._expands:
            columns["change_id"] = "change_id"
        destination: _Make = functools.partial(routing.destination, template, origin)
        if config.destination_is_url:
            destination = functools.partial(routing.url, template, origin)
        columns["destination"] = self._column(
            "url" if config.destination_is_url else "destination", template.text, destination
        )
        if config.header_templates:
            templates = {
                name: compile_template(text) for name, text in config.header_templates.items()
            }
            columns["headers"] = self._column(
                "headers", repr(templates), functools.partial(routing.headers, templates, origin)
            )
        if kind.default_key == "row" and key is None:
            columns["key"] = self._column("row_key", "", routing.row_key)
        elif kind.default_key == "none" and key is None:
            columns["key"] = self._column("set_key", "", routing.set_key)
        else:
            columns["key"] = self._column(
                "key",
                "" if key is None else key.text,
                functools.partial(routing.message_key, key, origin),
            )
        columns["value"] = self._value(config, origin)
        unresolved = empty = None
        if key is not None and routing.can_be_unresolved(key):
            look = functools.partial(routing.empty_variables, key, origin)
            empty = self._column("empty", key.text, look)
        if routing.can_be_unresolved(template):
            make = functools.partial(routing.unresolved, template, origin)
            unresolved = self._column("unresolved", template.text, make)
        selected = None
        if self._expands or selection != RowSelection():
            choose = functools.partial(expansion.selected, selection)
            selected = self._column("selected", repr(selection), choose)
        return Route(template, key, columns, unresolved, empty, selected)

    def _value(self, config: MessageSinkConfig, origin: EventOrigin) -> str:
        """Return the name of the column with the messages' values."""
        envelope, encoding = config.envelope, config.encoding
        if isinstance(encoding, AvroEncoding):
            return self._column("avro", encoding.types, AvroEnvelope(origin, ()))
        value: _Make = functools.partial(_maker(envelope), origin)
        if self._expands:
            value = functools.partial(expansion.without_tombstones, value)
        return self._column("value", envelope.model_dump_json(), value)

    def _column(self, kind: str, text: str, make: _Make) -> str:
        """Return the name of the column for (`kind`, `text`), adding it when it is new."""
        name = self._names.setdefault((kind, text), f"{kind}_{len(self._names)}")
        self.columns.setdefault(name, make)
        return name


_COPIED_COLUMNS = ("segment", "ordinal", "event_id", "headers")
_IDEMPOTENCY_KEY = "idempotency_key"


def _table(columns: Mapping[str, pa.Array[Any]], unmade: str | None = None) -> pa.RecordBatch:
    rows = len(columns["ordinal"])
    marks = pa.nulls(rows, pa.string()) if unmade is None else pa.array([unmade] * rows)
    return pa.RecordBatch.from_arrays([*columns.values(), marks], [*columns, "unmade"])


def source_origin(spec: PipelineSpec) -> EventOrigin:
    """Return the origin that every event of a pipeline carries."""
    kind, config = source_types()[spec.spec.source.type], spec.spec.source.config
    fields = kind.position_fields(config)
    return EventOrigin(kind.connector, config.id, spec.metadata.tenant, fields)


def _avro_tables(spec: PipelineSpec, encoding: AvroEncoding, origin: EventOrigin) -> AvroTables:
    source, engine = spec.spec.source.type, spec.spec.engine
    processed = bool(spec.spec.processors)
    return AvroTables(encoding, origin, source_types()[source], engine, other_fields=processed)


def _selection(kind: MessageSinkType[Any], config: MessageSinkConfig) -> RowSelection:
    chosen = config.filter or SinkFilter()
    return RowSelection(
        splits=config.key_updates == "delete_insert",
        tombstones=kind.tombstones(config),
        skipped=config.skipped_operations,
        captured=not chosen.synthetic_only,
        synthetic=not chosen.exclude_synthetic,
        producers=chosen.producers,
    )


def _maker(envelope: Envelope) -> envelopes.Envelope:
    if isinstance(envelope, CloudEventsEnvelope):
        return functools.partial(envelopes.cloudevents_envelope, envelope.type_prefix)
    if isinstance(envelope, DebeziumEnvelope):
        return envelopes.debezium_envelope
    return envelopes.native_envelope


def _cut(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Cut a batch into slices that are neither long nor large."""
    start = 0
    # Entry i: the text bytes of the rows before row i, plus a constant.
    ends = np.zeros(rows.num_rows + 1, np.int64)
    for name in ("before", "after", "key", "ddl", "headers", "tags"):
        column = rows.column(name)
        _, offsets, _ = column.buffers()
        if offsets is not None and column.null_count < len(column):
            view = np.frombuffer(memoryview(offsets), np.int32)
            ends += view[column.offset : column.offset + len(column) + 1]
    while start < rows.num_rows:
        most = int(np.searchsorted(ends, ends[start] + MAX_BATCH_BYTES, "right")) - 1
        stop = min(max(most, start + 1), start + MAX_BATCH_ROWS, rows.num_rows)
        yield rows.slice(start, stop - start)
        start = stop


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a segment that one task encodes.

    It is every `of`-th row group, starting with the `part`-th.

    Attributes:
        path: The segment's file, as in its row.
        ordinals: Only row groups with these rows; None for all.
        part: Number of the share, from 0.
        of: Number of shares of the segment.
    """

    path: str
    ordinals: range | None
    part: int
    of: int


@dataclass(frozen=True, slots=True)
class Job:
    """A Spark job that encodes segments; pickled for its tasks.

    Attributes:
        journal_url: Where the segment files are.
        plan: The messages to make.
        tasks: The shares that each task encodes.
        folder: Where encoded files go.
        name: Prefix of the files' names.
        spares: Files that the first tasks overwrite instead of creating new ones.
    """

    journal_url: str
    plan: MessagePlan
    tasks: Sequence[Sequence[Share]]
    folder: str
    name: str
    spares: Sequence[str] = ()

    def run(self, numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write the messages of the tasks with these numbers to an encoded file; called by Spark.

        Yields:
            Columns of `encoded_files.SLICES`.
        """
        tasks = [number for batch in numbers for number in _integers(batch)]
        frames = (rows for number in tasks for rows in self._frame(number))
        spare = next((self.spares[number] for number in tasks if number < len(self.spares)), None)
        return encoded_files.write_partition(
            self.folder, self.name, self.plan.batches(frames), spare
        )

    def _frame(self, number: int) -> Iterator[pa.RecordBatch]:
        journal = Journal(self.journal_url)
        for share in self.tasks[number]:
            yield from journal.share(
                share.path, FRAME_COLUMNS, ordinals=share.ordinals, part=share.part, of=share.of
            )


def _integers(batch: pa.RecordBatch) -> list[int]:
    numbers: list[int] = batch.column(0).to_numpy().tolist()
    return numbers


def as_frame(table: pa.Table) -> Iterator[pa.RecordBatch]:
    """Yield a table's rows as batches of `FRAME_COLUMNS`, dictionary-encoded like the frame."""
    columns = [
        table.column(name).dictionary_encode()
        if pa.types.is_dictionary(FRAME.field(name).type)
        else table.column(name)
        for name in FRAME_COLUMNS
    ]
    yield from pa.Table.from_arrays(columns, FRAME_COLUMNS).combine_chunks().to_batches()


def warm() -> None:
    """Compile the kernels that make messages, or load them from the cache."""
    row: dict[str, Any] = dict.fromkeys(FRAME.names)
    row |= {"segment": 0, "ordinal": 0, "op": "c", "ts_us": 0, "db": "", "table": "", "row": 0}
    row |= {"tx_end": False, "event_id": "", "raw_payload": False, "pos": 0}
    rows = [row, {**row, "after": '{"a":"b"}', "ts_us": 5000, "tx_end": True}]
    (frame,) = pa.Table.from_pylist(rows, FRAME).combine_chunks().to_batches()
    origin = EventOrigin(
        "", "", "", (PositionField("", "pos", "lsn"), PositionField("", "tx_id", "json"))
    )
    envelopes.native_envelope(origin, frame)
    envelopes.cloudevents_envelope("a", origin, frame)
    routing.destination(compile_template("${after.a}"), origin, frame)
    update = {**row, "op": "u", "before": '{"a":1}', "after": '{"a":2}', "key": '{"a":2}'}
    (frame,) = pa.Table.from_pylist([update], FRAME).combine_chunks().to_batches()
    expansion.expand(frame, splits=True, tombstones=True)
    avro_bytes.warm()
