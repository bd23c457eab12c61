"""Delivery batches: the messages of one segment that are sent to a sink and acknowledged together.

Encoded messages arrive in batches of about 10,000, whose boundaries mean nothing. A delivery batch
is what a sink handles in one step: a Kafka transaction, a series of Redis blocks, one
acknowledgement and the checkpoint after it. Its size:

======================  ====================================================================
most sinks              the encoded batches as they are
a sink that takes parts 100,000 messages or 64 MiB: a Kafka commit takes two round trips, 9 ms,
                        during which nothing is sent (`sinks.base.Sink.takes_parts`)
`spec.batch` is given   `max_events` and `max_bytes`, for every sink; with `respect_source_tx` a
                        batch ends only where a source transaction ends, so that a transaction
                        larger than the limits makes a larger batch
`checkpoint.after` too  at most this many messages
======================  ====================================================================

Of several encoded batches, a sink that takes parts gets each as it is (`SinkBatch.earlier`). For
other sinks they are joined, which copies every message; this only happens if `spec.batch` or
`checkpoint.after` is given.

A delivery batch never divides the messages of one change and never spans segments. Very large
segments are encoded in parts, and a batch does not span these parts either: a transaction larger
than a part is divided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.config.model import Batch, Spec
from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.sinks.base import SinkBatch
from deltaforge_dagster.state.records import SegmentRow

PARTS_ROWS = 100_000
PARTS_BYTES = 64 << 20
"""Limits of a batch for a sink that takes parts, if the pipeline file sets none."""

JOINED_ROWS = 50_000
JOINED_BYTES = 32 << 20
"""Defaults for limits that the pipeline file omits, in all other cases."""

_Numbers: TypeAlias = "npt.NDArray[np.int64]"
TransactionEnds = Callable[[], _Numbers]
"""Returns the ordinals of a segment's rows that end a source transaction, ascending."""

