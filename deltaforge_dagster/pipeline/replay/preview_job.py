"""The Spark job of a preview: runs a chain over segments, and compares its output.

The output is compared with what is recorded, batch by batch, and discarded: nothing is written.

Workers import this module: it needs no Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from deltaforge_dagster.frame import FRAME
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.process.stages import Counts
from deltaforge_dagster.pipeline.replay.comparison import compared
from deltaforge_dagster.processors.chain import ChainSpec


@dataclass(frozen=True, slots=True)
class PreviewJob:
    """One Spark job over the segments of a range.

    Attributes:
        chain: The processors.
        key: Unique for each preview, so that it shares no processor state with runs.
        journal_url: Where the segments are.
        segments: For each segment its captured file, and the file that sinks get; the latter is
            empty if processors left no rows.
        sample: Maximum number of events of each kind that a segment adds to the sample.
        values: Whether the sample contains values.
    """

    chain: ChainSpec
    key: str
    journal_url: str
    segments: Sequence[tuple[str, str]]
    sample: int
    values: bool

    def rows(self, number: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a segment as they were captured."""
        captured, _ = self.segments[number]
        return _rows(Journal(self.journal_url), captured)

    def finish(
        self, number: int, output: Iterator[pa.RecordBatch], counts: Callable[[], Counts]
    ) -> dict[str, Any]:
        """Compare the chain's output of a segment with the recorded rows."""
        _, recorded = self.segments[number]
        journal = Journal(self.journal_url)
        difference = compared(
            _rows(journal, recorded), output, sample=self.sample, values=self.values
        )
        return {**difference.to_json(), "processors": counts()}


def _rows(journal: Journal, path: str) -> Iterator[pa.RecordBatch]:
    if path:
        yield from journal.share(path, FRAME.names, ordinals=None, part=0, of=1)
