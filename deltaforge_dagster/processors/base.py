"""The interface that every processor implements.

A processor gets batches of the change frame in log order and returns the rows to pass on, in the
order in which they are passed on: it may change rows, drop them and add new ones. One object serves
one Spark task, in one thread; state that it keeps between batches is lost when the task's process
ends or the processor fails.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

import pyarrow as pa


class Processor(Protocol):
    """One processor of a pipeline file."""

    @property
    def counts(self) -> Counter[str]:
        """Counters besides rows in and out, by metric name, which `:` and a label may follow."""
        ...

    def process(self, frame: pa.RecordBatch) -> pa.RecordBatch:
        """Return the result of a batch, which has at least one row, with the same columns.

        Rows may be returned several times. New rows may have a new `event_id`, or null: the chain
        assigns ids and marks new rows as synthetic (`chain.identified`).

        Raises:
            ProcessorFailed: The processor failed; no row of the batch is passed on.
        """
        ...

    def close(self) -> None:
        """Release all resources. Safe to call twice."""
        ...
