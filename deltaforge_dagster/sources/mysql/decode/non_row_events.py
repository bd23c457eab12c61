"""Handle infrequent events: statements, table descriptions, XA, a new file, nested events.

The kernel `scan` handles the usual events of a transaction, its begin, rows and end, and stops at
all others. This module handles each of those in Python, and the scan continues after it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from deltaforge_dagster.errors import CorruptLog, UnsupportedEvent
from deltaforge_dagster.kernels.runtime import Bytes
from deltaforge_dagster.sources.base import ChangeBatch, ParkedEvent
from deltaforge_dagster.sources.mysql.decode.batches import DDL_TABLE, MysqlBatchWriter, RowLocation
from deltaforge_dagster.sources.mysql.decode.layout import (
    BAD_EVENT,
    BAD_ORDER,
    BAD_ROWS,
    BAD_SUM,
    BEGUN,
    CHECKSUM,
    COMPRESSED,
    EVENT,
    EVENT_END,
    EVENT_POS,
    FILE_A,
    FILE_B,
    FORMAT,
    GROUP,
    GTID_OF_MYSQL,
    INDEX,
    NEW_FILE,
    NEW_TABLE,
    NO_COLUMNS,
    OF_XA,
    OPEN,
    PACKET_END,
    PARKED_INDEX,
    PARKED_ROWS,
    PARTIAL,
    PAYLOAD,
    POS,
    PREPARED,
    PREPARING,
    STATEMENT,
    TAGGED,
    TX_A,
    TX_B,
    TX_END,
    TX_HAS_GTID,
    TX_NUMBER,
    TX_TAG,
    TX_TS_US,
    TXS,
    UNKNOWN_TABLE,
    UNSUPPORTED,
    UNTIL,
)
from deltaforge_dagster.sources.mysql.decode.parked_events import (
    ParkedBatch,
    ParkedItem,
    ParkedRows,
    ParkedStatement,
)
from deltaforge_dagster.sources.mysql.decode.partial_json import whole_event
from deltaforge_dagster.sources.mysql.decode.transaction_assembler import TransactionAssembler
from deltaforge_dagster.sources.mysql.events.binlog import (
    EVENT_NAMES,
    HEADER,
    GtidEvent,
    QueryEvent,
    has_checksums,
    left_out,
    log_server,
    parse_query,
    parse_rotate,
    parse_tagged_gtid,
    tag_hash,
)
from deltaforge_dagster.sources.mysql.events.compressed_events import (
    NestedEvents,
    decompressed,
    payload_blocks,
)
from deltaforge_dagster.sources.mysql.events.sql_text import Name
from deltaforge_dagster.sources.mysql.events.statements import (
    DdlEffect,
    Statement,
    StatementKind,
    Xid,
    statement,
    table_changes,
    xid_of,
)
from deltaforge_dagster.sources.mysql.events.table_map import ID_SIZE
from deltaforge_dagster.sources.mysql.position import BinlogPosition
from deltaforge_dagster.sources.mysql.schema.versions import MysqlTableVersions, TableCatalog
from deltaforge_dagster.sources.mysql.stream.log_scan import table_of
from deltaforge_dagster.sources.mysql.stream.prepared import (
    FindsPrepared,
    PreparedRows,
    parse_xa_prepare,
)

DAMAGE = {
    BAD_EVENT: "an event that is shorter or longer than its kind",
    BAD_SUM: "an event that differs from its checksum",
    BAD_ORDER: "an event where a transaction may not have it",
    BAD_ROWS: "a change that does not follow its table's description",
    UNKNOWN_TABLE: "a change of a table that was never described",
}
"""Error texts for damage in the log, by the stop code of `scan`."""


class NonRowEvents:
    """Handles the events of one stream that the kernel leaves to Python.

    Args:
        assembler: The transactions and changes that were found so far.
        writer: Writes rows for statements.
        versions: The table versions of the stream.
        catalog: Gets the statements that may define tables.
        captures: Returns whether a table is captured.
        prepared: Finds rows of prepared XA transactions that are not in memory.
        until: The end of a transaction after which nothing is decoded, or None.
        nested: The decoder's nested streams, the innermost last; nested events are added to it.
    """

    def __init__(
        self,
        assembler: TransactionAssembler,
        writer: MysqlBatchWriter,
        versions: MysqlTableVersions,
        *,
        catalog: TableCatalog,
        captures: Callable[[str, str], bool],
        prepared: FindsPrepared,
        until: BinlogPosition | None,
        nested: list[NestedEvents],
    ) -> None:
        self._assembler = assembler
        self._state = assembler.state
        self._writer = writer
        self._versions = versions
        self._catalog = catalog
        self._captures = captures
        self._prepared = prepared
        self._prepared_rows = PreparedRows()
        self._until = until
        self._nested = nested

    def act(self, stop: int, source: Bytes) -> None:
        """Handle the event at which `scan` stopped; the scan then continues after it.

        Args:
            stop: The stop code of `scan`.
            source: The buffer that contains the event.

        Raises:
            UnsupportedEvent: This version does not decode the event or statement.
            CorruptLog: The log does not follow its format.
        """
        state = self._state
        start, end = int(state[EVENT]), int(state[EVENT_END])
        if stop in DAMAGE:
            raise CorruptLog(DAMAGE[stop])
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
            self._versions.server = log_server(packet)
            self._versions.forget()  # table ids start again when a server restarts
        elif stop == PARTIAL:
            self._nest(iter([whole_event(source[start:end].tobytes(), self._versions)]))
        elif stop == OF_XA:
            self._prepared_rows.keep(source[start:end].tobytes())
        elif stop == PARKED_ROWS:
            self._hold_rows(source[start:end].tobytes())
        elif stop == COMPRESSED:
            self._nest(iter([decompressed(source[start:end].tobytes())]))
        else:
            self._read(stop, source[start + HEADER : end].tobytes())

    def complete(self, source: Bytes) -> None:
        """Look up defaults of columns that inserts lack; the scan then reads their event again."""
        start, end = int(self._state[EVENT]), int(self._state[EVENT_END])
        event = source[start:end].tobytes()
        self._versions.complete(*left_out(event), self._assembler.here())

    def _read(self, stop: int, body: bytes) -> None:
        """Handle an event by its body."""
        if stop == NEW_TABLE:
            self._versions.describe(body, self._assembler.here())
        elif stop == STATEMENT:
            self._statement(parse_query(body, self._versions.server))
        elif stop == PAYLOAD:
            self._nest(payload_blocks(body))
        elif stop == PREPARED:
            self._prepare(*parse_xa_prepare(body))
        elif stop == TAGGED:
            self._begin(parse_tagged_gtid(body))
        elif stop == NEW_FILE:
            self._open_file(*parse_rotate(body))

    def _nest(self, events: Iterator[bytes]) -> None:
        """Let the decoder decode these events next, at the position of the current event.

        `events` are blocks that may be cut anywhere, of consecutive events without checksums.
        """
        self._nested.append(NestedEvents(events))

    def _begin(self, event: GtidEvent) -> None:
        """Begin the transaction of a GTID_TAGGED event."""
        state, line = self._state, self._assembler.txs[int(self._state[TXS])]
        line[[TX_A, TX_B]] = np.frombuffer(event.sid, ">i8")
        line[TX_NUMBER], line[TX_TAG] = event.number, tag_hash(event.tag)
        line[TX_HAS_GTID], line[TX_TS_US], line[TX_END] = GTID_OF_MYSQL, event.ts_us, 0
        self._writer.tags[int(line[TX_TAG])] = event.tag
        state[TXS] += 1
        state[OPEN], state[INDEX] = GROUP, 0

    def _open_file(self, name: str, position: int) -> None:
        """Continue in another log file, at a position."""
        state = self._state
        digest = hashlib.blake2b(name.encode(), digest_size=16, person=b"binlog_file").digest()
        state[FILE_A], state[FILE_B] = np.frombuffer(digest, "<i8")
        state[EVENT_POS] = state[POS] = position
        state[UNTIL] = self._until.pos if self._until and self._until.file == name else 0
        self._assembler.file = name

    def _statement(self, query: QueryEvent) -> None:
        """Handle a statement other than the usual BEGIN, COMMIT and SAVEPOINT."""
        state = self._state
        parsed = statement(query)
        match parsed.kind:
            case StatementKind.PASSED:
                pass
            case StatementKind.ROLLBACK if state[INDEX] == 0 and parsed.words == "ROLLBACK":
                # Nothing to take back: the transaction has logged no change.
                self._assembler.commit()
                return
            case StatementKind.DEFINES | StatementKind.EMPTIES:
                self._define(query, parsed.kind)
            case StatementKind.XA_START if state[OPEN] == GROUP:
                state[OPEN] = PREPARING
                self._prepared_rows.begin()
            case StatementKind.XA_END if state[OPEN] == PREPARING:
                pass
            case StatementKind.XA_COMMIT | StatementKind.XA_ROLLBACK if state[OPEN] == GROUP:
                self._decide(query, parsed.kind)
                return
            case StatementKind.UNKNOWN if parsed.tables is not None:
                self._hold(parsed.tables, parsed.words, query)
            case StatementKind.CHANGES if self._is_not_captured(parsed.tables):
                self._ignore(parsed, query)
            case _:
                raise UnsupportedEvent(self._refusal(parsed))
        if state[OPEN] == GROUP:
            self._assembler.commit()

    def _refusal(self, parsed: Statement) -> str:
        """Return why a statement stops the pipeline."""
        if parsed.kind is StatementKind.UNKNOWN:
            return (
                f"the log holds a statement {parsed.words} ..., which this version does not know,"
                f" {self._where()}"
            )
        return (
            f"the log holds the statement {parsed.words} ..., which changes rows that are not"
            f" in the log, or takes changes back, {self._where()}; it takes"
            " binlog_format=ROW, and tables with transactions"
        )

    def _is_not_captured(self, names: frozenset[Name] | None) -> bool:
        """Return whether the tables that a statement changes are known, and none is captured."""
        return names is not None and not self._captured(names)

    def _ignore(self, parsed: Statement, query: QueryEvent) -> None:
        """Ignore a statement that changes rows of tables that are not captured.

        If it also creates one of them (`CREATE TABLE ... SELECT`), its definition is recorded.
        """
        if parsed.words.startswith("CREATE"):
            self._define(query, StatementKind.DEFINES)

    def _captured(self, names: Iterable[Name]) -> set[Name]:
        """Return which of these names are captured, as they are or in lower case.

        The server may have spelled the names in lower case.
        """
        spelled = {*names} | {(db.lower(), table.lower()) for db, table in names}
        return {name for name in spelled if self._captures(*name)}

    def _hold(self, names: frozenset[Name], words: str, query: QueryEvent) -> None:
        """Hold the tables that an unknown statement may have changed.

        These are the captured tables that it names, and those of a database that it names.
        """
        tables = {".".join(name) for name in self._catalog.existing(self._captured(names))}
        databases = {table for _, table in names}
        tables |= {table for table in self._versions.captured if table.split(".")[0] in databases}
        for table in sorted(tables - self._versions.holds.keys()):
            self._versions.hold(
                table,
                f"table {table}: the log holds a statement {words} ..., which this version does not"
                f" know, {self._where()}; it may have changed the table",
            )
        self._catalog.statement(query.database, query.sql, self._assembler.here())
        for table in sorted(tables):
            self._hold_event(table, ParkedStatement(query.database, query.sql))

    def _hold_rows(self, event: bytes) -> None:
        """Add a rows event of a table on hold to the batches, undecoded."""
        state = self._state
        table_id = int.from_bytes(event[HEADER : HEADER + ID_SIZE], "little")
        table_map = self._versions.map_of(table_id)
        tx = self._assembler.txs[int(state[TXS]) - 1]
        parked = ParkedRows(
            file=self._assembler.file,
            pos=int(state[EVENT_POS]),
            tx=tuple(tx.tolist()),
            tag=self._writer.tags.get(int(tx[TX_TAG]), ""),
            index=int(state[PARKED_INDEX]),
            table_map=table_map,
            event=event,
            server=self._versions.server,
        )
        self._hold_event(".".join(table_of(table_map)), parked)

    def _hold_event(self, table: str, parked: ParkedItem) -> None:
        event = ParkedEvent(table, self._versions.holds[table], parked.data())
        self._assembler.batches.append(ChangeBatch(None, None, parked=(event,)))

    def _define(self, query: QueryEvent, kind: StatementKind) -> None:
        """Apply DDL to the table definitions, and add a row for it.

        A TRUNCATE is a row of each captured table that it empties.
        """
        altered = self._catalog.statement(query.database, query.sql, self._assembler.here())
        self._versions.redefined(altered)
        self._versions.forget()
        if kind is StatementKind.DEFINES:
            for table in self._versions.holds:
                self._hold_event(table, ParkedStatement(query.database, query.sql))
        if kind is StatementKind.DEFINES:
            self._add_statement("ddl", query.database, DDL_TABLE, query)
            return
        for change in table_changes(query.sql, query.database):
            if change.change is DdlEffect.EMPTIES and change.table is not None:
                self._truncated(change.db, change.table, query)

    def _truncated(self, db: str, table: str, query: QueryEvent) -> None:
        if self._captures(db, table):
            self._add_statement("t", db, table, query)

    def _add_statement(self, op: str, db: str, table: str, query: QueryEvent) -> None:
        """Add the row of a statement as the newest change of its transaction.

        If the row is a TRUNCATE of a table on hold, it is parked instead.
        """
        state = self._state
        tx = self._assembler.txs[int(state[TXS]) - 1]
        row = self._writer.statement(
            query,
            RowLocation(
                op, db, table, self._assembler.file, int(state[EVENT_POS]), int(state[INDEX])
            ),
            tx,
        )
        state[INDEX] += 1
        if op == "t" and f"{db}.{table}" in self._versions.holds:
            self._hold_event(f"{db}.{table}", ParkedBatch(tuple(tx.tolist()), row))
            return
        self._assembler.add(row)

    def _prepare(self, xid: Xid, one_phase: bool) -> None:
        """Handle XA_PREPARE, the end of an XA transaction's changes.

        Commit them at once if it has one phase; otherwise keep them until XA COMMIT or XA ROLLBACK.
        """
        self._prepared_rows.prepare(xid)
        if one_phase:
            self._replay(xid)
        else:
            self._assembler.commit()

    def _decide(self, query: QueryEvent, kind: StatementKind) -> None:
        """Handle XA COMMIT or XA ROLLBACK; on commit, the rows become those of this transaction."""
        xid = xid_of(query.statement)
        if xid is None:
            raise CorruptLog(f"an XA statement that names no transaction, {self._where()}")
        if kind is StatementKind.XA_COMMIT:
            self._replay(xid)
        else:
            self._prepared_rows.forget(xid)
            self._assembler.commit()

    def _replay(self, xid: Xid) -> None:
        """Decode the rows of a prepared transaction, and commit them."""
        rows = self._prepared_rows.pop(xid)
        blocks = iter(rows) if rows is not None else self._prepared.rows(xid, self._position())
        self._state[OPEN] = BEGUN
        self._nested.append(NestedEvents(blocks, self._assembler.commit))

    def _position(self) -> BinlogPosition:
        return BinlogPosition(self._assembler.file, int(self._state[EVENT_POS]))

    def _where(self) -> str:
        return self._assembler.where(inside=bool(self._nested))
