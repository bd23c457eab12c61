"""Schema versions of a run: stored under its lease, their rows parked until they are approved.

With `engine.schemas.on_schema_change: pause_table`, a table is on hold from the first row of a
version that waits for approval: this row and all later ones of the table become parked events
(`Waiting`, already decoded) until a run starts after the approval. Other tables pass. All rows on
their way to the journal pass through here: those of the log stream, and those of parked events that
can now be decoded.

`tx_end` marks the last row of a transaction. When that row is parked, the mark has to move, so the
rows that pass and the parked rows of each table are separate streams, each with its own marks. To
know which row is the last, each stream keeps one row of an open transaction until more of it
arrives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.errors import UnsupportedEvent
from deltaforge_dagster.frame import CAPTURED
from deltaforge_dagster.pipeline.blocked_keys import full_names
from deltaforge_dagster.pipeline.run_context import ActiveLease
from deltaforge_dagster.pipeline.schemas.views import changes_of
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import ChangeBatch, ParkedEvent, SourceNotes
from deltaforge_dagster.state.schemas import TableHistory
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.tables import ColumnChanges, SchemaStamp, TableFate, TableSchema

_Mask = npt.NDArray[np.bool_]
_TX_END = CAPTURED.get_field_index("tx_end")


@dataclass(frozen=True, slots=True)
class Waiting(ParkedEvent):
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
class SchemaApproval:
    """Separates the rows that may enter the journal from those of tables that wait for approval.

    Used by one thread; call `begin` before each reader of the log.

    Args:
        pending: Sequence numbers of the versions that wait for approval, each with the reason; may
            grow.
        pauses: Whether versions may be added.

    Attributes:
        kept: Full names of the tables on hold, each with the reason.
    """

    pending: Mapping[int, str] = field(default_factory=dict)
    pauses: bool = False
    kept: dict[str, str] = field(default_factory=dict)
    _streams: dict[str | None, _RowStream] = field(default_factory=dict)

    def begin(self, kept: Mapping[str, str]) -> None:
        """Prepare for a new reader of the log; `kept` are the tables that are on hold already."""
        self.kept = dict(kept)
        self._streams = {}

    def accept(self, batch: ChangeBatch) -> Iterator[ChangeBatch]:
        """Yield a batch whose parked rows were replaced by parked events."""
        waits = any(stream.last is not None for stream in self._streams.values())
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
        events: list[ParkedEvent] = []
        for table, reason in self.kept.items():
            kept = self._next_rows(table, rows, chosen.get(table, nothing), ends, batch)
            events += [Waiting(table, reason, packed(part), part.num_rows) for part in kept]
        passed = self._next_rows(None, rows, passing, ends, batch)
        for part in passed[:-1]:
            yield ChangeBatch(part, None)
        last = passed[-1] if passed else None
        yield ChangeBatch(last, batch.end, batch.log_bytes, (*batch.parked, *events))

    def beside(self, registry: SourceNotes) -> SourceNotes:
        """Return a registry for readers whose rows bypass this object.

        It stops them before a version that waits for approval.
        """
        return _RefusingRegistry(registry, self) if self.pauses or self.kept else registry

    def _next_rows(
        self,
        table: str | None,
        rows: pa.RecordBatch,
        chosen: _Mask,
        ends: _Mask,
        batch: ChangeBatch,
    ) -> list[pa.RecordBatch]:
        """Return the next rows of a table's parked stream, or (None) of the stream that passes."""
        stream = self._streams.setdefault(table, _RowStream())
        batches = stream.accept(rows, chosen, ends)
        # A batch with an end position contains only complete transactions up to there.
        return batches if batch.end is None else [*batches, *stream.end()]

    def _kept_rows(self, rows: pa.RecordBatch) -> dict[str, _Mask]:
        """Return a mask of the parked rows for each table that has some."""
        sequences = rows.column("schema_sequence")
        present = cast("list[int]", pc.unique(sequences).to_pylist())
        waiting = [sequence for sequence in present if sequence in self.pending]
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


