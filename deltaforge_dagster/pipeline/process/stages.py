"""A chain in Spark's tasks: what each of its stages does with the segments of a task.

A chain without SQL has one stage, and a task is one call of `run_stage` from a segment's rows to its
report. Each `sql` processor begins another stage: rows leave the Python worker for Spark's own
engine and come to another worker of the same task with what was computed (`processors.transit`). So a
chain of any length is one Spark job, in which each segment stays in one task, from its first row
to its last and in order.

What goes wrong in a stage travels to the last one, which reports it.

Workers import this module: it needs no Spark.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa

from deltaforge_dagster import errors
from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.processors.chain import Chain, ChainSpec
from deltaforge_dagster.processors.sql.sql import columns_read
from deltaforge_dagster.processors.sql.transit import Item, note, packed, unpacked

Counts = Mapping[str, Mapping[str, int]]
"""What the processors of a chain counted, by processor."""

REPORT = pa.schema(
    [
        pa.field("made", pa.string()),
        pa.field("error", pa.string()),
        pa.field("text", pa.string()),
    ]
)
"""What a task reports of a segment: JSON text, or which error stopped it, and its text."""


class SegmentJob(Protocol):
    """What is done with segments around a chain; goes to Spark's tasks as it is."""

    @property
    def chain(self) -> ChainSpec:
        """What to make of the rows."""
        ...

    @property
    def key(self) -> str:
        """What processors remember in a worker is forgotten when a job with another key comes."""
        ...

    def rows(self, number: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a segment."""
        ...

    def finish(
        self, number: int, made: Iterator[pa.RecordBatch], counts: Callable[[], Counts]
    ) -> dict[str, Any]:
        """Do what is to be done with the output of the chain, and return what to report of it.

        Args:
            number: Of the segment, among those of the job.
            made: What the chain makes of its rows.
            counts: Returns what the processors counted; whole when `made` is at its end.
        """
        ...


def run_stage(
    job: SegmentJob, number: int, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Do the work of one stage in a task; what Spark maps over its input.

    Args:
        job: The job.
        number: Of the stage, from 0.
        batches: For the first stage the numbers of segments, for others what the stage before has sent.

    Yields:
        For the last stage a row of `REPORT` for each segment, for others rows in transit.
    """
    segments = _read(job, batches) if number == 0 else _arrived(unpacked(batches))
    following = job.chain.sql_behind(number)
    columns = columns_read(following)
    for one in segments:
        if following:
            yield note(columns, {"segment": one.number})
        try:
            chain = _kept(job, number)
            chain.counts.clear()
            counts = _StageCounts(one, chain)
            made = chain.run(one.rows)
            if following:
                for rows in made:
                    yield packed(columns, rows)
                yield note(columns, {"counts": counts()})
            else:
                yield _report(made=json.dumps(job.finish(one.number, made, counts)))
        except DeltaforgeError as error:  # as a failure of the task it would lose its class
            failed = {"error": type(error).__name__, "text": str(error)}
            yield note(columns, failed) if following else _report(**failed)
        if number:
            one.skip()


def read_report(report: pa.Table) -> Iterator[dict[str, Any]]:
    """Yield what the tasks of a job have reported, in no order.

    Raises:
        DeltaforgeError: What stopped one of them.
    """
    for row in report.to_pylist():
        _raise(row)
        yield json.loads(row["made"])


@dataclass(slots=True)
class _Segment:
    """A segment as it comes to a stage.

    Attributes:
        number: Of the segment, among those of the job.
        rows: Its rows.
        counts: What was counted before this stage; complete when `rows` is at its end.
    """

    number: int
    rows: Iterator[pa.RecordBatch]
    counts: dict[str, Mapping[str, int]] = field(default_factory=dict)

    def skip(self) -> None:
        """Pass what is left of it after a failure."""
        with contextlib.suppress(DeltaforgeError):  # there is one already
            for _ in self.rows:
                pass


@dataclass(frozen=True, slots=True)
class _StageCounts:
    """What was counted in this stage and before."""

    segment: _Segment
    chain: Chain

    def __call__(self) -> Counts:
        return {
            **self.segment.counts,
            **{name: dict(one) for name, one in self.chain.counts.items()},
        }


def _read(job: SegmentJob, numbers: Iterable[pa.RecordBatch]) -> Iterator[_Segment]:
    for batch in numbers:
        for number in batch.column(0).to_numpy().tolist():
            yield _Segment(number, job.rows(number))


def _arrived(items: Iterator[Item]) -> Iterator[_Segment]:
    for opening in items:
        assert isinstance(opening, dict)
        counts: dict[str, Mapping[str, int]] = {}
        yield _Segment(opening["segment"], _rows(items, counts), counts)


def _rows(items: Iterator[Item], counts: dict[str, Mapping[str, int]]) -> Iterator[pa.RecordBatch]:
    """Yield rows up to the note that closes their segment."""
    for item in items:
        if isinstance(item, dict):
            _raise(item)
            counts.update(item["counts"])
            return
        yield item


def _raise(report: Mapping[str, Any]) -> None:
    if report.get("error") is not None:
        raise getattr(errors, report["error"])(report["text"])


def _report(**columns: str) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([columns], REPORT)


_chains: dict[tuple[str, int], Chain] = {}


def _kept(job: SegmentJob, stage: int) -> Chain:
    """Return the processors that this worker has for a stage; those of one job's key are kept."""
    if any(key != job.key for key, _ in _chains):
        for one in _chains.values():
            one.close()
        _chains.clear()
    if (job.key, stage) not in _chains:
        _chains[job.key, stage] = Chain(job.chain, stage)
    return _chains[job.key, stage]
