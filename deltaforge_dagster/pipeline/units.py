"""Units: the messages of one segment that a sink is given, and acknowledges, together.

What is prepared comes in batches of some 10,000 messages, which say nothing about what belongs
together. A unit is made of them for what a sink does in one step: a transaction of Kafka, a series of
blocks of Redis, one acknowledgement, and the checkpoint after it. How large it may be:

======================  ====================================================================
most sinks              as it comes, unless the file says more: nothing is copied
a sink that commits     50,000 messages or 32 MiB: a commit of Kafka takes two round trips, 9 ms,
                        in which nothing is sent (`sinks.base.Sink.commits`)
`spec.batch` is given   `max_events` and `max_bytes`, for every sink; with `respect_source_tx` a unit
                        ends only where a transaction of the source ends, so that one larger than
                        the limits makes a larger unit
`checkpoint.after` too  no more than so many messages
======================  ====================================================================

A unit never divides the messages of one change, never spans segments, nor the parts in which a very
large segment is prepared: there a transaction of more than a part is divided all the same.
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

JOINED_ROWS = 50_000
JOINED_BYTES = 32 << 20
"""What a unit of a sink exactly once has at most, and every unit of a limit that the file leaves out."""

_Numbers: TypeAlias = "npt.NDArray[np.int64]"
TransactionEnds = Callable[[], _Numbers]
"""Returns the ordinals of a segment's rows that end a transaction of the source, in order."""

_SIZED = ("destination", "key", "value", "headers")


@dataclass(frozen=True, slots=True)
class UnitLimits:
    """How large units are.

    Attributes:
        max_rows: Messages of a unit.
        max_bytes: Bytes of its values, keys, headers and destinations.
        whole_transactions: Whether a unit ends only where a transaction of the source ends.
    """

    max_rows: int
    max_bytes: int
    whole_transactions: bool = False


class Units:
    """How the messages of one pipeline's sinks are cut, and when their checkpoints are written.

    Args:
        spec: What the file says.
        journal: Where transactions end is read from.
    """

    def __init__(self, spec: Spec, journal: Journal) -> None:
        batch, after = spec.batch or Batch(), spec.engine.checkpoint.after
        self._journal = journal
        self._given = batch.max_events is not None or batch.max_bytes is not None
        self._after = after if after is not None else 1 if self._given else None
        self._limits = UnitLimits(
            max_rows=min(batch.max_events or JOINED_ROWS, after or JOINED_ROWS),
            max_bytes=batch.max_bytes or JOINED_BYTES,
            whole_transactions=self._given and batch.respect_source_tx,
        )

    def limits(self, *, commits: bool) -> UnitLimits | None:
        """Return how large units are for a sink, None for messages that are sent as they come."""
        return self._limits if commits or self._after is not None else None

    def due(self, messages: int) -> bool:
        """Say whether so many messages since the last checkpoint ask for the next one."""
        return self._after is not None and messages >= self._after

    def transaction_ends(self, segment: SegmentRow) -> _Numbers:
        """Return the ordinals of a segment's rows that end a transaction of the source, in order.

        Raises:
            JournalDamaged: The segment's file is missing or cannot be read.
        """
        flags = [one.column("tx_end") for one in self._journal.batches(segment, ["tx_end"])]
        ends: _Numbers = np.flatnonzero(np.concatenate([np.asarray(one) for one in flags]))
        return ends


def cut(
    batches: Iterable[SinkBatch], limits: UnitLimits, ends: TransactionEnds
) -> Iterator[SinkBatch]:
    """Yield the messages of consecutive batches of one segment, in units.

    An error of `batches` is raised after everything that came before it was yielded.

    Args:
        batches: The batches; none divides the messages of a change.
        limits: How large a unit is, unless a single change or transaction is larger.
        ends: Asked when transactions have to stay whole, and units have to be cut.
    """
    waiting: _Waiting | None = None
    try:
        for batch in batches:
            if waiting is None:
                waiting = _Waiting(batch, limits, ends)
            waiting.add(batch.messages)
            yield from waiting.units(last=False)
    except DeltaforgeError:
        if waiting is not None:
            yield from waiting.units(last=True)
        raise
    if waiting is not None:
        yield from waiting.units(last=True)


class _Waiting:
    """Messages that are in no unit yet."""

    def __init__(self, pattern: SinkBatch, limits: UnitLimits, ends: TransactionEnds) -> None:
        self._pattern = pattern
        self._limits = limits
        self._ends = ends
        self._known_ends: _Numbers | None = None
        self._parts: list[pa.RecordBatch] = []
        self._ordinals = np.zeros(0, np.int64)
        self._sizes = np.zeros(0, np.int64)

    def add(self, messages: pa.RecordBatch) -> None:
        self._parts.append(messages)
        ordinals = messages.column("ordinal").to_numpy()
        self._ordinals = np.concatenate([self._ordinals, ordinals])
        self._sizes = np.concatenate([self._sizes, _sizes(messages)])

    def units(self, *, last: bool) -> Iterator[SinkBatch]:
        """Yield the units that are complete; with `last` nothing is left afterwards."""
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
                break  # what comes next decides whether this is an end
            yield replace(self._pattern, messages=self._rows(begin, stop))
            begin = stop
        self._forget(begin)

    def _possible_ends(self) -> _Numbers:
        """Return before which rows a unit may end."""
        before, after = self._ordinals[:-1], self._ordinals[1:]
        if not self._limits.whole_transactions:
            return 1 + np.flatnonzero(before != after)
        if self._known_ends is None:
            self._known_ends = self._ends()
        passed = np.searchsorted(self._known_ends, [before, after], "left")
        return 1 + np.flatnonzero(passed[0] != passed[1])

    def _rows(self, begin: int, stop: int) -> pa.RecordBatch:
        first = 0
        for part in self._parts:
            if first <= begin and stop <= first + part.num_rows:
                return part.slice(begin - first, stop - begin)
            first += part.num_rows
        table = pa.Table.from_batches(self._parts).slice(begin, stop - begin)
        (joined,) = table.combine_chunks().to_batches()
        return joined

    def _forget(self, rows: int) -> None:
        self._ordinals, self._sizes = self._ordinals[rows:], self._sizes[rows:]
        while self._parts and rows >= self._parts[0].num_rows:
            rows -= self._parts.pop(0).num_rows
        if rows:
            self._parts[0] = self._parts[0].slice(rows)


def _choose(ends: _Numbers, begin: int, fit: int, rows: int) -> int:
    """Return the last end up to `fit`, else the next one: a single change or transaction is larger."""
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
