"""The seam between the journal and its messages: what every processor promises.

A processor gets batches of the change frame in log order and gives back what goes on, in the order in
which it shall go on: it may change rows, drop them and add some. One object serves one task of Spark,
in one thread; what it remembers from batch to batch is lost with that task's process, or when it
fails.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

import pyarrow as pa


class Processor(Protocol):
    """One processor of a pipeline file."""

    @property
    def counts(self) -> Counter[str]:
        """What it counts beside rows in and out: a metric's name, after a colon what it is labelled."""
        ...

    def process(self, frame: pa.RecordBatch) -> pa.RecordBatch:
        """Return what becomes of a batch, which has at least one row, with the same columns.

        Rows may come back several times, and new ones may have an `event_id` of their own or null:
        the chain gives them ids and marks them (`identity`).

        Raises:
            ProcessorFailed: It broke on the batch: nothing of it goes on.
        """
        ...

    def close(self) -> None:
        """End what it holds. Safe to call twice."""
        ...