_SIZED = ("destination", "key", "value", "headers")


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Maximum size of a delivery batch.

    Attributes:
        max_rows: Number of messages.
        max_bytes: Bytes of their values, keys, headers and destinations.
        whole_transactions: Whether a batch ends only where a source transaction ends.
        joined: Whether all messages of a batch are in its last part, `SinkBatch.messages`.
    """

    max_rows: int
    max_bytes: int
    whole_transactions: bool = False
    joined: bool = True


class BatchSettings:
    """Batch sizes and checkpoint intervals of a pipeline, from its file.

    Args:
        spec: The pipeline file.
        journal: Tells where transactions end.
    """

    def __init__(self, spec: Spec, journal: Journal) -> None:
        self._journal = journal
        self._batch = batch = spec.batch or Batch()
        self._has_limits = batch.max_events is not None or batch.max_bytes is not None
        self._after = spec.engine.checkpoint.after

    def limits(self, *, parts: bool) -> BatchLimits | None:
        """Return the batch limits for a sink, None if encoded batches are sent as they are.

        Args:
            parts: Whether the sink takes several parts at once.
        """
        if not (parts or self._has_limits or self._after):
            return None
        large = parts and not self._has_limits
        rows, size = (PARTS_ROWS, PARTS_BYTES) if large else (JOINED_ROWS, JOINED_BYTES)
        return BatchLimits(
            max_rows=min(self._batch.max_events or rows, self._after or rows),
            max_bytes=self._batch.max_bytes or size,
            whole_transactions=self._has_limits and self._batch.respect_source_tx,
            joined=not parts,
        )

    def due(self, messages: int) -> bool:
        """Return whether a checkpoint is due after this many messages since the last one."""
        return bool(self._has_limits or self._after) and messages >= (self._after or 1)

    def transaction_ends(self, segment: SegmentRow) -> _Numbers:
        """Return the ordinals of a segment's rows that end a source transaction, ascending.

        Raises:
            JournalDamaged: The segment's file is missing or cannot be read.
        """
        flags = [batch.column("tx_end") for batch in self._journal.batches(segment, ["tx_end"])]
        ends: _Numbers = np.flatnonzero(np.concatenate([np.asarray(column) for column in flags]))
        return ends


def cut(
    batches: Iterable[SinkBatch], limits: BatchLimits, ends: TransactionEnds
) -> Iterator[SinkBatch]:
    """Yield the messages of one segment as delivery batches.

    If `batches` raises an error, it is raised after all messages before it were yielded.

    Args:
        batches: Consecutive encoded batches; none divides the messages of a change.
        limits: Maximum size, exceeded only by a single change or transaction that is larger.
        ends: Called when transactions must stay whole and a batch has to be cut.
    """
    waiting: _Waiting | None = None
    try:
        for batch in batches:
            if waiting is None:
                waiting = _Waiting(batch, limits, ends)
            waiting.add(batch.messages)
            yield from waiting.batches(last=False)
    except DeltaforgeError:
        if waiting is not None:
            yield from waiting.batches(last=True)
        raise
    if waiting is not None:
        yield from waiting.batches(last=True)


class _Waiting:
    """Messages that are not in a delivery batch yet."""

    def __init__(self, pattern: SinkBatch, limits: BatchLimits, ends: TransactionEnds) -> None:
        self._pattern = pattern
        self._limits = limits
        self._ends = ends
        self._transaction_ends: _Numbers | None = None
        self._parts: list[pa.RecordBatch] = []
        self._ordinals = np.zeros(0, np.int64)
        self._sizes = np.zeros(0, np.int64)

    def add(self, messages: pa.RecordBatch) -> None:
        self._parts.append(messages)
        ordinals = messages.column("ordinal").to_numpy()
        self._ordinals = np.concatenate([self._ordinals, ordinals])
        self._sizes = np.concatenate([self._sizes, _sizes(messages)])

    def batches(self, *, last: bool) -> Iterator[SinkBatch]:
        """Yield the complete batches; with `last`, also the incomplete one."""
        rows = len(self._ordinals)
        before = np.concatenate([[0], np.cumsum(self._sizes)])
        ends: _Numbers | None = None
        begin = 0
        while begin < rows:
            fit = int(np.searchsorted(before, before[begin] + self._limits.max_bytes, "right")) - 1
            fit = max(begin + 1, min(fit, begin + self._limits.max_rows))
            if fit >= rows and not last:
                break
            ends = self._possible_ends() if ends is None and fit < rows else ends
            stop = rows if ends is None else _choose(ends, begin, fit, rows)
            if stop == rows and not last:
                break  # the next message decides whether a batch may end here
            *earlier, messages = self._parts_of(begin, stop)
            yield replace(self._pattern, messages=messages, earlier=tuple(earlier))
            begin = stop
        self._forget(begin)

    def _possible_ends(self) -> _Numbers:
        """Return the row indexes before which a batch may end."""
        before, after = self._ordinals[:-1], self._ordinals[1:]
        if not self._limits.whole_transactions:
            return 1 + np.flatnonzero(before != after)
        if self._transaction_ends is None:
            self._transaction_ends = self._ends()
        passed = np.searchsorted(self._transaction_ends, [before, after], "left")
        return 1 + np.flatnonzero(passed[0] != passed[1])

    def _parts_of(self, begin: int, stop: int) -> list[pa.RecordBatch]:
        """Return the messages `begin` to `stop` as they came.

        If they shall be joined, they are a single part.
        """
        table = pa.Table.from_batches(self._parts).slice(begin, stop - begin)
        return (table.combine_chunks() if self._limits.joined else table).to_batches()

    def _forget(self, rows: int) -> None:
        self._ordinals, self._sizes = self._ordinals[rows:], self._sizes[rows:]
        while self._parts and rows >= self._parts[0].num_rows:
            rows -= self._parts.pop(0).num_rows
        if rows:
            self._parts[0] = self._parts[0].slice(rows)


def _choose(ends: _Numbers, begin: int, fit: int, rows: int) -> int:
    """Return the last possible end up to `fit`.

    If a single change or transaction is larger, return the next possible end.
    """
    if fit >= rows:
        return rows
    after = int(np.searchsorted(ends, begin, "right"))
    within = int(np.searchsorted(ends, fit, "right"))
    if after < within:
        return int(ends[within - 1])
    return int(ends[after]) if after < len(ends) else rows


def _sizes(messages: pa.RecordBatch) -> _Numbers:
    total = np.zeros(messages.num_rows, np.int64)
    for name in _SIZED:
        lengths = pc.binary_length(cast("pa.StringArray", messages.column(name)))
        total += lengths.fill_null(0).to_numpy(zero_copy_only=False)
    return total
