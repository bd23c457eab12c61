"""The sinks as Spark data sources for any Spark job: `df.write.format("deltaforge_redis")`.

::

    from deltaforge_dagster.spark import register

    register(spark, secrets={"REDIS_PASSWORD": password})
    (
        df.selectExpr("id AS key", "to_json(struct(*)) AS value")
        .write.format("deltaforge_redis")
        .option("uri", "redis://:${REDIS_PASSWORD}@redis.example:6379/0")
        .option("stream", "orders")
        .mode("append")
        .save()
    )

Every kind of sink is a data source, unless it says otherwise (`sinks.registry`). A task opens the
same sink that pipelines use and sends the rows of its partition in order, from the first on. Spark
Connect sessions and classic sessions are supported. This package, and that of the sink, must be
installed where the tasks run.

The options of a format are the fields of that sink in a pipeline file, except those that need an
event (templates, envelopes, filters), and `job`, a name for the write. The entries of a mapping are
written with a dot: `client_conf.security.protocol`. Spark shows options in plans, in its UI and in
logs. So an option must not contain a secret itself, only `${NAME}`, whose value comes from
`register`, or from the environment of the tasks. A literal password is rejected.

A row becomes a message:

=============  ========================  ==========================================================
column         type                      meaning
=============  ========================  ==========================================================
`value`        string                    The message. Null only for Kafka: a tombstone.
`key`          string                    The message's key; if absent or null: none.
`destination`  string                    Stream, topic or subject; if absent or null: that of the
                                         option.
`headers`      map of strings, or JSON   If absent or null: none.
`event_id`     string                    Id by which consumers detect duplicates; if absent or
                                         null: the job's name, the partition and the row's
                                         number in it.
=============  ========================  ==========================================================

Other columns are rejected. Names are case-insensitive, as in Spark.

Spark retries a failed task, and with speculation runs two attempts at the same time.

At least once: the rows of a failed attempt arrive again. They have the same `event_id` as long as
the partition has the same rows in the same order, so that a consumer that drops duplicate ids sees
each row once. (Spark recomputes a partition with the same rows unless the query is not
deterministic, for example because of `rand()` or an undefined order. Rows with their own `event_id`
do not depend on that.)

Exactly once (`exactly_once`, under the same condition): the sink stores the position of each
partition atomically with the rows, and the next attempt continues after it. `job` identifies the
write: if it is repeated under the same name, even in a new session, only the missing rows are sent.
Without `job` each write is independent. Positions expire after seven days.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

import orjson
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import ValidationError
from pyspark import TaskContext
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.session import SparkSession
from pyspark.sql.types import MapType, StringType, StructType

from deltaforge_dagster.config.blocks import NAME, sentence
from deltaforge_dagster.config.env import expand
from deltaforge_dagster.config.secrets import SECRET_NAME, mask
from deltaforge_dagster.config.sinks import MessageSinkConfig
from deltaforge_dagster.config.templates import compile_template
from deltaforge_dagster.errors import Retryable, SinkRejected, SpecError
from deltaforge_dagster.sinks.base import MESSAGES, Origin, Sink, SinkBatch
from deltaforge_dagster.sinks.registry import (
    MessageSinkType,
    SinkContext,
    SparkOptions,
    message_sink_types,
)

if TYPE_CHECKING:  # a classic session does not need the packages of Connect
    from pyspark.sql.connect.session import SparkSession as ConnectSession

JOB = "job"

_REFERENCE = re.compile(r"\$\{[^{}]*\}")
_TOKEN = re.compile(r"//([^/@:]+)@")
_ANY_NAME = "destination"

_COLUMNS = ("value", "key", "destination", "headers", "event_id")

_WAITS = (1.0, 2.0, 4.0, 8.0)
"""Seconds between attempts to send; after the last one the task fails, and Spark may retry it."""
_SEGMENT = 1
"""The number of the only segment: a partition's rows are numbered through, as one segment."""
_MOST_ROWS = 1 << 62
"""More rows than any partition has: their number is unknown, so no row counts as the last one."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of sink as a data source.

    Attributes:
        type: The kind.
        spark: How it differs as a data source.
    """

    type: MessageSinkType[Any]
    spark: SparkOptions

    @property
    def format(self) -> str:
        """Name for `df.write.format`."""
        return f"deltaforge_{self.type.name}"

    @property
    def destination(self) -> str:
        """The option for the destination of messages."""
        return str(self.type.config.destination_field)

    @property
    def fields(self) -> set[str]:
        """The names of its options, except `job`."""
        fields = set(self.type.config.model_fields) - set(MessageSinkConfig.model_fields)
        return fields - self.spark.without


KINDS = tuple(
    Kind(sink_type, sink_type.spark)
    for sink_type in message_sink_types().values()
    if sink_type.spark is not None
)