class FencedRegistry:
    """A `sources.base.SourceNotes` that makes a version durable before any row refers to it.

    Args:
        store: The state store.
        lease: The run's lease.
        tenant: Tenant of the pipeline.
        pauses: Whether new versions of known tables wait for approval (`engine.schemas`).

    Attributes:
        pending: Sequence numbers of the versions that wait for approval, each with the reason of
            the hold.
    """

    def __init__(
        self, store: StateStore, lease: ActiveLease, tenant: str, *, pauses: bool = False
    ) -> None:
        self.pending: dict[int, str] = {}
        self._store = store
        self._lease = lease
        self._tenant = tenant
        self._pauses = pauses
        self._noted_sequences: set[int] = set()
        if pauses:
            for history in store.schemas.histories(lease.pipeline):
                self._note(history)

    def register(self, table: TableSchema, position: Position) -> SchemaStamp:
        """Register the version of a table that is in force from `position`; return its stamp."""
        return self._register(table, position, streamed=True)

    def register_read(self, table: TableSchema, position: Position) -> SchemaStamp:
        """Register the version with which a snapshot read a table.

        Args:
            table: The version.
            position: Where the log has everything that the read saw.
        """
        return self._register(table, position, streamed=False)

    def define(self, definitions: Mapping[str, str | None], position: Position) -> None:
        """Record the table definitions that are in force from `position`."""
        self._lease.write(lambda writer: writer.definitions.define(definitions, position.to_json()))

    def defined(self, position: Position) -> dict[str, str]:
        """Return the table definitions that are in force at `position`."""
        return self._store.definitions.at(self._lease.pipeline, position)

    def altered(self, table: TableSchema, changes: ColumnChanges, position: Position) -> None:
        """Record what a statement at `position` does to the columns of a table."""
        self._lease.write(
            lambda writer: writer.schemas.alter(self._tenant, table, changes, position.to_json())
        )

    def note_fates(self, fates: Sequence[tuple[str, TableFate]]) -> None:
        """Record what a statement does to tables, as far as the pipeline has rows of them."""
        pipeline = self._lease.pipeline
        captured = [history.name for history in self._store.schemas.histories(pipeline)]
        noted = [
            (table, fate)
            for name, fate in fates
            for table in captured
            if table == name or (name.endswith(".*") and table.startswith(name[:-1]))
        ]
        if noted:
            self._lease.guard()
            self._store.gaps.note_fates(pipeline, noted)

    def holds(self) -> Mapping[str, str]:
        """Return the tables whose undecoded events are parked, each with the reason."""
        return {
            hold.subject: hold.reason
            for hold in self._store.holds.read(self._lease.pipeline)
            if hold.kind == "table" and hold.state != "journaled"
        }

    def _register(self, table: TableSchema, position: Position, *, streamed: bool) -> SchemaStamp:
        stamp = self._lease.write(
            lambda writer: writer.schemas.register(
                self._tenant, table, position.to_json(), streamed=streamed, pause=self._pauses
            )
        )
        if self._pauses and stamp.sequence not in self._noted_sequences:
            self._note(self._store.schemas.history(self._lease.pipeline, table.full_name))
        return stamp

    def _note(self, history: TableHistory) -> None:
        """Update the versions of a table that wait for approval."""
        pipeline = self._lease.pipeline
        for version in history.versions:
            sequence = version.stamp.sequence
            self._noted_sequences.add(sequence)
            if sequence in history.pending:
                changes = ", ".join(map(str, changes_of(history, version)))
                self.pending[sequence] = (
                    f"version {version.stamp.version} of the table ({changes}) waits for approval:"
                    f" deltaforge hold approve {pipeline} {history.name}"
                )


class _RefusingRegistry:
    """A registry that refuses versions that wait for approval."""

    def __init__(self, registry: SourceNotes, approval: SchemaApproval) -> None:
        self._registry = registry
        self._approval = approval

    def register(self, table: TableSchema, position: Position) -> SchemaStamp:
        """Register a schema version, unless it waits for approval."""
        stamp = self._registry.register(table, position)
        if stamp.sequence in self._approval.pending:
            raise UnsupportedEvent(self._approval.pending[stamp.sequence])
        return stamp

    def define(self, definitions: Mapping[str, str | None], position: Position) -> None:
        """Record table definitions."""
        self._registry.define(definitions, position)

    def defined(self, position: Position) -> dict[str, str]:
        """Return the table definitions at a position."""
        return self._registry.defined(position)

    def altered(self, table: TableSchema, changes: ColumnChanges, position: Position) -> None:
        """Record what a statement does to columns."""
        self._registry.altered(table, changes, position)

    def note_fates(self, fates: Sequence[tuple[str, TableFate]]) -> None:
        """Record what a statement does to tables."""
        self._registry.note_fates(fates)

    def holds(self) -> Mapping[str, str]:
        """Return the tables that are on hold, decoded or not, each with the reason."""
        return {**self._registry.holds(), **self._approval.kept}


@dataclass(slots=True)
class _RowStream:
    """The rows that pass, or the parked rows of one table, with `tx_end` set within this stream."""

    last: pa.RecordBatch | None = None

    def accept(self, rows: pa.RecordBatch, chosen: _Mask, ends: _Mask) -> list[pa.RecordBatch]:
        """Return the chosen rows with `tx_end` set; keep back one that may end its transaction.

        Args:
            rows: A batch in log order.
            chosen: Which rows belong to this stream.
            ends: Which rows end a transaction in the log.
        """
        # For each row the index of its transaction within the batch.
        transaction: npt.NDArray[np.int64] = np.cumsum(ends) - ends
        whole = int(np.count_nonzero(ends))
        indexes = np.flatnonzero(chosen)
        transactions: npt.NDArray[np.int64] = transaction[indexes]
        batches = []
        if self.last is not None and (whole or indexes.size):
            goes_on = bool(transactions.size) and transactions[0] == 0
            batches.append(_with_tx_end(self.last, np.array([not goes_on])))
            self.last = None
        if not indexes.size:
            return batches
        last_of_its_own = np.append(transactions[1:] != transactions[:-1], transactions[-1] < whole)
        own_rows = _with_tx_end(rows.filter(pa.array(chosen)), last_of_its_own)
        if not last_of_its_own[-1]:
            self.last = own_rows.slice(len(indexes) - 1)
            own_rows = own_rows.slice(0, len(indexes) - 1)
        return [*batches, own_rows] if own_rows.num_rows else batches

    def end(self) -> list[pa.RecordBatch]:
        """Return the row that was kept back, as the last one of its transaction."""
        last, self.last = self.last, None
        return [] if last is None else [_with_tx_end(last, np.array([True]))]


def _with_tx_end(rows: pa.RecordBatch, ends: _Mask) -> pa.RecordBatch:
    return rows.set_column(_TX_END, CAPTURED.field(_TX_END), pa.array(ends))


def _mask(values: Any) -> _Mask:
    mask: _Mask = values.fill_null(False).to_numpy(zero_copy_only=False).copy()
    return mask
