"""The gate before the journal: rows of tables whose new form nobody has approved do not pass it.

With `engine.schemas.on_schema_change: pause_table` the first row of a version that waits for approval
closes the gate for its table: from that row on everything of the table is kept back, decoded as it is
(`Waiting`), until a run begins after the approval. Other tables pass. Whatever brings rows to the
journal goes through here: the stream, and held events that can be decoded at last.

`tx_end` marks the last row of a transaction, so it moves where that row is kept back: what passes, and
what is kept of each table, ends its transactions by itself. To know which row is the last, one
row of a transaction that is still open waits here until more of it comes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.errors import UnsupportedEvent
from deltaforge_dagster.frame import CAPTURED
from deltaforge_dagster.pipeline.waiting import full_names
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import ChangeBatch, HeldEvent, SourceNotes
from deltaforge_dagster.tables import SchemaStamp, TableSchema

_Mask = npt.NDArray[np.bool_]
_TX_END = CAPTURED.get_field_index("tx_end")


@dataclass(frozen=True, slots=True)
class Waiting(HeldEvent):
    """Rows of a table that wait for approval; `data` is `packed` rows."""

    changes: int = 1


def packed(rows: pa.RecordBatch) -> bytes:
    """Return the bytes that `unpacked` reads back."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_batch(rows)
    return sink.getvalue().to_pybytes()


def unpacked(data: bytes) -> pa.RecordBatch:
    """Return the rows of `Waiting.data`."""
    with pa.ipc.open_stream(data) as stream:
        return stream.read_next_batch()


@dataclass(slots=True)
class _Lane:
    """What passes, or is kept back of one table: batches whose transactions end in it."""

    last: pa.RecordBatch | None = None

    def take(self, rows: pa.RecordBatch, chosen: _Mask, ends: _Mask) -> list[pa.RecordBatch]:
        """Return the chosen rows, each transaction's last one marked; keep one that may be the last.

        Args:
            rows: A batch in the log's order.
            chosen: Which of them are of this lane.
            ends: Which of them end a transaction.
        """
        # Of the transaction, among those of the batch.
        number: npt.NDArray[np.int64] = np.cumsum(ends) - ends
        whole = int(np.count_nonzero(ends))
        places = np.flatnonzero(chosen)
        of: npt.NDArray[np.int64] = number[places]
        found = []
        if self.last is not None and (whole or places.size):
            goes_on = bool(of.size) and of[0] == 0
            found.append(_ending(self.last, np.array([not goes_on])))
            self.last = None
        if not places.size:
            return found
        last_of_its_own = np.append(of[1:] != of[:-1], of[-1] < whole)
        mine = _ending(rows.filter(pa.array(chosen)), last_of_its_own)
        if not last_of_its_own[-1]:
            self.last = mine.slice(len(places) - 1)
            mine = mine.slice(0, len(places) - 1)
        return [*found, mine] if mine.num_rows else found

    def end(self) -> list[pa.RecordBatch]:
        """Return the row that waits, as the last of its transaction."""
        last, self.last = self.last, None
        return [] if last is None else [_ending(last, np.array([True]))]


