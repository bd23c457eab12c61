"""From bytes of the binary log to change batches: the decoder of the MySQL source.

A `Decoder` is given the dump stream in pieces, as the socket hands them out, and returns record
batches in the columns of `frame.CAPTURED`. A piece is handled in three steps: `scan` notes the
changes and transactions in it, `write_changes` writes their row images, and the rest of the columns
is put around them in bulk. Python acts once per piece and for rare events, never per row. The
decoder has no socket, no thread and no clock: what comes out depends on what went in, wherever it
is cut.

Some events hold others, or call back earlier ones: a compressed transaction, the commit of a prepared
one. Those go through the same three steps, as streams within the stream (`inner`), a piece at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from deltaforge_dagster.errors import CorruptLog, DeltaforgeError, UnsupportedEvent
from deltaforge_dagster.positions import BinlogPosition, Position
from deltaforge_dagster.sources.base import ChangeBatch, HeldEvent, SchemaRegistry
from deltaforge_dagster.sources.columns import NO_RULES, ColumnRules
from deltaforge_dagster.sources.event_ids import id_seed
from deltaforge_dagster.sources.kernel import Bytes, read_only
from deltaforge_dagster.sources.mysql.batches import DDL_TABLE, BatchWriter, Place
from deltaforge_dagster.sources.mysql.binlog import (
    EVENT_NAMES,
    HEADER,
    Query,
    has_checksums,
    is_of_mariadb,
    parse_query,
    parse_rotate,
)
from deltaforge_dagster.sources.mysql.ddl import Change, table_changes
from deltaforge_dagster.sources.mysql.gtid_events import GtidEvent, parse_tagged_gtid, tag_hash
from deltaforge_dagster.sources.mysql.handover import MAX_ROWS, Handover, Progress
from deltaforge_dagster.sources.mysql.held import Kept, KeptBatch, KeptRows, KeptStatement
from deltaforge_dagster.sources.mysql.inner import InnerEvents
from deltaforge_dagster.sources.mysql.layout import (
    BARE,
    BEGUN,
    CHECKSUM,
    EVENT,
    EVENT_END,
    EVENT_POS,
    FILE_A,
    FILE_B,
    GROUP,
    GTID_OF_MYSQL,
    HELD_INDEX,
    INDEX,
    INNER,
    JOINED,
    OFFSET,
    OPEN,
    PACKET_END,
    POS,
    PREPARING,
    TX_A,
    TX_B,
    TX_END,
    TX_HAS_GTID,
    TX_NUMBER,
    TX_TAG,
    TX_TS_US,
    TXS,
    UNTIL,
)
from deltaforge_dagster.sources.mysql.log_scan import table_of
from deltaforge_dagster.sources.mysql.mariadb_events import decompressed
from deltaforge_dagster.sources.mysql.partial_json import whole_event
from deltaforge_dagster.sources.mysql.payload import payload_pieces
from deltaforge_dagster.sources.mysql.prepared import FindsPrepared, PreparedRows, parse_xa_prepare
from deltaforge_dagster.sources.mysql.scan import SPLIT_SIZE, pass_event, scan
from deltaforge_dagster.sources.mysql.statements import Kind, Xid, statement, xid_of
from deltaforge_dagster.sources.mysql.stops import (
    BAD_EVENT,
    BAD_ORDER,
    BAD_ROWS,
    BAD_SUM,
    COMPRESSED,
    FOREIGN,
    FORMAT,
    FULL,
    HELD_ROWS,
    NEED_MORE,
    NEW_FILE,
    NEW_TABLE,
    NO_COLUMNS,
    OF_XA,
    PARTIAL,
    PAYLOAD,
    PREPARED,
    REACHED,
    SPLIT,
    STATEMENT,
    TAGGED,
    UNKNOWN_TABLE,
    UNSUPPORTED,
)
from deltaforge_dagster.sources.mysql.table_map import ID_SIZE
from deltaforge_dagster.sources.mysql.values import LABEL_FORMS, ValueForms
from deltaforge_dagster.sources.mysql.versions import Catalog, TableVersions
from deltaforge_dagster.sources.outbox import NO_OUTBOX, OutboxTables
from deltaforge_dagster.sources.pieces import PIECE_BYTES

_DAMAGE = {
    BAD_EVENT: "an event that is shorter or longer than its kind",
    BAD_SUM: "an event that differs from its checksum",
    BAD_ORDER: "an event where a transaction may not have it",
    BAD_ROWS: "a change that does not follow its table's description",
    UNKNOWN_TABLE: "a change of a table that was never described",
}
_FOREIGN = {0xFF: "ERR", 0xFE: "EOF"}


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a piece of the stream held.

    Attributes:
        consumed: Bytes that are done with; the rest is to stand at the start of the next piece.
        batches: Changes and idle progress, in log order.
        foreign: `ERR` or `EOF` for a packet that is no event and ends the stream, else ""; it
            stands at `consumed`.
        error: Why decoding cannot go on, to be raised after `batches` were handed on.
        again: There is more in what was fed: drop what is consumed, and feed the rest, even if it is
            nothing, before new bytes.
    """

    consumed: int
    batches: tuple[ChangeBatch, ...]
    foreign: str = ""
    error: DeltaforgeError | None = None
    again: bool = False


