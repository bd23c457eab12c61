"""The Spark task that reads and decodes a log section, and writes it as a segment of the journal.

The file is the same as one that the run writes itself, under the segment number that the run
assigned. It does not count until the run has added the segment's row to the state store, in the
log's order. A task that outlives its run leaves an orphaned file.

Workers import this module: it needs no Spark.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

import pyarrow as pa

from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.journal.writer import WrittenSegment
from deltaforge_dagster.sources.base import LogSection, ReadLimits, SectionedSource

REPORT = pa.schema([pa.field("written", pa.string()), pa.field("problem", pa.string())])
"""Columns of a task's report: the written segment as JSON text, or why there is none."""


@dataclass(frozen=True, slots=True)
class WrittenSection:
    """A log section in the journal: its durable file, and the Arrow memory of its rows."""

    segment: WrittenSegment
    bytes: int


@dataclass(frozen=True, slots=True)
class SectionJob:
    """A Spark job with one task: a log section, and where to write its rows.

    It is pickled for Spark together with the source's credentials, which therefore never appear in
    a query plan.

    Attributes:
        source: Reads the log.
        section: The log section.
        reader: Number of the task's reader, different for all that read the source at the same
            time.
        max_events: Rows of one batch, at most.
        journal_url: Where the file goes.
        pipeline: Name of the pipeline.
        uid: Its uid.
        segment: Number of the segment.
        epoch: Epoch of the run's lease.
    """

    source: SectionedSource
    section: LogSection
    reader: int
    max_events: int
    journal_url: str
    pipeline: str
    uid: str
    segment: int
    epoch: int

    def run(self, numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write the segment; Spark calls this in a job with a single task and a single input row.

        Yields:
            One row of `REPORT`.
        """
        for _ in numbers:
            report: dict[str, str | None] = dict.fromkeys(REPORT.names)
            try:
                written = self._write()
                report["written"] = json.dumps(asdict(written))
            except DeltaforgeError as error:
                report["problem"] = str(error)
            yield pa.RecordBatch.from_pylist([report], REPORT)

    def _write(self) -> WrittenSection:
        writer = Journal(self.journal_url).writer(self.pipeline, self.uid, self.segment, self.epoch)
        limits = ReadLimits(max_events=self.max_events)
        try:
            for batch in self.source.read_section(self.section, limits, self.reader):
                if batch.rows is not None:
                    writer.write(batch.rows)
        except BaseException:
            writer.abort()
            raise
        finally:
            self.source.close()
        if not writer.rows:
            writer.abort()
            raise DeltaforgeError("nothing of it is captured")
        return WrittenSection(writer.close(), writer.bytes)


def written_by(report: pa.Table) -> WrittenSection:
    """Return what a task wrote.

    Raises:
        DeltaforgeError: The task wrote nothing; the message is the reason that it reported.
    """
    (row,) = report.to_pylist()
    if row["written"] is None:
        raise DeltaforgeError(row["problem"])
    fields = json.loads(row["written"])
    return WrittenSection(WrittenSegment(**fields["segment"]), fields["bytes"])


@dataclass(frozen=True, slots=True)
class WarmJob:
    """Has every Spark worker load code and kernels before the first log section needs them."""

    source: SectionedSource

    def run(self, numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Load code and kernels, and yield one row for each task."""
        for _ in numbers:
            pass
        self.source.warm()
        yield pa.RecordBatch.from_pydict({"task": [1]}, _TASK)


_TASK = pa.schema([pa.field("task", pa.int32())])
