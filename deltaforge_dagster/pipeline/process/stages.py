"""The stages of a chain, as Spark's tasks run them over segments.

A chain without SQL has one stage: one call of `run_stage` goes from a segment's rows to its report.
Each `sql` processor begins another stage: rows leave the Python worker for Spark's SQL engine and
arrive with the results at another worker of the same task (`processors.sql`). So a chain of
any length is one Spark job, in which all rows of a segment stay in one task, in order. An error in
a stage is passed on to the last stage, which reports it.

The job of a pipeline (`ProcessingJob`) reads segments and writes the chain's output. The output of
a segment is a journal file like the segment's own. It does not count until the run has recorded it
in the state store, so a task that outlives its run, or is tried twice, leaves an orphan. The state
of a script is kept in the Python worker from segment to segment, as long as the run's segments come
to that worker.

Workers import this module: it needs no Spark.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import pyarrow as pa

from deltaforge_dagster import errors
from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.frame import FRAME, PROCESSED
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.processors.chain import Chain, ChainSpec
from deltaforge_dagster.processors.sql import Item, columns_read, note, packed, unpacked
from deltaforge_dagster.state.records import Processed

Counts = Mapping[str, Mapping[str, int]]
"""The counts of each processor of a chain."""

REPORT = pa.schema(
    [
        pa.field("made", pa.string()),
        pa.field("error", pa.string()),
        pa.field("text", pa.string()),
    ]
)
"""Columns of a task's report of a segment: the result as JSON, or class and text of the error."""


