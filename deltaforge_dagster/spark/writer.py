"""The data sources that Spark calls, and their guarantees when tasks are retried.

Spark retries a failed task, and with speculation runs two attempts at the same time. Each attempt
sends its partition's rows in order, from the first on.

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
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.session import SparkSession
from pyspark.sql.types import StructType

from deltaforge_dagster.errors import Retryable, SinkRejected, SpecError
from deltaforge_dagster.sinks.base import Origin, Sink, SinkBatch
from deltaforge_dagster.spark import JOB, KINDS, Kind, rows
from deltaforge_dagster.spark import options as options_of_writes

if TYPE_CHECKING:  # a classic session does not need the packages of Connect
    from pyspark.sql.connect.session import SparkSession as ConnectSession

_WAITS = (1.0, 2.0, 4.0, 8.0)
"""Seconds between attempts to send; after the last one the task fails, and Spark may retry it."""

_SEGMENT = 1
"""The number of the only segment: a partition's rows are numbered through, as one segment."""
_MOST_ROWS = 1 << 62
"""More rows than any partition has: their number is unknown, so no row counts as the last one."""


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
        options_of_writes.check(self.kind, options)
        rows.check(self.kind, schema, options)
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
        sink = options_of_writes.sink(
            self._kind, self._options, self._secrets, self._job, partition
        )
        default = self._options.get(self._kind.destination)
        sender = _Sender(sink, self._job)
        ids = f"{self._job}-{partition}-"
        count = 0
        with contextlib.closing(sink):
            for batch in iterator:
                if batch.num_rows:
                    sender.send(rows.messages(self._kind, batch, default, ids, count))
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