def register(
    spark: SparkSession | ConnectSession, *, secrets: Mapping[str, str] | None = None
) -> None:
    """Register the sinks in a session, each as the format `deltaforge_<type>`: `deltaforge_kafka`.

    Args:
        spark: A session, classic or Spark Connect.
        secrets: Values for `${NAME}` in options. They are part of the data source's code, which
            Spark does not show. Call this function again to change them.
    """
    for kind in KINDS:
        spark.dataSource.register(_source(kind, dict(secrets or {})))


def _source(given_kind: Kind, given_secrets: dict[str, str]) -> type[DataSource]:
    """Return a subclass of `_Source`: Spark creates its objects and ships its class attributes."""

    class Registered(_Source):
        kind = given_kind
        secrets = given_secrets

    return Registered


class _Source(DataSource):
    kind: ClassVar[Kind]
    secrets: ClassVar[Mapping[str, str]]

    @classmethod
    def name(cls) -> str:
        """Return the format's name."""
        return cls.kind.format

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """Check options and columns; return the object with which tasks write."""
        if overwrite:
            raise SpecError(f"{self.kind.format}: messages are only appended: mode('append')")
        options = dict(self.options)
        check_options(self.kind, options)
        check_columns(self.kind, schema, options)
        return Writer(self.kind, options, self.secrets)


@dataclass
class Written(WriterCommitMessage):
    """The result of a task: the number of rows in its partition."""

    rows: int


class Writer(DataSourceArrowWriter):
    """Writes one DataFrame; created once, and used by every attempt of every task."""

    def __init__(self, kind: Kind, options: Mapping[str, str], secrets: Mapping[str, str]) -> None:
        self._kind = kind
        self._options = options
        self._secrets = secrets
        self._job = options.get(JOB) or uuid.uuid4().hex

    def write(  # type: ignore[override]  # gets batches, as the base; the base's base gets rows
        self, iterator: Iterator[pa.RecordBatch]
    ) -> Written:
        """Send a partition's rows."""
        context = TaskContext.get()
        assert context is not None
        partition = context.partitionId()
        sink = sink_of(self._kind, self._options, self._secrets, self._job, partition)
        default = self._options.get(self._kind.destination)
        sender = _Sender(sink, self._job)
        ids = f"{self._job}-{partition}-"
        count = 0
        with contextlib.closing(sink):
            for batch in iterator:
                if batch.num_rows:
                    sender.send(messages(self._kind, batch, default, ids, count))
                count += batch.num_rows
        return Written(count)


class _Sender:
    """Sends the messages of one partition, and retries after errors that may pass."""

    def __init__(self, sink: Sink, job: str) -> None:
        self._sink = sink
        self._job = job
        self._origin = Origin(job, job, "", "spark", "", "", _MOST_ROWS)
        self._open = False
        self._arrived = -1  # ordinal of the last row that has arrived

    def send(self, messages: pa.RecordBatch) -> None:
        """Send those of the messages that have not arrived yet."""
        first = cast("int", messages.column("ordinal")[0].as_py())
        for wait in (*_WAITS, None):
            try:
                self._open_at(first)
                left = messages.slice(max(0, self._arrived + 1 - first))
                if left.num_rows:
                    origin = self._origin if self._sink.exactly_once else None
                    batch = SinkBatch(_SEGMENT, "", left, origin=origin)
                    self._arrived = self._sink.send(batch, lambda: None)
            except Retryable:
                self._sink.close()
                self._open = False
                if wait is None:
                    raise
                time.sleep(wait)
            else:
                return

    def _open_at(self, first: int) -> None:
        """Open the sink if needed, and read how much of the partition has already arrived."""
        if self._open:
            return
        self._sink.open()
        self._open = True
        if self._sink.exactly_once:
            position = self._sink.position()
            if position is not None and position.uid != self._job:
                raise SinkRejected(
                    f"job {self._job}: the position that the sink keeps is not its own"
                )
            self._arrived = -1 if position is None else position.ordinal
            if self._arrived + 1 < first:
                raise SinkRejected(
                    f"job {self._job}: the sink has lost rows of this partition that it had "
                    "acknowledged; the next attempt of the task sends them again"
                )


def check_options(kind: Kind, options: Mapping[str, str]) -> None:
    """Check the options as far as possible before any task runs.

    Raises:
        SpecError: An option is unknown or contains a secret, or `job` is invalid.
    """
    problems = []
    for name, text in options.items():
        if name.partition(".")[0] not in {*kind.fields, JOB}:
            names = ", ".join(sorted({*kind.fields, JOB}))
            problems.append(f"option {name!r} is unknown; known are {names}")
        elif _holds_secret(kind, name, text):
            problems.append(
                f"option {name!r} holds a secret, which Spark would show: write ${{NAME}} for it, "
                "and give its value to register(spark, secrets={...}) or to the tasks' environment"
            )
    if JOB in options and not NAME.fullmatch(options[JOB]):
        problems.append("option 'job' must be 1 to 100 letters, digits, `-`, `_` or `.`")
    if problems:
        raise SpecError(*(f"{kind.format}: {problem}" for problem in problems))


