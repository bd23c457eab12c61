"""MySQL as a source: the binary log, read as a replica reads it.

One connection per run streams the log; a position is the end of a transaction in it. The server
keeps its log for a limited time (`binlog_expire_logs_seconds`), whether we have read it or not. So
there is nothing to create, retain or confirm on the server, and a position can be lost.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Callable, Generator, Iterator

import pyarrow as pa

from deltaforge_dagster.config.columns import ColumnOptions
from deltaforge_dagster.config.engine import ValueOptions
from deltaforge_dagster.errors import CorruptLog, DeltaforgeError, Retryable, SourceUnavailable
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import (
    ChangeBatch,
    LogSection,
    ReadLimits,
    RetainedLog,
    SchemaRegistry,
    SourceNotes,
)
from deltaforge_dagster.sources.findings import Finding, finding_errors
from deltaforge_dagster.sources.mysql.connection import identity, server_log
from deltaforge_dagster.sources.mysql.connection.server import MysqlSourceServer
from deltaforge_dagster.sources.mysql.connection.server_log import log_retention
from deltaforge_dagster.sources.mysql.connection.service import service_of
from deltaforge_dagster.sources.mysql.decode.decoder import MysqlDecoder, decode_parked
from deltaforge_dagster.sources.mysql.decode.parked_events import tables_of_fix
from deltaforge_dagster.sources.mysql.decode.transaction_assembler import StreamProgress
from deltaforge_dagster.sources.mysql.position import BinlogPosition
from deltaforge_dagster.sources.mysql.preflight import coverage, preflight
from deltaforge_dagster.sources.mysql.schema.catalog import (
    SYSTEM_DATABASES,
    MysqlCatalog,
    captured_tables,
    definitions_now,
    table_details,
    tables_now,
)
from deltaforge_dagster.sources.mysql.schema.definitions import key_of, parse_definition, text_of
from deltaforge_dagster.sources.mysql.schema.versions import MysqlTableContext, TableCatalog
from deltaforge_dagster.sources.mysql.snapshot.reader import MysqlSnapshots
from deltaforge_dagster.sources.mysql.source_type import MysqlSourceConfig, server_id
from deltaforge_dagster.sources.mysql.stream import log_scan
from deltaforge_dagster.sources.mysql.stream.dump import (
    PACKET_HEADER,
    SILENCE_SECONDS,
    check_rights,
    open_dump,
    refusal,
)
from deltaforge_dagster.sources.mysql.stream.log_scan import between_transactions, executed_before
from deltaforge_dagster.sources.mysql.stream.log_sections import (
    MAX_OFFSET,
    BinlogSection,
    Remembering,
    SectionPlanner,
    SectionTables,
    plan_sections,
)
from deltaforge_dagster.sources.mysql.stream.prepared import PreparedLog
from deltaforge_dagster.sources.mysql.values.types import ValueForms
from deltaforge_dagster.sources.outbox import MysqlOutboxTables
from deltaforge_dagster.sources.rows.columns import NO_RULES, ColumnRules
from deltaforge_dagster.sources.stream import ReadBuffer, StreamSocket
from deltaforge_dagster.sources.tables import TablePatterns
from deltaforge_dagster.tables import TableDetails, TableSchema

_HEAD_SECONDS = 2.0  # as `Source.head` promises
_START_SECONDS = 5.0  # as `Source.ensure_start` promises
_OPEN_SECONDS = 30.0


class MysqlSource:
    """The binary log of one server; implements `sources.base.Source`.

    Args:
        config: `spec.source.config` of the pipeline file.
        pipeline: The pipeline's name; the server shows our sessions as `deltaforge/<pipeline>`.
        values: `spec.engine.values`: the formats of values where there is a choice.
        columns: `spec.engine.columns`: the column rules.
        whole_inserts: Whether a table is on hold if a column that an insert lacks has no certain
            default.
    """

    def __init__(
        self,
        config: MysqlSourceConfig,
        pipeline: str,
        values: ValueOptions | None = None,
        columns: ColumnOptions | None = None,
        whole_inserts: bool = False,
    ) -> None:
        self._arguments = (config, pipeline, values, columns, whole_inserts)
        self._whole_inserts = whole_inserts
        self._config = config
        self._forms = _forms(values or ValueOptions())
        self._rules = NO_RULES if columns is None else ColumnRules(columns)
        self._server = MysqlSourceServer.from_dsn(
            config.dsn.get_secret_value(), f"deltaforge/{pipeline}"
        )
        self._patterns = TablePatterns(config.tables, unqualified="*", system=SYSTEM_DATABASES)
        self._outboxes = MysqlOutboxTables(() if config.outbox is None else config.outbox.tables)
        self._identity: str | None = None
        self._lock = threading.Lock()
        self._stream: StreamSocket | None = None
        self._closed = False

    def __reduce__(self) -> tuple[type[MysqlSource], tuple[object, ...]]:
        """Pickle only the arguments: the copy is a new, unconnected source."""
        return MysqlSource, self._arguments

    def head(self) -> BinlogPosition:
        """Return the end of the server's log, within 2 seconds.

        The end moves even if no captured table changes.
        """
        with self._server.query(_HEAD_SECONDS) as session:
            facts = server_log.facts(session, self._server.where)
            return server_log.tail(session, self._server.where, gtids=facts.gtids)

    def ensure_start(self, at: Position | None = None) -> BinlogPosition:
        """Check the server's settings and grants, and return the current end of the log.

        Takes at most 5 seconds. `read` from that position yields every change that is committed
        after this call returns. Nothing is created on the server; a later call returns a later
        position, so the caller must keep the first.

        With `at`, the result is that position: its GTID set, if it has one, which must contain only
        complete transactions; otherwise the last boundary of transactions at or before its offset.
        To find that, the file is read up to the offset, which may take longer than 5 seconds.

        Raises:
            PositionLost: The log after `at` is no longer available.
            SourceMisconfigured: A setting is wrong; the message has the statement that changes it.
            PermissionMissing: A grant is missing; the message has the statement.
            SourceUnavailable: The server cannot be reached; try again.
        """
        with self._server.query(_START_SECONDS) as session:
            facts = server_log.facts(session, self._server.where)
            if at is None:
                start = server_log.tail(session, self._server.where, gtids=facts.gtids)
            else:
                start = _binlog(at)
                server_log.check_log_kept(session, self._server.where, start, facts)
        check_rights(self._server, server_id(self._config.id, "rights"), _START_SECONDS)
        if at is None:
            return start
        if start.gtid_set is None:
            reader_id = server_id(self._config.id, "look ahead")
            start = between_transactions(self._server, start, reader_id, _OPEN_SECONDS)
        return self._check(start)

    def reset(self, *, dry_run: bool) -> list[str]:
        """Return an empty list: the server keeps nothing for a pipeline."""
        del dry_run
        return []

    def definitions(self, start: Position) -> dict[str, str]:
        """Return all tables' definitions, which a log with `binlog_row_metadata=MINIMAL` lacks.

        Tables that a statement after `start` changed are left out, and all tables if the server is
        too slow. A reader looks these up later, which takes longer, and is impossible if the table
        has changed meanwhile.
        """
        with contextlib.suppress(Retryable):
            return definitions_now(
                self._server, _binlog(start), server_id(self._config.id, "peek"), _START_SECONDS
            )
        return {}

    def has_changes(self, after: Position) -> bool:
        """Return whether it is worth starting a run that reads from `after`.

        True if the log after `after` has a change of a captured table. Also true if the search
        takes longer than about 2 seconds or passes 64 MiB of log, because a run then moves the
        position past it; and if the log of a server that is not a primary does not contain the
        position, because only a run can tell whether a failover is under way.

        Raises:
            PositionLost: The log after `after` is no longer available.
        """
        return log_scan.has_changes(self._server, self._patterns, self._config.id, _binlog(after))

    def log_ends(self, seconds: float) -> Generator[object]:
        """Yield the status of the server's log, queried again for each value.

        See `base.WatchableSource.log_ends`.

        Raises:
            SourceUnavailable: No connection, or `seconds` have passed.
        """
        with self._server.query(seconds) as session:
            while True:
                yield server_log.status(session)

    def maintain(self, position: Position | None) -> list[Finding]:
        """Return a finding for each table and database of the patterns that is not in the log.

        Raises:
            PositionLost: The log after `position` is no longer available.
            SourceMisconfigured: A setting of the server is wrong.
            SourceUnavailable: The server cannot be reached; try again.
        """
        with self._server.query(_START_SECONDS) as session:
            facts = server_log.facts(session, self._server.where)
            if position is not None:
                server_log.is_lost_here(session, self._server.where, _binlog(position), facts)
            return coverage(session, self._server, self._patterns)

    def preflight(
        self, position: Position | None, as_of: float | None, *, snapshot: bool = False
    ) -> list[Finding]:
        """Check the server's settings and permissions for capture, as `Source.preflight` says.

        Raises:
            DeltaforgeError: The server cannot be reached.
        """
        captured = None if position is None else _binlog(position)
        findings = preflight(
            self._server,
            self._patterns,
            self._config.id,
            captured,
            as_of,
            outboxes=self._outboxes,
            snapshot=snapshot,
            keeps_rows=self._whole_inserts,
        )
        if not self._rules:
            return findings
        with finding_errors("columns", findings), self._server.query(_OPEN_SECONDS) as session:
            findings += self._rules.findings(
                captured_tables(session, self._patterns.matches),
                lambda table: identity.sent_schema(session, self._server.where, table),
            )
        return findings

    def read(
        self, start: Position, limits: ReadLimits, registry: SourceNotes
    ) -> Generator[ChangeBatch]:
        """Yield every transaction committed after `start`, complete and exactly once, in log order.

        The stream ends only with an error, with `close`, or when the generator is closed.

        Raises:
            PositionLost: The log after `start` is no longer available.
            SourceUnavailable: The connection broke, or another reader with the same server id took
                over. Read again from the end of the last complete transaction.
            SourceMisconfigured: A setting of the server was changed.
            UnsupportedEvent: The log contains an event that this version does not decode.
        """
        return self._read(_binlog(start), limits, registry, server_id(self._config.id))

    def _read(
        self, start: BinlogPosition, limits: ReadLimits, registry: SourceNotes, reader_id: int
    ) -> Generator[ChangeBatch]:
        begin = self._check(start)
        stream = self._open(begin, reader_id)
        look_ahead = server_id(self._config.id, "look ahead")
        catalog = MysqlCatalog(self._server, registry, begin, look_ahead, self._forms)
        decoder = MysqlDecoder(
            self._context(registry, catalog),
            source_id=self._config.id,
            progress=StreamProgress(begin),
            outboxes=self._outboxes,
            prepared=PreparedLog(self._server, server_id(self._config.id, "prepared")),
            holds=registry.holds(),
        )
        try:
            yield from self._batches(stream, decoder, begin, limits)
        finally:
            stream.close()

    def _context(self, registry: SchemaRegistry, catalog: TableCatalog) -> MysqlTableContext:
        return MysqlTableContext(
            registry,
            catalog,
            self._patterns.matches,
            self._forms,
            self._rules,
            self._whole_inserts,
        )

    def read_again(
        self, start: Position, limits: ReadLimits, registry: SourceNotes
    ) -> Iterator[ChangeBatch]:
        """Yield what `read` yields, under another server id, so that a run can read meanwhile."""
        return self._read(_binlog(start), limits, registry, server_id(self._config.id, "again"))

    def behind(self, position: Position) -> int:
        """Return how many bytes of log there are after a position; 0 if unknown."""
        with contextlib.suppress(DeltaforgeError), self._server.query(_HEAD_SECONDS) as session:
            return server_log.bytes_after(server_log.log_files(session), _binlog(position))
        return 0

    def retained_log(self, captured: Position, confirmed: Position | None) -> RetainedLog:
        """Return how many bytes of log there are around the positions.

        The server keeps no log for a pipeline: it discards its log by age.

        Raises:
            DeltaforgeError: The server does not answer within 2 seconds, or refuses.
        """
        with self._server.query(_HEAD_SECONDS) as session:
            files = server_log.log_files(session)
            retention = log_retention(session, service_of(session))
        seconds = retention.seconds
        limited = seconds is not None and math.isfinite(seconds)
        newest, size = list(files.items())[-1]
        after = server_log.bytes_after(files, _binlog(captured))
        return RetainedLog(
            BinlogPosition(newest, size),
            after,
            None if confirmed is None else server_log.bytes_after(files, _binlog(confirmed)),
            room=max(0, sum(files.values()) - after),
            kept_seconds=seconds if limited else None,
            limited_by=retention.setting if limited else None,
        )

    def warm(self) -> None:
        """Compile the kernels, or load them from the cache."""
        from deltaforge_dagster.sources.mysql import warm  # noqa: PLC0415 - only for this

        warm.warm()

    def plan_sections(
        self, start: Position, registry: SourceNotes, log_bytes: Callable[[], int]
    ) -> Generator[BinlogSection | None]:
        """Yield consecutive sections of the log from `start` on.

        See `SectionedSource.plan_sections`. Yields nothing if `start` is beyond 4 GiB of a file.

        Raises:
            DeltaforgeError: The server refused a request, or the run lost its lease.
        """
        begin = _binlog(start)
        if begin.pos > MAX_OFFSET:
            return
        server, tables = self.identity(), SectionTables()
        look_ahead = server_id(self._config.id, "look ahead")
        catalog = MysqlCatalog(self._server, registry, begin, look_ahead, self._forms)
        remembering = Remembering(catalog, registry, tables)
        planner = SectionPlanner(
            MysqlTableContext(
                remembering, remembering, self._patterns.matches, self._forms, self._rules
            ),
            source_id=self._config.id,
            progress=StreamProgress(begin),
            prepared=tables,
            holds=registry.holds(),
        )
        stream = self._open_at(begin, server_id(self._config.id, "sections"))
        yield from plan_sections(stream, planner, tables, begin, log_bytes=log_bytes, server=server)

    def read_section(
        self, section: LogSection, limits: ReadLimits, reader: int
    ) -> Iterator[ChangeBatch]:
        """Yield the changes of one section of the log, exactly as `read` does.

        Args:
            section: A section that `plan_sections` yielded.
            limits: As for `read`.
            reader: A number that no other reader uses at the same time.

        Raises:
            SourceUnavailable: Another server has taken the place of the one that the section was
                planned on.
            CorruptLog: The log differs from the one that the section was planned on.
            DeltaforgeError: As from `read`.
        """
        assert isinstance(section, BinlogSection)
        if self.identity() != section.server:
            raise SourceUnavailable(f"{self._server.where}: another server has taken its place")
        decoder = MysqlDecoder(
            self._context(section.tables, section.tables),
            source_id=self._config.id,
            progress=StreamProgress(section.start),
            outboxes=self._outboxes,
            prepared=section.tables,
            until=section.end,
        )
        stream = self._open_at(section.start, server_id(self._config.id, f"section {reader}"))
        with contextlib.closing(stream):
            for batch in self._batches(stream, decoder, section.start, limits):
                end = None if batch.end is None else _binlog(batch.end)
                yield batch
                if end is not None and end >= section.end:
                    break
        if end != section.end:
            raise CorruptLog(f"{self._server.where}: the log has changed at {section.end}")

    def _open_at(self, start: BinlogPosition, reader_id: int) -> StreamSocket:
        """Open a dump from an offset of a file to the log's current end."""
        position = BinlogPosition(start.file, start.pos)
        return open_dump(
            self._server, position, reader_id, _OPEN_SECONDS, follow=False, expected=self._identity
        )

    def decode_parked(
        self, events: Iterator[bytes], fix: str, position: Position, registry: SourceNotes
    ) -> Iterator[pa.RecordBatch]:
        """Decode the parked events of a table; yield the changes that `read` would have yielded.

        The table's definition after the last event is stored for the log after `position`, unless
        one is stored already.

        Raises:
            UnsupportedEvent: The table's columns in these events are still not certain.
        """
        fields = json.loads(fix)
        name = (str(fields["db"]), str(fields["table"]))
        now = tables_now(self._server, name) if fields.get("catalog") else {}
        tables = tables_of_fix(fields, name, now)
        yield from decode_parked(
            events,
            tables,
            source_id=self._config.id,
            registry=registry,
            forms=self._forms,
            outboxes=self._outboxes,
            rules=self._rules,
        )
        noted = registry.defined(position).get(key_of(name))
        text = text_of(tables.tables, name)
        if text is not None and (noted is None or parse_definition(noted) is None):
            registry.define({key_of(name): text}, position)

    def confirm(self, position: Position) -> None:
        """Do nothing: the server discards its log by age, whatever its readers have read."""

    def close(self) -> None:
        """End the stream. The source cannot be used any more."""
        with self._lock:
            self._closed = True
            stream = self._stream
        if stream is not None:
            stream.close()

    def identity(self) -> str:
        """Return `server_uuid`, or on MariaDB the nearest equivalent.

        From then on, only the server with this identity is read.
        """
        with self._server.query(_START_SECONDS) as session:
            self._identity = identity.identity(session)
        return self._identity

    def relocate(
        self,
        position: Position,
        previous: str,  # noqa: ARG002 - GTIDs suffice
    ) -> Position:
        """Return where reading continues on this server after a failover; see `Source.relocate`.

        Raises:
            PositionLost: The position has no GTIDs, or this server's log does not have everything
                after them.
        """
        with self._server.query(_OPEN_SECONDS) as session:
            return identity.relocate(session, self._server.where, _binlog(position))

    def snapshots(self) -> MysqlSnapshots:
        """Return the object that plans and reads snapshots of the tables."""
        return MysqlSnapshots(
            server=self._server,
            source_id=self._config.id,
            patterns=self._patterns,
            outboxes=self._outboxes,
            forms=self._forms,
            rules=self._rules,
        )

    def schema(self, table: str) -> TableSchema:
        """Return the current columns and key of a table (`database.table`), under the column rules.

        Raises:
            SourceMisconfigured: There is no such table.
        """
        with self._server.query(_OPEN_SECONDS) as session:
            sent = identity.sent_schema(session, self._server.where, table)
        return self._rules.visible(sent)

    def database(self) -> None:
        """Return None: full names of tables include their database."""

    def details(self, table: str) -> TableDetails:
        """Return the properties of a table (`database.table`) that only the catalog has.

        Raises:
            SourceMisconfigured: There is no such table.
        """
        with self._server.query(_START_SECONDS) as session:
            sent = identity.sent_schema(session, self._server.where, table)
            return self._rules.details(sent, table_details(session, self._server.where, table))

    def tables(self) -> list[str]:
        """Return `database.table` of every existing table that the patterns match."""
        with self._server.query(_OPEN_SECONDS) as session:
            return captured_tables(session, self._patterns.matches)

    def _check(self, start: BinlogPosition) -> BinlogPosition:
        """Check that the log after `start` is available.

        Returns `start`, with its GTID set if the server has GTIDs.
        """
        where = self._server.where
        with self._server.query(_OPEN_SECONDS) as session:
            identity.check_same(session, where, self._identity)
            facts = server_log.facts(session, where)
            server_log.check_log_kept(session, where, start, facts)
            if not facts.gtids or start.gtid_set is not None:
                return start
            if session.is_mariadb:
                domains = server_log.domains_at(session, where, start)
                return BinlogPosition(start.file, start.pos, str(domains))
        executed = executed_before(
            self._server, start, server_id(self._config.id, "look ahead"), _OPEN_SECONDS
        )
        return BinlogPosition(start.file, start.pos, str(executed))

    def _open(self, start: BinlogPosition, reader_id: int) -> StreamSocket:
        stream = open_dump(self._server, start, reader_id, _OPEN_SECONDS, expected=self._identity)
        with self._lock:
            self._stream = stream
            if self._closed:
                stream.close()
        return stream

    def _batches(
        self, stream: StreamSocket, decoder: MysqlDecoder, start: BinlogPosition, limits: ReadLimits
    ) -> Iterator[ChangeBatch]:
        buffer = ReadBuffer(limits.max_bytes)
        reported, again = start, False
        while True:
            if not again and not buffer.fill(stream.receive, limits.max_wait):
                if stream.silence > SILENCE_SECONDS:
                    raise SourceUnavailable(
                        f"{self._server.where}: the server has said nothing for "
                        f"{SILENCE_SECONDS:g} s"
                    )
                yield ChangeBatch(None, None)
                continue
            decoded = decoder.feed(buffer.data, buffer.length)
            for batch in decoded.batches:
                # With GTIDs the server starts in an older file and skips the transactions that were
                # read before, so idle progress may not be later than what was reported.
                if batch.rows is None and batch.end is not None and _binlog(batch.end) <= reported:
                    continue
                reported = reported if batch.end is None else _binlog(batch.end)
                yield from batch.split(limits.max_events)
            if decoded.error is not None:
                raise decoded.error
            if decoded.foreign:
                packet = bytes(buffer.data[decoded.consumed + PACKET_HEADER : buffer.length])
                raise refusal(self._server, packet)
            if not decoded.batches and not decoded.again:
                yield ChangeBatch(None, None)
            buffer.drop(decoded.consumed)
            again = decoded.again


def _forms(values: ValueOptions) -> ValueForms:
    return ValueForms(
        enum_index=values.mysql_enum == "index",
        set_bits=values.mysql_set == "bits",
        timestamp_micros=values.mysql_timestamp == "micros",
        binary_text=values.mysql_binary == "text",
    )


def _binlog(position: Position) -> BinlogPosition:
    if not isinstance(position, BinlogPosition):
        raise CorruptLog(f"not a MySQL position: {position.to_json()}")
    return position
