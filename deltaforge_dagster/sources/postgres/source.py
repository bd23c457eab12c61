"""PostgreSQL as a source: logical replication with the built-in plugin `pgoutput`.

One publication selects the tables, one slot retains the log, one stream per run reads it. A
position is the `end_lsn` of a commit, or an LSN up to which the server says that it has nothing for
us.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import closing

import psycopg
import pyarrow as pa

from deltaforge_dagster.config.columns import ColumnOptions
from deltaforge_dagster.config.engine import PostgresOptions, ValueOptions
from deltaforge_dagster.config.globs import Globs
from deltaforge_dagster.errors import (
    NotAllowed,
    SourceMisconfigured,
    SourceUnavailable,
    UnsupportedEvent,
)
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import ChangeBatch, ReadLimits, RetainedLog, SourceNotes
from deltaforge_dagster.sources.findings import Finding
from deltaforge_dagster.sources.postgres.connection import catalog, identity
from deltaforge_dagster.sources.postgres.connection.refusals import FUNCTION_REFUSED
from deltaforge_dagster.sources.postgres.connection.reselect import Reselection
from deltaforge_dagster.sources.postgres.connection.server import (
    PostgresSourceServer,
    identified,
)
from deltaforge_dagster.sources.postgres.connection.service import after_restart
from deltaforge_dagster.sources.postgres.decode.batches import UnchangedToast
from deltaforge_dagster.sources.postgres.decode.column_numbers import ColumnNumbers
from deltaforge_dagster.sources.postgres.decode.decoder import PostgresDecoder
from deltaforge_dagster.sources.postgres.decode.pgoutput import MESSAGES_VERSION
from deltaforge_dagster.sources.postgres.decode.rows import MARK, OMIT
from deltaforge_dagster.sources.postgres.decode.types import BUILT_IN, ISO_TIMESTAMPS
from deltaforge_dagster.sources.postgres.decode.versions import PostgresTableContext
from deltaforge_dagster.sources.postgres.position import LsnPosition, lsn_of, parse_lsn
from deltaforge_dagster.sources.postgres.preflight import heartbeat_right, preflight
from deltaforge_dagster.sources.postgres.snapshot.column_fills import CatalogFills
from deltaforge_dagster.sources.postgres.snapshot.reader import PostgresSnapshots
from deltaforge_dagster.sources.postgres.source_type import PostgresSourceConfig
from deltaforge_dagster.sources.postgres.stream import (
    publications,
    slot_setup,
    slots,
)
from deltaforge_dagster.sources.postgres.stream.slot_reader import SlotReader
from deltaforge_dagster.sources.postgres.stream.slots import Heartbeat
from deltaforge_dagster.sources.rows.columns import NO_RULES, ColumnRules
from deltaforge_dagster.sources.tables import TablePatterns
from deltaforge_dagster.tables import LoggedTable, TableDetails, TableSchema

logger = logging.getLogger(__name__)

_HEAD_SECONDS = 2.0  # as `Source.head` promises
_START_SECONDS = 5.0  # as `Source.ensure_start` promises
_PEEK_SECONDS = 2.5  # the statement itself may take half a second less
_OPEN_SECONDS = 30.0  # as `Source.preflight` promises
_NO_MESSAGES = (
    "this server sends no logical messages, of which source.config.outbox.prefixes speaks "
    "(PostgreSQL does from 14 on)"
)
_ANYBODYS_MESSAGES = (
    "logical messages come with the log, whoever writes them: this role needs no right for them"
)
_DEFAULT_VALUES = ValueOptions()
_DEFAULT_OPTIONS = PostgresOptions()


class PostgresSource:
    """One database's log, as `sources.base.Source` promises.

    Args:
        config: `spec.source.config` of the pipeline file.
        pipeline: The pipeline's name; the server shows our sessions as `deltaforge/<pipeline>`.
        values: `spec.engine.values`.
        options: `spec.engine.postgres`.
        columns: `spec.engine.columns`: the column rules.
    """

    def __init__(
        self,
        config: PostgresSourceConfig,
        pipeline: str,
        values: ValueOptions = _DEFAULT_VALUES,
        options: PostgresOptions = _DEFAULT_OPTIONS,
        columns: ColumnOptions | None = None,
    ) -> None:
        self._arguments = (config, pipeline, values, options, columns)
        self._rules = NO_RULES if columns is None else ColumnRules(columns)
        self._config = config
        self._values = values
        self._built_in = ISO_TIMESTAMPS if values.postgres_timestamp == "iso" else BUILT_IN
        self._options = options
        self._server = PostgresSourceServer.from_dsn(
            config.dsn.get_secret_value(), f"deltaforge/{pipeline}"
        )
        self._patterns = TablePatterns(
            config.tables, unqualified="public", system=catalog.SYSTEM_SCHEMAS
        )
        self._outboxes = Globs(() if config.outbox is None else config.outbox.prefixes)
        self._slot = SlotReader(self._server, config, self._patterns, options, settings=self._facts)

    def __reduce__(self) -> tuple[type[PostgresSource], tuple[object, ...]]:
        """Pickle only the arguments: the copy is a new, unconnected source."""
        return PostgresSource, self._arguments

    def head(self) -> LsnPosition:
        """Return the end of the server's durable log, within 2 seconds.

        Logical decoding reads up to there. It moves even if no captured table changes.
        """
        with closing(self.log_ends(_HEAD_SECONDS)) as ends:
            return next(ends)

    def ensure_start(self, at: Position | None = None) -> LsnPosition:
        """Create publication and slot if they are missing; return where reading starts.

        With `start_position: earliest` that is the oldest change that the slot retains, with
        `latest` the current end of the log; for a new slot both are the same. An LSN must be within
        what the slot retains. `at` is an LSN that replaces `start_position`; if it is inside a
        transaction, reading starts before that transaction. `read` from the result yields every
        change that is committed after this call returns. Idempotent; takes at most 5 seconds.

        Raises:
            SourceMisconfigured: `wal_level`, a table or the publication is not as required.
            PermissionMissing: A grant is missing; the message has the statement.
            PositionLost: The slot does not retain the requested LSN, or the log ends before it.
            SourceUnavailable: No connection; try again.
            StartDelayed: Open transactions delay the slot; try again, or use `await_start`.
        """
        wanted = None if at is None else lsn_of(at)
        with self._server.query(_START_SECONDS) as connection:
            return slot_setup.ensure_start(
                connection,
                self._server,
                self._config,
                self._patterns,
                facts=self._facts(connection),
                failover=self._options.failover_slot,
                at=wanted,
            )

    def await_start(
        self, at: Position | None = None, *, waits: Callable[[str], None]
    ) -> LsnPosition:
        """Do what `ensure_start` does, but wait up to ten minutes for open transactions.

        See `AwaitableStart`.
        """
        config, server = self._config, self._server
        with server.query(_START_SECONDS) as connection:
            facts = self._facts(connection)
            slot = slot_setup.prepare(
                connection,
                server,
                config,
                self._patterns,
                facts=facts,
                at=None if at is None else lsn_of(at),
            )
        if slot is None or slot.confirmed_lsn is None:
            failover = self._options.failover_slot
            slot_setup.create_patiently(
                server, config.slot, failover=failover, version=facts.version, waits=waits
            )
        return self.ensure_start(at)

    def reset(self, *, dry_run: bool) -> list[str]:
        """Drop the slot if it was invalidated, or its log cannot be decoded with the publication.

        Raises:
            SourceUnavailable: No connection, or another process reads the slot.
            SourceMisconfigured: The slot has another plugin or database, so it is not ours.
        """
        config, server = self._config, self._server
        with server.query(_START_SECONDS) as connection:
            reason = slots.useless(connection, server, config.slot, config.publication)
            if reason is None:
                return []
            if not dry_run:
                slots.drop(connection, server, config.slot)
        return [f"replication slot {config.slot!r}, which {reason}"]

    def remove(self, *, spared: Collection[str], dry_run: bool) -> list[str]:
        """Drop the slot, and the publication if we created it; keep what is in `spared`.

        Raises:
            SourceUnavailable: No connection, or another process reads the slot.
            SourceMisconfigured: The slot has another plugin or database, so it is not ours.
            PermissionMissing: Our role may not drop the publication.
        """
        config, server = self._config, self._server
        dropped = []
        with server.query(_START_SECONDS) as connection:
            slot = catalog.slot(connection, config.slot)
            if slot is not None and config.slot not in spared:
                slots.check_owner(slot, server, config.slot)
                dropped.append(f"replication slot {config.slot!r}")
                if not dry_run:
                    slots.drop(connection, server, config.slot)
            coverage = publications.coverage(connection, config.publication, self._patterns)
            if coverage is not None and coverage.ours and config.publication not in spared:
                dropped.append(f"publication {config.publication!r}")
                if not dry_run:
                    publications.drop(connection, server, config.publication)
        return dropped

    def retained_log(self, captured: Position, confirmed: Position | None) -> RetainedLog:
        """Return the bytes between the positions and the end of the log, and what the slot retains.

        Raises:
            SourceUnavailable: No connection, or the server takes more than 2 seconds.
        """
        with self._server.query(_HEAD_SECONDS) as connection:
            flushed = self._facts(connection).flushed_lsn
            slot = catalog.slot(connection, self._config.slot)
            limit = slots.retention_limit(connection)
        restart = None if slot is None else slot.restart_lsn
        return RetainedLog(
            LsnPosition(flushed),
            max(0, flushed - lsn_of(captured)),
            None if confirmed is None else max(0, flushed - lsn_of(confirmed)),
            None if restart is None else max(0, flushed - restart),
            limit,
            limited_by=None if limit is None else slots.LIMIT,
        )

    def definitions(self, start: Position) -> dict[str, str]:  # noqa: ARG002 - needs no start
        """Return nothing: the log describes its tables itself."""
        return {}

    def has_changes(self, after: Position) -> bool:
        """Return whether it is worth starting a run that reads from `after`.

        True if a peek into the slot finds a change of a captured table that was committed after
        `after`. Also true if the peek takes longer than 2 seconds, if the slot is in use, or if
        more than 64 MiB of log are unread: a run then confirms them, so that the server can discard
        them.

        Raises:
            PositionLost: The slot does not exist or was invalidated.
        """
        config, server = self._config, self._server
        with server.query(_PEEK_SECONDS) as connection:
            facts = self._facts(connection)
            slot = slots.check(catalog.slot(connection, config.slot), server, config.slot)
            begin = max(lsn_of(after), slot.confirmed_lsn or 0)
            if facts.flushed_lsn <= begin:
                return False
            if facts.flushed_lsn - begin > slots.MAX_UNCONFIRMED_BYTES:
                return True
            try:
                return slots.has_changes(
                    connection,
                    slot=slot,
                    publication=config.publication,
                    name=config.slot,
                    after=lsn_of(after),
                    foreign=publications.foreign(connection, config.publication, self._patterns),
                    version=facts.version,
                )
            except (psycopg.errors.QueryCanceled, psycopg.errors.ObjectInUse):
                return True
            except psycopg.errors.UndefinedObject:
                raise publications.too_young(server, config.publication) from None

    def log_ends(self, seconds: float) -> Generator[LsnPosition]:
        """Yield the current end of the server's durable log; see `base.WatchableSource`.

        Writes to any database of the server, and the server's own records, move it.

        Raises:
            SourceUnavailable: No connection, or `seconds` have passed.
        """
        server = self._server
        with server.query(seconds) as connection:
            try:
                while True:
                    yield _flushed(connection)
            except psycopg.Error as error:
                if error.sqlstate not in FUNCTION_REFUSED:
                    raise
        with server.query(seconds, replication=True) as connection:
            while True:
                yield LsnPosition(identified(connection).flushed_lsn)

    def maintain(self, position: Position | None) -> list[Finding]:
        """Add matching tables to a publication that we created; return findings for missing ones.

        Raises:
            PositionLost: The publication or the slot does not exist, or the slot was invalidated or
                has moved beyond `position`.
            SourceMisconfigured: A setting of the server is wrong.
            SourceUnavailable: The server cannot be reached; try again.
        """
        config, server = self._config, self._server
        with server.query(_START_SECONDS) as connection:
            facts = self._facts(connection)
            slot = slots.check(catalog.slot(connection, config.slot), server, config.slot)
            if position is not None:
                slots.check_start(slot, server, config.slot, lsn_of(position), facts.flushed_lsn)
            publications.extend(connection, server, config.publication, self._patterns)
            coverage = publications.coverage(connection, config.publication, self._patterns)
            if coverage is None:
                raise publications.missing(server, config.publication)
            findings = publications.findings(connection, config.publication, coverage)
            if slot.unreserved:
                findings.append(slots.short_of_log(connection, config.slot))
            return findings

    def logged_tables(self) -> Mapping[str, LoggedTable]:
        """Return the tables that match and that the publication sends, by full name.

        Raises:
            SourceUnavailable: The server cannot be reached; try again.
        """
        with self._server.query(_START_SECONDS) as connection:
            return catalog.sent(connection, self._config.publication, self._patterns)

    def preflight(
        self,
        position: Position | None,
        as_of: float | None,  # noqa: ARG002 - a slot keeps log by size, not by age
        *,
        snapshot: bool = False,
    ) -> list[Finding]:
        """Check the server's settings and permissions for capture, as `Source.preflight` says.

        Raises:
            DeltaforgeError: The server cannot be reached.
        """
        assert position is None or isinstance(position, LsnPosition)
        with self._server.query(_OPEN_SECONDS) as connection:
            findings = preflight(
                connection,
                self._server,
                self._patterns,
                slot=self._config.slot,
                publication=self._config.publication,
                position=position,
                failover=self._options.failover_slot,
                needed_by=self._reader_of_tables(snapshot=snapshot),
            )
            version = connection.info.server_version
            if self._outboxes and version < MESSAGES_VERSION:
                findings.append(Finding("outbox", "error", _NO_MESSAGES))
            elif self._outboxes:
                findings.append(Finding("outbox", "ok", _ANYBODYS_MESSAGES))
            if self._options.heartbeat_seconds is not None:
                findings.append(heartbeat_right(connection, self._server))
            if not self._rules:
                return findings
            captured = catalog.captured(catalog.tables(connection), self._patterns)
            tables = {table.full_name: table for table in captured}
            return findings + self._rules.findings(
                tables,
                lambda name: identity.sent_schema(
                    connection, tables[name], self._config.publication, version
                ),
            )

    def read(
        self, start: Position, limits: ReadLimits, registry: SourceNotes
    ) -> Generator[ChangeBatch]:
        """Yield every transaction committed after `start`, complete and exactly once, in log order.

        `start` is the newest durable position, captured or confirmed: if the slot was confirmed
        beyond it, changes are lost. Server and decoder skip a transaction exactly if its commit
        record begins before `start`. A position is the end of a commit record, or a place between
        two records that the server reported. So no transaction is repeated or lost, even if the
        slot has not moved and the server sends everything again.

        The stream ends only with an error, with `close`, or when the generator is closed.

        Raises:
            PositionLost: The slot does not exist, was invalidated, or is confirmed beyond `start`.
            SourceUnavailable: The connection broke, or the slot is in use. Read again from the
                end of the last complete transaction.
            SourceMisconfigured: The publication does not send a table that the pipeline names.
            UnsupportedEvent: The log contains a message that this version does not decode.
        """
        assert isinstance(start, LsnPosition)
        stream = self._slot.open(start)
        unchanged_toast = self._unchanged_toast()
        server_catalog = catalog.PostgresCatalog(self._server.query)
        context = PostgresTableContext(
            self._server.database,
            registry,
            server_catalog,
            captures=self._patterns.matches,
            outboxes=self._outboxes,
            rules=self._rules,
            built_in=self._built_in,
            numbers=ColumnNumbers(server_catalog.columns, registry, start),
            fills=CatalogFills(self._server.query),
        )
        decoder = PostgresDecoder(
            context,
            source_id=self._config.id,
            start=start,
            unchanged_toast=unchanged_toast,
            holds=registry.holds(),
        )
        seconds = self._options.heartbeat_seconds
        heartbeat = None if seconds is None else Heartbeat(self._server, seconds)
        try:
            yield from self._slot.batches(stream, decoder, limits)
        finally:
            if heartbeat is not None:
                heartbeat.stop()
            if isinstance(unchanged_toast, Reselection):
                unchanged_toast.close()
            stream.close()

    def read_again(
        self, start: Position, limits: ReadLimits, registry: SourceNotes
    ) -> Iterator[ChangeBatch]:
        """Raise `NotAllowed`: a slot retains only the log that is not confirmed yet.

        Raises:
            NotAllowed: Always.
        """
        del start, limits, registry
        raise NotAllowed(
            "PostgreSQL's log cannot be captured again: the server gives it to a slot once, and "
            "forgets what was confirmed; only MySQL keeps its log for other readers"
        )

    def decode_parked(
        self, events: Iterator[bytes], fix: str, position: Position, registry: SourceNotes
    ) -> Iterator[pa.RecordBatch]:
        """Decode the parked events of one table; yield the changes that `read` would have yielded.

        Raises:
            UnsupportedEvent: The events still cannot be decoded.
        """
        fields = json.loads(fix)
        if "create_table" in fields:
            raise UnsupportedEvent(
                "PostgreSQL's log has the columns itself: release the table without --create-table"
            )
        unchanged_toast = self._unchanged_toast()
        server_catalog = catalog.PostgresCatalog(
            self._server.query, remade=bool(fields.get("catalog"))
        )
        context = PostgresTableContext(
            self._server.database,
            registry,
            server_catalog,
            captures=lambda _schema, _table: True,
            rules=self._rules,
            built_in=self._built_in,
            # Each parked change has its table's description with it.
            numbers=ColumnNumbers(functools.cache(server_catalog.columns), registry, position),
            fills=CatalogFills(self._server.query),
        )
        decoder = PostgresDecoder(
            context,
            source_id=self._config.id,
            start=LsnPosition(0),
            unchanged_toast=unchanged_toast,
        )
        try:
            yield from decoder.decode_parked(events)
        finally:
            if isinstance(unchanged_toast, Reselection):
                unchanged_toast.close()

    def confirm(self, position: Position) -> None:
        """Allow the server to discard its log up to `position`, with the next status message.

        A position that the stream has not reached yet is confirmed once it has.
        """
        self._slot.confirm(lsn_of(position))

    def close(self) -> None:
        """End the stream, after a last status message. The source cannot be used any more."""
        self._slot.close()

    def identity(self) -> str:
        """Return `system_identifier/timeline`."""
        with self._server.query(_START_SECONDS) as connection:
            self._facts(connection)
        return self._server.identify(_START_SECONDS).log

    def relocate(self, position: Position, previous: str) -> Position:
        """Return where reading continues after a promotion or on another cluster.

        See `connection.identity.relocate`.

        Raises:
            PositionLost: The log that was read is not part of this server's history, or the slot is
                missing or behind.
        """
        at = LsnPosition(lsn_of(position))
        with self._server.query(_OPEN_SECONDS) as connection:
            return identity.relocate(
                connection,
                self._server,
                self._config.slot,
                position=at,
                previous=previous,
                seconds=_START_SECONDS,
            )

    def tables(self) -> list[str]:
        """Return `schema.table` of every existing table that the patterns match."""
        with self._server.query(_OPEN_SECONDS) as connection:
            tables = catalog.captured(catalog.tables(connection), self._patterns)
        return [table.full_name for table in tables]

    def schema(self, table: str) -> TableSchema:
        """Return the current columns and key of a table (`schema.table`), under the column rules.

        Raises:
            SourceMisconfigured: There is no such table.
        """
        with self._server.query(_OPEN_SECONDS) as connection:
            return self._rules.visible(
                self._sent_schema(connection, self._publishable_table(connection, table))
            )

    def database(self) -> str:
        """Return the database in the DSN, which contains every table."""
        return self._server.database

    def details(self, table: str) -> TableDetails:
        """Return the properties of a table (`schema.table`) that are in the catalog, not the log.

        Raises:
            SourceMisconfigured: There is no such table.
        """
        with self._server.query(_START_SECONDS) as connection:
            publishable = self._publishable_table(connection, table)
            details = TableDetails(catalog.column_details(connection, publishable.oid))
            return self._rules.details(self._sent_schema(connection, publishable), details)

    def _publishable_table(
        self, connection: psycopg.Connection, table: str
    ) -> catalog.PublishableTable:
        for candidate in catalog.tables(connection):
            if candidate.full_name == table:
                return candidate
        raise SourceMisconfigured(f"{self._server.where}: there is no table {table}")

    def _sent_schema(
        self, connection: psycopg.Connection, table: catalog.PublishableTable
    ) -> TableSchema:
        version = connection.info.server_version
        return identity.sent_schema(connection, table, self._config.publication, version)

    def snapshots(self) -> PostgresSnapshots:
        """Return the object that plans and reads snapshots of the tables."""
        return PostgresSnapshots(
            server=self._server,
            source_id=self._config.id,
            slot=self._config.slot,
            publication=self._config.publication,
            patterns=self._patterns,
            rules=self._rules,
            built_in=self._built_in,
        )

    def _reader_of_tables(self, *, snapshot: bool) -> str | None:
        if self._values.toast == "reselect":
            return "engine.values.toast: reselect"
        return "the snapshot" if snapshot else None

    def _unchanged_toast(self) -> UnchangedToast:
        match self._values.toast:
            case "unchanged":
                return MARK
            case "omit":
                return OMIT
        return Reselection(self._server)

    def _facts(self, connection: psycopg.Connection) -> catalog.ServerSettings:
        facts, where = catalog.facts(connection, self._server), self._server.where
        if facts.standby:
            raise SourceUnavailable(
                f"{where}: this is a standby; changes are read from the primary"
            )
        if not facts.decodes:
            restart, remedy = after_restart(connection, "wal_level", "logical")
            raise SourceMisconfigured(
                f"{where}: wal_level is {facts.wal_level}; {restart}", remedy=remedy
            )
        if self._outboxes and facts.version < MESSAGES_VERSION:
            raise SourceMisconfigured(f"{where}: {_NO_MESSAGES}")
        return facts


def _flushed(connection: psycopg.Connection) -> LsnPosition:
    row = connection.execute("SELECT pg_current_wal_flush_lsn()::text").fetchone()
    assert row is not None
    return LsnPosition(parse_lsn(row[0]))
