"""What a Spark task does for a preview: run a chain over segments, and compare with what is recorded.

Nothing is written: what the chain makes is compared as it comes and forgotten.

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
        chain: What to make of the rows.
        key: Of this preview: what processors remember is its own.
        journal_url: Where the segments are.
        segments: Of each the file as it was captured, and the one that sinks get; empty where
            processors left nothing.
        sample: How many events of each kind a segment adds to the sample, at most.
        values: Whether their values are in it.
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
        self, number: int, made: Iterator[pa.RecordBatch], counts: Callable[[], Counts]
    ) -> dict[str, Any]:
        """Compare what the chain made of a segment with what is recorded."""
        _, recorded = self.segments[number]
        journal = Journal(self.journal_url)
        found = compared(_rows(journal, recorded), made, sample=self.sample, values=self.values)
        return {**found.to_json(), "processors": counts()}


def _rows(journal: Journal, path: str) -> Iterator[pa.RecordBatch]:
    if path:
        yield from journal.share(path, FRAME.names, ordinals=None, part=0, of=1)