@dataclass(slots=True)
class Gate:
    """What passes into the journal of one run, and what does not.

    Used by one thread; `begin` before each reader of the log.

    Args:
        pending: Sequences of the versions that wait for approval, and why; may grow.
        pauses: Whether any may be added.

    Attributes:
        kept: Full names of the tables that are kept back, and why.
    """

    pending: Mapping[int, str] = field(default_factory=dict)
    pauses: bool = False
    kept: dict[str, str] = field(default_factory=dict)
    _lanes: dict[str | None, _Lane] = field(default_factory=dict)

    def begin(self, kept: Mapping[str, str]) -> None:
        """Begin a reader; `kept` are the tables that are held for approval."""
        self.kept = dict(kept)
        self._lanes = {}

    def take(self, batch: ChangeBatch) -> Iterator[ChangeBatch]:
        """Yield a batch without the rows that are kept back, which come out as held events."""
        waits = any(lane.last is not None for lane in self._lanes.values())
        if not (self.pauses or self.kept) or (batch.rows is None and not waits):
            yield batch
            return
        rows = CAPTURED.empty_table().to_batches()[0] if batch.rows is None else batch.rows
        chosen = self._kept_rows(rows)
        if not (chosen or waits) and batch.end is not None:
            yield batch
            return
        ends = _mask(rows.column("tx_end"))
        nothing = np.zeros(rows.num_rows, np.bool_)
        passing = ~np.logical_or.reduce([nothing, *chosen.values()])
        events: list[HeldEvent] = []
        for table, reason in self.kept.items():
            kept = self._through(table, rows, chosen.get(table, nothing), ends, batch)
            events += [Waiting(table, reason, packed(one), one.num_rows) for one in kept]
        passed = self._through(None, rows, passing, ends, batch)
        for one in passed[:-1]:
            yield ChangeBatch(one, None)
        last = passed[-1] if passed else None
        yield ChangeBatch(last, batch.end, batch.log_bytes, (*batch.held, *events))

    def beside(self, registry: SourceNotes) -> SourceNotes:
        """Return the registry of readers whose rows do not come this way: they end before such a row."""
        return _Beside(registry, self) if self.pauses or self.kept else registry

    def _through(
        self,
        table: str | None,
        rows: pa.RecordBatch,
        chosen: _Mask,
        ends: _Mask,
        batch: ChangeBatch,
    ) -> list[pa.RecordBatch]:
        """Return what comes out of the lane of a table, or of everything that passes."""
        lane = self._lanes.setdefault(table, _Lane())
        found = lane.take(rows, chosen, ends)
        # Where a segment may end every transaction is whole.
        return found if batch.end is None else [*found, *lane.end()]

    def _kept_rows(self, rows: pa.RecordBatch) -> dict[str, _Mask]:
        """Return which rows are kept back of each table that has some."""
        sequences = rows.column("schema_sequence")
        here = cast("list[int]", pc.unique(sequences).to_pylist())
        waiting = [one for one in here if one in self.pending]
        if not waiting and not self.kept:
            return {}
        names = full_names(rows)
        begins: dict[str, int] = {}
        for sequence in waiting:
            at = pc.index(sequences, pa.scalar(sequence, pa.int64())).as_py()
            table = str(names[at])
            if table not in self.kept:
                begins[table] = min(at, begins.get(table, at))
        for sequence in waiting:
            at = pc.index(sequences, pa.scalar(sequence, pa.int64())).as_py()
            self.kept.setdefault(str(names[at]), self.pending[sequence])
        chosen = {}
        for table in self.kept:
            mask = _mask(pc.equal(names, pa.scalar(table)))
            mask[: begins.get(table, 0)] = False
            if mask.any():
                chosen[table] = mask
        return chosen


class _Beside:
    """A registry that refuses what would be kept back."""

    def __init__(self, registry: SourceNotes, gate: Gate) -> None:
        self._registry = registry
        self._gate = gate

    def register(self, table: TableSchema, position: Position) -> SchemaStamp:
        """Register a version, unless it waits for approval."""
        stamp = self._registry.register(table, position)
        if stamp.sequence in self._gate.pending:
            raise UnsupportedEvent(self._gate.pending[stamp.sequence])
        return stamp

    def define(self, definitions: Mapping[str, str | None], position: Position) -> None:
        """Note what tables look like."""
        self._registry.define(definitions, position)

    def defined(self, position: Position) -> dict[str, str]:
        """Return how tables looked at a position."""
        return self._registry.defined(position)

    def held(self) -> Mapping[str, str]:
        """Return the tables whose events are kept back, in whatever form."""
        return {**self._registry.held(), **self._gate.kept}


def _ending(rows: pa.RecordBatch, ends: _Mask) -> pa.RecordBatch:
    return rows.set_column(_TX_END, CAPTURED.field(_TX_END), pa.array(ends))


def _mask(values: Any) -> _Mask:
    found: _Mask = values.fill_null(False).to_numpy(zero_copy_only=False).copy()
    return found
