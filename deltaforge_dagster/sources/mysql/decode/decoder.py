"""From bytes of the binary log to change batches: the decoder of the MySQL source.

A `MysqlDecoder` gets the dump stream in read buffers, as the socket fills them, and returns record
batches with the columns of `frame.CAPTURED`. A buffer is handled in rounds: `scan` records the
changes and transactions in it until an event stops it, `write_changes` writes their row images, and
the other columns are added in bulk (`transaction_assembler`). Python code runs once per buffer and
for infrequent events (`non_row_events`), never per row. The decoder has no socket, no thread and no
clock: its output depends only on the bytes of the stream, not on how they are divided into buffers.

Some events stand for others: a compressed transaction contains them, and the commit of a prepared
XA transaction refers to earlier ones. These go through the same rounds, as streams within the
stream (`events.compressed_events`), one block at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa

from deltaforge_dagster.errors import CorruptLog, DeltaforgeError, UnsupportedEvent
from deltaforge_dagster.kernels.runtime import Bytes, read_only
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import ChangeBatch, SchemaRegistry
from deltaforge_dagster.sources.mysql.decode.batches import MysqlBatchWriter
from deltaforge_dagster.sources.mysql.decode.layout import (
    BAD_EVENT,
    BARE,
    BEGUN,
    CHECKSUM,
    EVENT_POS,
    FOREIGN,
    FULL,
    INDEX,
    JOINED,
    LACKING,
    NEED_MORE,
    NESTED,
    OFFSET,
    OPEN,
    PACKET_END,
    POS,
    REACHED,
    SPLIT,
    TX_TAG,
    TXS,
)
from deltaforge_dagster.sources.mysql.decode.non_row_events import DAMAGE, NonRowEvents
from deltaforge_dagster.sources.mysql.decode.parked_events import (
    KnownTables,
    ParkedBatch,
    ParkedRows,
    ParkedStatement,
    follow,
)
from deltaforge_dagster.sources.mysql.decode.scan import SPLIT_SIZE, pass_event, scan
from deltaforge_dagster.sources.mysql.decode.transaction_assembler import (
    MAX_ROWS,
    GtidRun,
    PositionTracker,
    TransactionAssembler,
)
from deltaforge_dagster.sources.mysql.events.compressed_events import NestedEvents
from deltaforge_dagster.sources.mysql.events.sql_text import Name
from deltaforge_dagster.sources.mysql.events.statements import Xid
from deltaforge_dagster.sources.mysql.position import BinlogPosition
from deltaforge_dagster.sources.mysql.schema.versions import MysqlTableContext, MysqlTableVersions
from deltaforge_dagster.sources.mysql.stream.prepared import FindsPrepared
from deltaforge_dagster.sources.mysql.values.types import ValueForms
from deltaforge_dagster.sources.outbox import NO_OUTBOX, MysqlOutboxTables
from deltaforge_dagster.sources.rows.arrays import with_tx_end
from deltaforge_dagster.sources.rows.columns import NO_RULES, ColumnRules
from deltaforge_dagster.sources.rows.event_ids import id_seed
from deltaforge_dagster.sources.stream import BUFFER_BYTES

_FOREIGN = {0xFF: "ERR", 0xFE: "EOF"}


@dataclass(frozen=True, slots=True)
class DecodedBinlog:
    """What a read buffer contained.

    Attributes:
        consumed: Number of bytes that were decoded; the rest must be at the start of the next
            buffer.
        batches: Changes and idle progress, in log order.
        foreign: `ERR` or `EOF` if the packet at `consumed` is not an event and ends the stream,
            else "".
        error: Why decoding cannot continue; raise it after `batches` were passed on.
        again: Decoding of this buffer is not finished: drop the consumed bytes, and feed the rest,
            even if it is empty, before receiving more.
    """

    consumed: int
    batches: tuple[ChangeBatch, ...]
    foreign: str = ""
    error: DeltaforgeError | None = None
    again: bool = False


class MysqlDecoder:
    """Decodes one dump stream, from the first packet after the command to its end.

    Args:
        context: What the tables are selected and described with.
        source_id: `id` of the source, on which event ids depend.
        progress: Turns transactions and offsets into positions.
        prepared: Finds the rows of prepared XA transactions that are not in memory.
        holds: Full names of tables whose events are returned undecoded, with the reasons. Tables
            whose columns are not certain are added.
        until: The end of a transaction after which nothing is decoded; None for no limit.
        outboxes: Tables whose changes are marked as those of an outbox.
    """

    _non_row_events: ClassVar[type[NonRowEvents]] = NonRowEvents

    def __init__(
        self,
        context: MysqlTableContext,
        *,
        source_id: str,
        progress: PositionTracker,
        prepared: FindsPrepared,
        holds: Mapping[str, str] | None = None,
        until: BinlogPosition | None = None,
        outboxes: MysqlOutboxTables = NO_OUTBOX,
    ) -> None:
        self._nested: list[NestedEvents] = []
        self._nested_bytes = 0
        self._versions = MysqlTableVersions(context, holds or {})
        self._writer = MysqlBatchWriter(self._versions, id_seed(source_id), MAX_ROWS, outboxes)
        self._assembler = TransactionAssembler(self._writer, progress)
        self._state = self._assembler.state
        self._state[CHECKSUM] = 1  # as requested, until a FORMAT_DESCRIPTION says otherwise
        self._non_row = self._non_row_events(
            self._assembler,
            self._writer,
            self._versions,
            catalog=context.catalog,
            captures=context.captures,
            prepared=prepared,
            until=until,
            nested=self._nested,
        )
        self._error: DeltaforgeError | None = None

    def feed(self, data: Bytes | bytes | bytearray | memoryview, length: int) -> DecodedBinlog:
        """Decode `data[:length]`.

        The data are the bytes that the last call did not consume, followed by new ones. `data` may
        be overwritten as soon as this returns. Errors are returned as `DecodedBinlog.error`, not
        raised. After an error, every call returns it again.
        """
        source = read_only(data)[:length]
        state = self._state
        state[OFFSET] = 0
        self._assembler.batches = []
        foreign, again = "", False
        self._nested_bytes = 0
        # The hash overflows on purpose, which NumPy reports when kernels run as plain Python.
        with np.errstate(over="ignore"):
            while self._error is None and self._nested_bytes < BUFFER_BYTES:
                if self._nested:
                    self._decode_nested_block()
                    continue
                stop = self._round(source)
                if stop == SPLIT and self._error is None:
                    if not self._decode_split_event(source):
                        break
                elif stop in (NEED_MORE, FOREIGN, REACHED):
                    if stop == FOREIGN and self._error is None:
                        code = int(source[state[OFFSET] + 4])
                        foreign = _FOREIGN.get(code, "ERR")
                    break
            else:
                again = self._error is None
        if self._error is None and not again and not state[OPEN]:
            self._assembler.report_passed()
        return DecodedBinlog(
            int(state[OFFSET]), tuple(self._assembler.batches), foreign, self._error, again
        )

    def _round(self, source: Bytes) -> int:
        """Scan once, make batches of the changes, and handle the event at which the scan stopped.

        Returns the stop code (`layout`).
        """
        state, versions, assembler = self._state, self._versions, self._assembler
        assembler.begin_round()
        start = int(state[OFFSET])
        stop = int(
            scan(
                source,
                source.size,
                state,
                versions.maps,
                versions.map_texts,
                versions.tables,
                versions.layout.columns,
                assembler.rows,
                assembler.txs,
            )
        )
        try:
            assembler.flush(source, start)
            if stop == LACKING:
                self._non_row.complete(source)
            elif stop not in (NEED_MORE, FULL, FOREIGN, SPLIT, REACHED):
                self._non_row.act(stop, source)
                assembler.claim(int(state[PACKET_END] - state[OFFSET]))
                pass_event(state)
        except DeltaforgeError as error:
            self._fail(error)
        return stop

    def _fail(self, error: DeltaforgeError) -> None:
        """Store the error, with its location in the log, so that decoding stops."""
        where = self._where()
        if type(error) in (CorruptLog, UnsupportedEvent) and where not in str(error):
            placed = type(error)(f"{error}, {where}")
            placed.__cause__ = error
            error = placed
        self._error = error

    def _decode_split_event(self, source: Bytes) -> bool:
        """Decode the event at the offset, which is split over several packets.

        Returns False if it is incomplete.
        """
        state = self._state
        at = int(state[OFFSET])
        start = at
        parts: list[Bytes] = []
        size = SPLIT_SIZE
        while size == SPLIT_SIZE:
            if source.size - at < 4:
                return False
            size = int.from_bytes(source[at : at + 3].tobytes(), "little")
            if source.size - at - 4 < size:
                return False
            # Only the first packet has the status byte before the event.
            parts.append(source[at + (4 if parts else 5) : at + 4 + size])
            at += 4 + size
        event = read_only(np.concatenate(parts))
        if source[start + 4] != 0:
            self._error = CorruptLog(f"a packet of 16 MiB that is no event, {self._where()}")
            return True
        state[OFFSET], state[BARE] = 0, JOINED
        stop = FULL
        while stop != NEED_MORE and self._error is None:
            stop = self._round(event)
        if self._error is None and state[OFFSET] != event.size:
            self._error = CorruptLog(f"{DAMAGE[BAD_EVENT]}, {self._where()}")
        state[OFFSET], state[BARE] = at, 0
        self._assembler.claim(at - start - event.size)
        return True

    def _decode_nested_block(self) -> None:
        """Decode the next block of the innermost nested stream."""
        state, nested = self._state, self._nested[-1]
        offset = int(state[OFFSET])
        try:
            block = nested.next()
            if block is None:
                self._nested.pop()
                nested.end()
                return
        except DeltaforgeError as error:
            self._fail(error)
            return
        self._nested_bytes += block.size
        state[OFFSET], state[BARE] = 0, NESTED
        while self._error is None and self._nested[-1] is nested:
            if self._round(block) == NEED_MORE:
                break
        nested.keep(block[state[OFFSET] :])
        state[OFFSET], state[BARE] = offset, 0

    def forget_tables(self, altered: Iterable[Name]) -> None:
        """Forget the TABLE_MAP events in force, and the versions of these tables.

        Args:
            altered: Tables that a statement may have altered.
        """
        self._versions.redefined(altered)
        self._versions.forget()

    def decode_parked(self, parked: ParkedRows, *, last: bool) -> Iterator[pa.RecordBatch]:
        """Yield the changes of a parked rows event, with their original positions and ids.

        Args:
            parked: The event.
            last: Whether it is the last parked event of its transaction.

        Raises:
            UnsupportedEvent: The columns of its table are still not known.
        """
        state, versions = self._state, self._versions
        self._assembler.batches = []
        self._assembler.file, self._assembler.txs[0] = parked.file, parked.tx
        self._writer.tags[int(self._assembler.txs[0, TX_TAG])] = parked.tag
        state[TXS], state[OPEN], state[INDEX] = 1, BEGUN, parked.index
        state[EVENT_POS] = state[POS] = parked.pos
        versions.server = parked.server
        versions.describe(parked.table_map, self._assembler.here())
        for reason in versions.holds.values():
            raise UnsupportedEvent(reason)
        self._nested.append(NestedEvents(iter([parked.event])))
        with np.errstate(over="ignore"):
            while self._nested and self._error is None:
                self._decode_nested_block()
            if last and self._error is None:
                self._assembler.commit()
        if self._error is not None:
            raise self._error
        for batch in self._assembler.batches:
            if batch.rows is not None:
                yield batch.rows

    def _where(self) -> str:
        return self._assembler.where(inside=bool(self._nested))


class LogPlaces:
    """A position tracker without GTIDs: positions consist of file and offset only."""

    def committed(self, gtids: Sequence[GtidRun], file: str, pos: int) -> Position:
        """Return the file position; ignore the GTIDs."""
        del gtids
        return self.within(file, pos)

    def within(self, file: str, pos: int) -> Position:
        """Return the file position."""
        return BinlogPosition(file, pos)


class _NothingPrepared:
    """Finds no prepared transactions: parked events contain the rows of XA transactions."""

    def rows(self, xid: Xid, until: BinlogPosition) -> Iterator[bytes]:
        """Raise `UnsupportedEvent`: parked events never refer to earlier rows in the log."""
        raise UnsupportedEvent(f"XA transaction {xid} among held events at {until.file}")


def decode_parked(
    events: Iterator[bytes],
    tables: KnownTables,
    *,
    source_id: str,
    registry: SchemaRegistry,
    forms: ValueForms,
    outboxes: MysqlOutboxTables = NO_OUTBOX,
    rules: ColumnRules = NO_RULES,
) -> Iterator[pa.RecordBatch]:
    """Decode the parked events of a table; yield the changes that a stream would have yielded.

    If an insert lacks a column whose default is not certain, its row is written without the column;
    the user who released the table was told so.

    Args:
        events: Serialized parked items (`parked_events`), in log order.
        tables: The definitions of tables; updated by the statements among the events.
        source_id: `id` of the source, on which event ids depend.
        registry: Where table versions are registered.
        forms: The formats of values where there is a choice.
        outboxes: Tables whose changes are marked as those of an outbox.
        rules: The column rules.

    Raises:
        UnsupportedEvent: The columns of the table are still not known.
        CorruptLog: A parked event is damaged.
    """
    decoder = MysqlDecoder(
        MysqlTableContext(registry, tables, lambda _db, _table: True, forms, rules),
        source_id=source_id,
        progress=LogPlaces(),
        prepared=_NothingPrepared(),
        outboxes=outboxes,
    )
    for parked, successor in follow(events):
        if isinstance(parked, ParkedStatement):
            altered = tables.statement(parked.database, parked.sql, BinlogPosition("held.0", 0))
            decoder.forget_tables(altered)
            continue
        last = successor is None or _transaction(successor) != _transaction(parked)
        if isinstance(parked, ParkedBatch):
            yield with_tx_end(parked.rows) if last else parked.rows
        else:
            yield from decoder.decode_parked(parked, last=last)


def _transaction(parked: object) -> tuple[int, ...]:
    assert isinstance(parked, ParkedRows | ParkedBatch)
    return parked.tx