def _holds_secret(kind: Kind, name: str, text: str) -> bool:
    literal = _REFERENCE.sub("", text)
    if SECRET_NAME.search(name):
        return bool(literal)
    literal = literal.replace(":@", "@")
    if name in kind.spark.tokens and any(
        _REFERENCE.sub("", token) for token in _TOKEN.findall(text)
    ):
        return True
    return mask(literal) != literal


def sink_of(
    kind: Kind, options: Mapping[str, str], secrets: Mapping[str, str], job: str, partition: int
) -> Sink:
    """Return the sink for one partition of a job, not yet open.

    Raises:
        SpecError: An option is missing or invalid.
    """
    config: dict[str, Any] = {"id": f"partition-{partition}", kind.destination: _ANY_NAME}
    for name, text in options.items():
        if name == JOB:
            continue
        filled, _ = expand(text, {**os.environ, **secrets})
        field, dot, inner = name.partition(".")
        if dot:
            config.setdefault(field, {})[inner] = filled
        else:
            config[field] = filled
    try:
        # Options are always text, whatever the type of their field.
        declared = kind.type.config.model_validate(config, strict=False)
    except ValidationError as error:
        raise SpecError(
            *(
                f"{kind.format}: option {'.'.join(map(str, detail['loc']))!r} {sentence(detail)}"
                for detail in error.errors()
            )
        ) from None
    if compile_template(config[kind.destination]).variables:
        raise SpecError(
            f"{kind.format}: option {kind.destination!r} has a variable, but rows are not events; "
            "give the rows a column `destination`"
        )
    return kind.type.build(declared, SinkContext(f"spark-{job}", brief=True))


def check_columns(kind: Kind, schema: StructType, options: Mapping[str, str]) -> None:
    """Check the columns of a DataFrame.

    Raises:
        SpecError: A column is missing, unknown or of the wrong type, or there is no destination.
    """
    types = {field.name.lower(): field.dataType for field in schema.fields}
    problems = [
        f"column {name!r} is unknown; known are {', '.join(_COLUMNS)}"
        for name in types
        if name not in _COLUMNS
    ]
    for name, data_type in types.items():
        texts = isinstance(data_type, MapType) and data_type.simpleString() == "map<string,string>"
        if not (isinstance(data_type, StringType) or (name == "headers" and texts)):
            wanted = "map<string,string> or string" if name == "headers" else "string"
            problems.append(f"column {name!r} is {data_type.simpleString()}; it must be {wanted}")
    if "value" not in types:
        problems.append("there is no column 'value', the message")
    if kind.destination not in options and kind.spark.always_named:
        problems.append(f"option {kind.destination!r} is needed")
    elif kind.destination not in options and "destination" not in types:
        problems.append(f"option {kind.destination!r} or a column 'destination' is needed")
    if problems:
        raise SpecError(*(f"{kind.format}: {problem}" for problem in problems))


def messages(
    kind: Kind, rows: pa.RecordBatch, default: str | None, ids: str, first: int
) -> pa.RecordBatch:
    """Return rows as `MESSAGES`, with ordinals from `first` on.

    Args:
        kind: The sink type.
        rows: Rows of a DataFrame whose columns were checked.
        default: The destination of rows without one; None if there is no default.
        ids: The prefix for the ids of rows without one; the row's number is appended.
        first: The number of the first row in its partition.

    Raises:
        SinkRejected: A row has no destination or no value.
    """
    count = rows.num_rows
    inputs = dict(zip((name.lower() for name in rows.schema.names), rows.columns, strict=True))
    ordinals = pa.array(range(first, first + count), pa.int64())
    nothing = pa.nulls(count, pa.string())

    def text(name: str) -> Any:
        return inputs[name].cast(pa.string()) if name in inputs else nothing

    destination = text("destination")
    if default is not None:
        destination = pc.fill_null(destination, default)
    numbered = pc.binary_join_element_wise(ids, cast("Any", ordinals.cast(pa.string())), "")
    event_id = pc.coalesce(text("event_id"), numbered)
    columns = {
        "ordinal": ordinals,
        "destination": _whole(kind, "destination", destination, first),
        "key": text("key"),
        "value": text("value")
        if kind.type.takes_tombstones
        else _whole(kind, "value", text("value"), first),
        "event_id": event_id,
        "idempotency_key": event_id,
        "headers": _headers(inputs["headers"]) if "headers" in inputs else nothing,
        "change_id": nothing,
    }
    return pa.RecordBatch.from_arrays([columns[name] for name in MESSAGES.names], schema=MESSAGES)


def _whole(kind: Kind, name: str, column: Any, first: int) -> Any:
    if column.null_count:
        row = first + pc.index(pc.is_null(column), True).as_py()
        raise SinkRejected(f"{kind.format}: row {row} of the partition has no {name}")
    return column


def _headers(column: Any) -> Any:
    if not pa.types.is_map(column.type):
        return column.cast(pa.string())
    texts = [
        None if pairs is None else orjson.dumps(dict(pairs)).decode()
        for pairs in column.to_pylist()
    ]
    return pa.array(texts, pa.string())
