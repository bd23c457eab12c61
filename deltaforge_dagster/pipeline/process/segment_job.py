"""The Spark job that runs a pipeline's chain (`stages`) over segments.

It reads them and writes the chain's output. The output of a segment is a journal file like the
segment's own. It does not count until the run has recorded it in the state store, so a task that
outlives its run, or is tried twice, leaves an orphan. The state of a script is kept in the Python
worker from segment to segment, as long as the run's segments come to that worker.

Workers import this module: it needs no Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from deltaforge_dagster.frame import FRAME, PROCESSED
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.process.stages import Counts, read_report
from deltaforge_dagster.processors.chain import ChainSpec
from deltaforge_dagster.state.records import Processed


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


def processed_by(report: pa.Table) -> list[Processed]:
    """Return the output that tasks reported, ordered by segment number.

    Raises:
        DeltaforgeError: The error of a task that failed.
    """
    outputs = [Processed(**fields) for fields in read_report(report)]
    return sorted(outputs, key=lambda output: output.segment)