class SegmentJob(Protocol):
    """Reads segments for a chain, and handles its output; pickled for Spark's tasks."""

    @property
    def chain(self) -> ChainSpec:
        """The processors."""
        ...

    @property
    def key(self) -> str:
        """Scope of the processors' state in a worker.

        The state is discarded when a job with another key comes.
        """
        ...

    def rows(self, number: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a segment."""
        ...

    def finish(
        self, number: int, output: Iterator[pa.RecordBatch], counts: Callable[[], Counts]
    ) -> dict[str, Any]:
        """Consume the output of the chain for a segment; return the segment's report, JSON values.

        Args:
            number: Index of the segment in the job.
            output: The chain's output.
            counts: Returns the processors' counts; complete once `output` is exhausted.
        """
        ...


@dataclass(frozen=True, slots=True)
class ProcessingJob:
    """A Spark job with one task for each segment.

    Attributes:
        chain: The processors.
        run_id: Id of the run; the state of scripts is discarded when another run comes.
        journal_url: Where the segments are.
        pipeline: Name of the pipeline.
        uid: Its uid.
        epoch: Epoch of the run's lease.
        segments: Number and path of each segment.
    """

    chain: ChainSpec
    run_id: str
    journal_url: str
    pipeline: str
    uid: str
    epoch: int
    segments: Sequence[tuple[int, str]]

    @property
    def key(self) -> str:
        """Scope of the state of scripts; it is discarded when another run or chain comes."""
        return f"{self.pipeline}/{self.run_id}/{self.chain.hash}"

    def rows(self, number: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a segment as they were captured."""
        _, path = self.segments[number]
        yield from Journal(self.journal_url).share(path, FRAME.names, ordinals=None, part=0, of=1)

    def finish(
        self, number: int, output: Iterator[pa.RecordBatch], counts: Callable[[], Counts]
    ) -> dict[str, Any]:
        """Write the chain's output of a segment; return the fields of its `Processed`."""
        return asdict(self._written(number, output, counts))

    def _written(
        self, number: int, output: Iterator[pa.RecordBatch], counts: Callable[[], Counts]
    ) -> Processed:
        segment, _ = self.segments[number]
        writer = Journal(self.journal_url).writer(self.pipeline, self.uid, segment, self.epoch)
        try:
            for rows in output:
                writer.write(rows.select(PROCESSED.names))
        except BaseException:
            writer.abort()
            raise
        if not writer.rows:
            writer.abort()
            return Processed(segment, self.chain.hash, None, None, None, 0, 0, counts())
        done = writer.close()
        return Processed(
            segment,
            self.chain.hash,
            done.path,
            done.checksum,
            done.content_hash,
            done.rows,
            done.bytes,
            counts(),
        )


def run_stage(
    job: SegmentJob, number: int, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Run one stage of a task; Spark calls this with the input of the stage.

    Args:
        job: The job.
        number: Number of the stage, from 0.
        batches: For the first stage the indexes of segments, for others the previous stage's
            output.

    Yields:
        For the last stage a row of `REPORT` for each segment, for others rows in transit.
    """
    segments = _read(job, batches) if number == 0 else _arrived(unpacked(batches))
    following = job.chain.sql_behind(number)
    columns = columns_read(following)
    for segment in segments:
        if following:
            yield note(columns, {"segment": segment.number})
        try:
            chain = _chain_for(job, number)
            chain.counts.clear()
            counts = _StageCounts(segment, chain)
            output = chain.run(segment.rows)
            if following:
                for rows in output:
                    yield packed(columns, rows)
                yield note(columns, {"counts": counts()})
            else:
                yield _report(made=json.dumps(job.finish(segment.number, output, counts)))
        except DeltaforgeError as error:  # Spark would hide a raised error's class
            failed = {"error": type(error).__name__, "text": str(error)}
            yield note(columns, failed) if following else _report(**failed)
        if number:
            segment.skip()


def read_report(report: pa.Table) -> Iterator[dict[str, Any]]:
    """Yield the reports of a job's tasks, in no particular order.

    Raises:
        DeltaforgeError: The error that a task reported.
    """
    for row in report.to_pylist():
        _raise(row)
        yield json.loads(row["made"])


def processed_by(report: pa.Table) -> list[Processed]:
    """Return the output that tasks reported, ordered by segment number.

    Raises:
        DeltaforgeError: The error of a task that failed.
    """
    outputs = [Processed(**fields) for fields in read_report(report)]
    return sorted(outputs, key=lambda output: output.segment)


@dataclass(slots=True)
class _Segment:
    """A segment as it arrives at a stage.

    Attributes:
        number: Index of the segment in the job.
        rows: Its rows.
        counts: The counts of previous stages; complete once `rows` is exhausted.
    """

    number: int
    rows: Iterator[pa.RecordBatch]
    counts: dict[str, Mapping[str, int]] = field(default_factory=dict)

    def skip(self) -> None:
        """Skip the remaining rows after a failure, up to the next segment."""
        with contextlib.suppress(DeltaforgeError):  # the first error was reported already
            for _ in self.rows:
                pass


@dataclass(frozen=True, slots=True)
class _StageCounts:
    """The counts of this stage and the previous ones."""

    segment: _Segment
    chain: Chain

    def __call__(self) -> Counts:
        return {
            **self.segment.counts,
            **{name: dict(tally) for name, tally in self.chain.counts.items()},
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
    for batch_or_note in items:
        if isinstance(batch_or_note, dict):
            _raise(batch_or_note)
            counts.update(batch_or_note["counts"])
            return
        yield batch_or_note


def _raise(report: Mapping[str, Any]) -> None:
    if report.get("error") is not None:
        raise getattr(errors, report["error"])(report["text"])


def _report(**columns: str) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([columns], REPORT)


_chains: dict[tuple[str, int], Chain] = {}


def _chain_for(job: SegmentJob, stage: int) -> Chain:
    """Return this worker's processors for a stage.

    They are kept until a job with another key comes.
    """
    if any(key != job.key for key, _ in _chains):
        for chain in _chains.values():
            chain.close()
        _chains.clear()
    if (job.key, stage) not in _chains:
        _chains[job.key, stage] = Chain(job.chain, stage)
    return _chains[job.key, stage]