class Decoder:
    """Decodes one dump stream, from the first packet after the command to its end.

    Changes of tables for which `captures(database, table)` is false are passed over, but counted,
    so that ids do not depend on the choice of tables. `forms` says how
    values look where there is a choice. Events of the tables in `held`, and of those that nobody
    knows the columns of, come out as they are, to be kept back (`held`). With `until`, the end of a
    transaction, nothing behind it is decoded. Changes of `outboxes` are marked as such.
    `rules` say what is hidden of columns.
    """

    def __init__(
        self,
        *,
        source_id: str,
        progress: Progress,
        registry: SchemaRegistry,
        catalog: Catalog,
        captures: Callable[[str, str], bool],
        prepared: FindsPrepared,
        forms: ValueForms = LABEL_FORMS,
        held: Mapping[str, str] | None = None,
        until: BinlogPosition | None = None,
        outboxes: OutboxTables = NO_OUTBOX,
        rules: ColumnRules = NO_RULES,
    ) -> None:
        self._progress = progress
        self._until = until
        self._captures = captures
        self._prepared = prepared
        self._kept = PreparedRows()
        self._inner: list[InnerEvents] = []
        self._inner_bytes = 0
        self._catalog = catalog
        self._versions = TableVersions(
            registry=registry,
            catalog=catalog,
            captures=captures,
            forms=forms,
            held=held,
            rules=rules,
        )
        self._writer = BatchWriter(self._versions, id_seed(source_id), MAX_ROWS, outboxes)
        self._found = Handover(self._writer, progress)
        self._state = self._found.state
        self._state[CHECKSUM] = 1  # as asked for, until a file says otherwise
        self._error: DeltaforgeError | None = None

    def feed(self, data: Bytes | bytes | bytearray | memoryview, length: int) -> Decoded:
        """Decode `data[:length]`: the bytes the last call left over, and new ones behind them.

        `data` may be overwritten as soon as this returns. Never raises an error of the tree by
        itself: see `Decoded.error`. A decoder that returned one returns it again.
        """
        source = read_only(data)[:length]
        state = self._state
        state[OFFSET] = 0
        self._found.batches = []
        foreign, again = "", False
        # The hash overflows on purpose, which NumPy reports when kernels run as plain Python.
        self._inner_bytes = 0
        with np.errstate(over="ignore"):
            while self._error is None and self._inner_bytes < PIECE_BYTES:
                if self._inner:
                    self._step_inside()
                    continue
                stop = self._round(source)
                if stop == SPLIT and self._error is None:
                    if not self._joined(source):
                        break
                elif stop in (NEED_MORE, FOREIGN, REACHED):
                    if stop == FOREIGN and self._error is None:
                        code = int(source[state[OFFSET] + 4])
                        foreign = _FOREIGN.get(code, "ERR")
                    break
            else:
                again = self._error is None
        if self._error is None and not again and not state[OPEN]:
            self._found.tell_passed()
        return Decoded(int(state[OFFSET]), tuple(self._found.batches), foreign, self._error, again)

    def _round(self, source: Bytes) -> int:
        """Scan once, hand on what was found, act where Python has to; return why it stopped."""
        state, versions, found = self._state, self._versions, self._found
        found.begin_round()
        begun = int(state[OFFSET])
        stop = int(
            scan(
                source,
                source.size,
                state,
                versions.maps,
                versions.map_texts,
                versions.tables,
                versions.layout.columns,
                found.rows,
                found.txs,
            )
        )
        try:
            found.flush(source, begun)
            if stop not in (NEED_MORE, FULL, FOREIGN, SPLIT, REACHED):
                self._act(stop, source)
                found.claim(int(state[PACKET_END] - state[OFFSET]))
                pass_event(state)
        except DeltaforgeError as error:
            self._fail(error)
        return stop

    def _fail(self, error: DeltaforgeError) -> None:
        """Stop at an error, which says where it is."""
        where = self._where()
        if type(error) in (CorruptLog, UnsupportedEvent) and where not in str(error):
            placed = type(error)(f"{error}, {where}")
            placed.__cause__ = error
            error = placed
        self._error = error

    def _joined(self, source: Bytes) -> bool:
        """Decode the event in several packets at the offset; False when it is not whole."""
        state = self._state
        at = int(state[OFFSET])
        begun = at
        parts: list[Bytes] = []
        size = SPLIT_SIZE
        while size == SPLIT_SIZE:
            if source.size - at < 4:
                return False
            size = int.from_bytes(source[at : at + 3].tobytes(), "little")
            if source.size - at - 4 < size:
                return False
            # Only the first packet has the byte that says what it is.
            parts.append(source[at + (4 if parts else 5) : at + 4 + size])
            at += 4 + size
        event = read_only(np.concatenate(parts))
        if source[begun + 4] != 0:
            self._error = CorruptLog(f"a packet of 16 MiB that is no event, {self._where()}")
            return True
        state[OFFSET], state[BARE] = 0, JOINED
        stop = FULL
        while stop != NEED_MORE and self._error is None:
            stop = self._round(event)
        if self._error is None and state[OFFSET] != event.size:
            self._error = CorruptLog(f"{_DAMAGE[BAD_EVENT]}, {self._where()}")
        state[OFFSET], state[BARE] = at, 0
        self._found.claim(at - begun - event.size)
        return True

    def _nest(self, pieces: Iterator[bytes], end: Callable[[], None] = lambda: None) -> None:
        """Decode these events next, as if they stood where the event stands that is read.

        Args:
            pieces: Whole events one behind the other, without checksums, in pieces cut anywhere.
            end: To be called behind the last of them.
        """
        self._inner.append(InnerEvents(pieces, end))

    def _step_inside(self) -> None:
        """Decode a piece of the innermost of the streams in the stream."""
        state, inner = self._state, self._inner[-1]
        offset = int(state[OFFSET])
        try:
            piece = inner.next()
            if piece is None:
                self._inner.pop()
                inner.end()
                return
        except DeltaforgeError as error:
            self._fail(error)
            return
        self._inner_bytes += piece.size
        state[OFFSET], state[BARE] = 0, INNER
        while self._error is None and self._inner[-1] is inner:
            if self._round(piece) == NEED_MORE:
                break
        inner.keep(piece[state[OFFSET] :])
        state[OFFSET], state[BARE] = offset, 0

    def _act(self, stop: int, source: Bytes) -> None:
        """Do what `scan` stopped for; it goes on after the event when this returns."""
        state = self._state
        start, end = int(state[EVENT]), int(state[EVENT_END])
        if stop in _DAMAGE:
            raise CorruptLog(_DAMAGE[stop])
        if stop == NO_COLUMNS:
            raise UnsupportedEvent(
                "a change whose image has no column, so that it does not say how many rows it is"
                f" about (binlog_row_image=MINIMAL), {self._where()}; set binlog_row_image=FULL"
            )
        if stop == UNSUPPORTED:
            code = int(source[start + 4])
            name = EVENT_NAMES.get(code, f"type {code}")
            raise UnsupportedEvent(
                f"the log holds an event {name}, which this version does not decode"
            )
        if stop == FORMAT:
            packet = source[start : int(state[PACKET_END])].tobytes()
            state[CHECKSUM] = has_checksums(packet)
            self._versions.fixed_binary = is_of_mariadb(packet)
            self._versions.forget()  # table ids begin again when a server starts
        elif stop == PARTIAL:
            self._nest(iter([whole_event(source[start:end].tobytes(), self._versions)]))
        elif stop == OF_XA:
            self._kept.keep(source[start:end].tobytes())
        elif stop == HELD_ROWS:
            self._keep_rows(source[start:end].tobytes())
        elif stop == COMPRESSED:
            self._nest(iter([decompressed(source[start:end].tobytes())]))
        else:
            self._read(stop, source[start + HEADER : end].tobytes())

    def _read(self, stop: int, body: bytes) -> None:
        """Act on the body of an event."""
        if stop == NEW_TABLE:
            self._versions.describe(body, self._here())
        elif stop == STATEMENT:
            self._statement(parse_query(body))
        elif stop == PAYLOAD:
            self._nest(payload_pieces(body))
        elif stop == PREPARED:
            self._prepare(*parse_xa_prepare(body))
        elif stop == TAGGED:
            self._begin(parse_tagged_gtid(body))
        elif stop == NEW_FILE:
            self._open_file(*parse_rotate(body))

    def _begin(self, event: GtidEvent) -> None:
        """Open the transaction of a GTID event that the kernel does not read."""
        state, line = self._state, self._found.txs[int(self._state[TXS])]
        line[[TX_A, TX_B]] = np.frombuffer(event.sid, ">i8")
        line[TX_NUMBER], line[TX_TAG] = event.number, tag_hash(event.tag)
        line[TX_HAS_GTID], line[TX_TS_US], line[TX_END] = GTID_OF_MYSQL, event.ts_us, 0
        self._writer.tags[int(line[TX_TAG])] = event.tag
        state[TXS] += 1
        state[OPEN], state[INDEX] = GROUP, 0

    def _open_file(self, name: str, position: int) -> None:
        """Go on in a file, from a position."""
        state = self._state
        digest = hashlib.blake2b(name.encode(), digest_size=16, person=b"binlog_file").digest()
        state[FILE_A], state[FILE_B] = np.frombuffer(digest, "<i8")
        state[EVENT_POS] = state[POS] = position
        state[UNTIL] = self._until.pos if self._until and self._until.file == name else 0
        self._found.file = name

    def _statement(self, query: Query) -> None:
        """Act on a statement that is no transaction control as every transaction has it."""
        state = self._state
        found = statement(query)
        match found.kind:
            case Kind.PASSED:
                pass
            case Kind.ROLLBACK if state[INDEX] == 0 and found.words == "ROLLBACK":
                self._found.commit()
                return
            case Kind.DEFINES | Kind.EMPTIES:
                self._define(query, found.kind)
            case Kind.XA_START if state[OPEN] == GROUP:
                state[OPEN] = PREPARING
                self._kept.begin()
            case Kind.XA_END if state[OPEN] == PREPARING:
                pass
            case Kind.XA_COMMIT | Kind.XA_ROLLBACK if state[OPEN] == GROUP:
                self._decide(query, found.kind)
                return
            case Kind.UNKNOWN:
                raise UnsupportedEvent(
                    f"the log holds a statement {found.words} ..., which this version does not know,"
                    f" {self._where()}"
                )
            case _:
                raise UnsupportedEvent(
                    f"the log holds the statement {found.words} ..., which changes rows that are not"
                    f" in the log, or takes changes back, {self._where()}; it takes"
                    " binlog_format=ROW, and tables with transactions"
                )
        if state[OPEN] == GROUP:
            self._found.commit()

    def _keep_rows(self, event: bytes) -> None:
        """Hand on a rows event of a table that is held."""
        state = self._state
        table_id = int.from_bytes(event[HEADER : HEADER + ID_SIZE], "little")
        table_map = self._versions.map_of(table_id)
        tx = self._found.txs[int(state[TXS]) - 1]
        kept = KeptRows(
            file=self._found.file,
            pos=int(state[EVENT_POS]),
            tx=tuple(tx.tolist()),
            tag=self._writer.tags.get(int(tx[TX_TAG]), ""),
            index=int(state[HELD_INDEX]),
            table_map=table_map,
            event=event,
        )
        self._keep(".".join(table_of(table_map)), kept)

    def _keep(self, table: str, kept: Kept) -> None:
        event = HeldEvent(table, self._versions.held[table], kept.data())
        self._found.batches.append(ChangeBatch(None, None, held=(event,)))

    def _define(self, query: Query, kind: Kind) -> None:
        """Take notice of DDL, and make a row of it; a TRUNCATE is one of the captured table's."""
        self._catalog.statement(query.database, query.statement, self._here())
        self._versions.forget()
        if kind is Kind.DEFINES:
            for table in self._versions.held:
                self._keep(table, KeptStatement(query.database, query.statement))
        if kind is Kind.DEFINES:
            self._add_statement("ddl", query.database, DDL_TABLE, query)
            return
        for change in table_changes(query.statement, query.database):
            if change.change is Change.EMPTIES and change.table is not None:
                self._truncated(change.db, change.table, query)

    def _truncated(self, db: str, table: str, query: Query) -> None:
        if self._captures(db, table):
            self._add_statement("t", db, table, query)

    def _add_statement(self, op: str, db: str, table: str, query: Query) -> None:
        """Hold the row of a statement, as the last change of its transaction so far."""
        state = self._state
        tx = self._found.txs[int(state[TXS]) - 1]
        row = self._writer.statement(
            query,
            Place(op, db, table, self._found.file, int(state[EVENT_POS]), int(state[INDEX])),
            tx,
        )
        state[INDEX] += 1
        if op == "t" and f"{db}.{table}" in self._versions.held:
            self._keep(f"{db}.{table}", KeptBatch(tuple(tx.tolist()), row))
            return
        self._found.add(row)

    def forget_tables(self) -> None:
        """Let every table be described again."""
        self._versions.forget()

    def decode_held(self, kept: KeptRows, *, last: bool) -> Iterator[pa.RecordBatch]:
        """Yield the changes of a rows event that was kept back, in its place in the log.

        `last` says whether it is the last one that was kept of its transaction.

        Raises:
            UnsupportedEvent: The columns of its table are still not known.
        """
        state, versions = self._state, self._versions
        self._found.batches = []
        self._found.file, self._found.txs[0] = kept.file, kept.tx
        self._writer.tags[int(self._found.txs[0, TX_TAG])] = kept.tag
        state[TXS], state[OPEN], state[INDEX] = 1, BEGUN, kept.index
        state[EVENT_POS] = state[POS] = kept.pos
        versions.describe(kept.table_map, self._here())
        for reason in versions.held.values():
            raise UnsupportedEvent(reason)
        self._nest(iter([kept.event]))
        with np.errstate(over="ignore"):
            while self._inner and self._error is None:
                self._step_inside()
            if last and self._error is None:
                self._found.commit()
        if self._error is not None:
            raise self._error
        for batch in self._found.batches:
            if batch.rows is not None:
                yield batch.rows

    def _prepare(self, xid: Xid, one_phase: bool) -> None:
        """End a transaction of XA: decided at once, or later by another one."""
        self._kept.prepare(xid)
        if one_phase:
            self._replay(xid)
        else:
            self._found.commit()

    def _decide(self, query: Query, kind: Kind) -> None:
        """Commit or roll back a prepared transaction; its rows belong to this one."""
        xid = xid_of(query.statement)
        if xid is None:
            raise CorruptLog(f"an XA statement that names no transaction, {self._where()}")
        if kind is Kind.XA_COMMIT:
            self._replay(xid)
        else:
            self._kept.forget(xid)
            self._found.commit()

    def _replay(self, xid: Xid) -> None:
        """Decode the rows of a prepared transaction, and commit them."""
        kept = self._kept.take(xid)
        pieces = iter(kept) if kept is not None else self._prepared.rows(xid, self._place())
        self._state[OPEN] = BEGUN
        self._nest(pieces, self._found.commit)

    def _place(self) -> BinlogPosition:
        return BinlogPosition(self._found.file, int(self._state[EVENT_POS]))

    def _here(self) -> Position:
        return self._progress.within(self._found.file, int(self._state[EVENT_POS]))

    def _where(self) -> str:
        """Say for an error message where the decoder stands."""
        place = f"{self._found.file}:{int(self._state[POS])}"
        return f"in the event that ends at {place}" if self._inner else f"after {place}"
