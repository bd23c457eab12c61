"""Turso, libSQL and SQLite as a source: a change table, or new rows, polled at intervals.

No server streams a log: the source polls, yields the changes that it found, and polls again after
`poll_interval_ms`, or at once while there is more. A position belongs to a mode (`mode`); a
pipeline keeps the mode of its first position, even with `cdc_mode: auto`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from typing import TypeVar

import orjson
import pyarrow as pa

from deltaforge_dagster.config.columns import ColumnOptions
from deltaforge_dagster.errors import (
    CorruptLog,
    NotAllowed,
    Retryable,
    SourceMisconfigured,
    SourceUnavailable,
)
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import ChangeBatch, ReadLimits, RetainedLog, SourceNotes
from deltaforge_dagster.sources.findings import Finding
from deltaforge_dagster.sources.rows.arrays import with_tx_end
from deltaforge_dagster.sources.rows.columns import NO_RULES, ColumnRules
from deltaforge_dagster.sources.turso import native, polling, triggers
from deltaforge_dagster.sources.turso.changes import Batches, Part, Reading, Step, TursoChange
from deltaforge_dagster.sources.turso.connection import ResponseTooLarge, TursoSession, written
from deltaforge_dagster.sources.turso.mode import Way, Ways
from deltaforge_dagster.sources.turso.native import NativeLog
from deltaforge_dagster.sources.turso.position import TursoPosition
from deltaforge_dagster.sources.turso.preflight import preflight
from deltaforge_dagster.sources.turso.schema import (
    DB,
    Definition,
    captured,
    definition,
    statements,
)
from deltaforge_dagster.sources.turso.snapshot import TursoSnapshots
from deltaforge_dagster.sources.turso.source_type import DatabaseFile, TursoSourceConfig
from deltaforge_dagster.tables import LoggedTable, TableDetails, TableSchema

logger = logging.getLogger(__name__)

_HEAD_SECONDS = 2.0  # as `Source.head` promises
_START_SECONDS = 5.0  # as `Source.ensure_start` promises
_OPEN_SECONDS = 10.0
_TIDY_SECONDS = 0.2
"""How long deleting delivered changes may wait for the write lock; the next poll tries again."""

_Answer = TypeVar("_Answer")


class TursoSource:
    """One database; implements `sources.base.Source`.

    Args:
        config: `spec.source.config` of the pipeline file.
        columns: `spec.engine.columns`: the column rules.
    """

    def __init__(self, config: TursoSourceConfig, columns: ColumnOptions | None = None) -> None:
        self._arguments = (config, columns)
        self._config = config
        self._rules = NO_RULES if columns is None else ColumnRules(columns)
        self._ways = Ways(config)
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._confirmed: TursoPosition | None = None

    def __reduce__(self) -> tuple[type[TursoSource], tuple[object, ...]]:
        """Pickle only the arguments: the copy is a new source."""
        return TursoSource, self._arguments

    def head(self) -> TursoPosition:
        """Return the newest position, within 2 seconds."""
        way = self._ways.chosen(_HEAD_SECONDS)
        return self._query(way, way.log.newest, _HEAD_SECONDS)

    def ensure_start(self, at: Position | None = None) -> TursoPosition:
        """Return the position to start at; create change table and triggers if the file says so.

        Args:
            at: A position to start at, if the changes after it still exist; None to let the mode
                choose.

        Raises:
            PositionLost: Changes after `at` no longer exist.
            SourceMisconfigured: The database lacks what the mode needs.
        """
        if at is not None:
            position = _turso_position(at)
            way = self._way_of(position)
        else:
            way = self._ways.chosen(_START_SECONDS)
        self._make_triggers(way, _START_SECONDS)
        if at is None:
            return self._query(way, way.log.start, _START_SECONDS)
        self._query(way, lambda session: way.log.check(session, position), _START_SECONDS)
        return position

    def reset(self, *, dry_run: bool) -> list[str]:
        """Return an empty list: change table and triggers never become unusable."""
        del dry_run
        return []

    def remove(self, *, spared: Collection[str], dry_run: bool) -> list[str]:
        """Drop the triggers and the change table if the pipeline file says that we create them.

        Raises:
            SourceUnavailable: The database is locked or cannot be reached.
        """
        if not self._config.auto_create_triggers or triggers.TABLE in spared:
            return []
        with self._ways.of(triggers.MODE).database.session(
            _START_SECONDS, write=not dry_run
        ) as session:
            drops = triggers.made(session)
            if not dry_run:
                for statement in drops.values():
                    session.query(statement)
        return [
            f"{statement.split()[1].lower()} {name} of {self._ways.where}"
            for name, statement in drops.items()
        ]

    def definitions(self, start: Position) -> dict[str, str]:
        """Return the captured tables' definitions at a position; empty except in mode `native`."""
        position = _turso_position(start)
        log = self._way_of(position).log
        if not isinstance(log, NativeLog):
            return {}
        way = self._way_of(position)
        return self._query(way, lambda session: log.definitions(session, position), _START_SECONDS)

    def has_changes(self, after: Position) -> bool:
        """Return whether a captured table has changes after a position.

        Raises:
            PositionLost: Changes after it no longer exist.
        """
        position = _turso_position(after)
        way = self._way_of(position)
        self._make_triggers(way, _HEAD_SECONDS)
        try:
            return self._query(
                way, lambda session: way.log.has_changes(session, position), _HEAD_SECONDS
            )
        except ResponseTooLarge:
            return True  # there are many changes

    def log_ends(self, seconds: float) -> Generator[object]:  # noqa: ARG002 - no connection
        """Yield when a database's files were written, and their sizes; see `base.WatchableSource`.

        Yield nothing for a database on a server, where each query is a request that somebody pays
        for.
        """
        location = self._config.place
        if isinstance(location, DatabaseFile):
            while True:
                yield written(location.path)

    def logged_tables(self) -> Mapping[str, LoggedTable]:
        """Return the captured tables that have triggers; none in other modes, which cannot tell.

        Raises:
            SourceUnavailable: The database is locked or cannot be reached.
        """
        way = self._ways.chosen(_HEAD_SECONDS)
        if way.mode != triggers.MODE:
            return {}
        return self._query(
            way,
            lambda session: triggers.logged_tables(session, captured(session, self._ways.captures)),
            _HEAD_SECONDS,
        )

    def retained_log(self, captured: Position, confirmed: Position | None) -> RetainedLog | None:
        """Return about how many bytes of the change table are after the positions.

        None in mode `polling`, which has no such table, and in mode `native` of a file, which only
        one process may open.

        Raises:
            DeltaforgeError: The database cannot be reached.
        """
        at = _turso_position(captured)
        way = self._way_of(at)
        log = way.log
        is_file = isinstance(self._config.place, DatabaseFile)
        if isinstance(log, polling.PollingLog) or (isinstance(log, NativeLog) and is_file):
            return None
        end, size = self._query(
            way, lambda session: (log.newest(session), log.change_bytes(session)), _HEAD_SECONDS
        )

        def after(position: TursoPosition) -> int:
            return round(size * max(0, (end.last_change_id or 0) - (position.last_change_id or 0)))

        return RetainedLog(
            end, after(at), None if confirmed is None else after(_turso_position(confirmed))
        )

    def maintain(self, position: Position | None) -> list[Finding]:
        """Create missing triggers if the file says so; return findings on changes not captured.

        Raises:
            DeltaforgeError: The database cannot be reached, or the pipeline file names another mode
                than the position has.
        """
        at = None if position is None else _turso_position(position)
        way = self._ways.chosen(_HEAD_SECONDS) if at is None else self._way_of(at)
        if way.mode == native.MODE:
            return []  # nothing needs maintenance, and only one process may open a file
        self._make_triggers(way, _HEAD_SECONDS)
        findings = preflight(way, self._ways, self._config, self._rules, at)
        return [
            finding
            for finding in findings
            if finding.level == "error" or (finding.bad and finding.subject == "tables")
        ]

    def preflight(
        self,
        position: Position | None,
        as_of: float | None,  # noqa: ARG002 - changes are kept by confirmation, not by age
        *,
        snapshot: bool = False,  # noqa: ARG002 - who may read a database may read all of it
    ) -> list[Finding]:
        """Check the database for capture, without changing anything, as `Source.preflight` says."""
        at = None if position is None else _turso_position(position)
        way = self._ways.chosen(_OPEN_SECONDS) if at is None else self._way_of(at)
        return preflight(way, self._ways, self._config, self._rules, at)

    def read(
        self, start: Position, limits: ReadLimits, registry: SourceNotes
    ) -> Generator[ChangeBatch]:
        """Yield every change after `start`, in the database's order, until the generator is closed.

        Raises:
            PositionLost: Changes after `start` no longer exist.
            SourceUnavailable: The database is locked or cannot be reached, or the source was
                closed. Read again from the end of the last complete transaction.
            SourceMisconfigured: The pipeline file names another mode than the position has.
        """
        position = _turso_position(start)
        yield from self._changes(self._way_of(position), position, limits, registry, tidy=True)

    def read_again(
        self, start: Position, limits: ReadLimits, registry: SourceNotes
    ) -> Iterator[ChangeBatch]:
        """Yield what `read` yields, in mode `native`, whose change table retains captured changes.

        Raises:
            NotAllowed: In the other modes, captured changes cannot be read again.
        """
        position = _turso_position(start)
        way = self._way_of(position)
        if not isinstance(way.log, NativeLog):
            raise NotAllowed(
                f"mode {way.mode} cannot capture again: "
                + (
                    "changes are deleted once every sink has them"
                    if way.mode == triggers.MODE
                    else "rows show what they are now, not what they were"
                )
            )
        yield from self._changes(way, position, limits, registry, tidy=False)

    def decode_parked(
        self, events: Iterator[bytes], fix: str, position: Position, registry: SourceNotes
    ) -> Iterator[pa.RecordBatch]:
        """Decode the parked events of one table; yield the changes that `read` would have yielded.

        Raises:
            UnsupportedEvent: The events still cannot be decoded.
        """
        at = _turso_position(position)
        log = self._way_of(at).log
        create_table = orjson.loads(fix).get("create_table")
        batches = Batches(self._config.id, self._rules, registry)
        for data in events:
            match log:
                case NativeLog():
                    change: TursoChange = log.parked(data, create_table)
                case triggers.TriggerLog():
                    change = log.parked(data)
                case _:
                    change = polling.parked(data)
            yield with_tx_end(batches.batch([change], at))

    def confirm(self, position: Position) -> None:
        """Allow deleting changes up to `position`; in mode `triggers` the reader deletes them."""
        with self._lock:
            self._confirmed = _turso_position(position)

    def close(self) -> None:
        """End reading. The source cannot be used any more."""
        self._closed.set()
        self._ways.close()

    def identity(self) -> str:
        """Return the file or URL, because a database itself has no identifier."""
        return self._ways.where

    def relocate(self, position: Position, previous: str) -> Position:
        """Return where reading continues if the file or URL has changed: at the same position.

        Checks that the database contains the position. In mode `polling` that cannot be verified.

        Raises:
            PositionLost: The database does not contain the position's change.
        """
        at = _turso_position(position)
        way = self._way_of(at)
        self._query(way, lambda session: way.log.check(session, at), _OPEN_SECONDS)
        logger.warning("%s: read on from %s, as in %s", self._ways.where, at.to_json(), previous)
        return at

    def tables(self) -> list[str]:
        """Return `main.table` of every existing table that the patterns match."""
        way = self._ways.chosen(_OPEN_SECONDS)
        tables = self._query(
            way, lambda session: captured(session, self._ways.captures), _OPEN_SECONDS
        )
        return [table.table.full_name for table in tables.values()]

    def schema(self, table: str) -> TableSchema:
        """Return the current columns and key of a table (`main.table`), under the column rules.

        Raises:
            SourceMisconfigured: There is no such table.
        """
        return self._rules.visible(self._definition(table, _OPEN_SECONDS).table)

    def database(self) -> None:
        """Return None: full names of tables include the database, `main`."""

    def details(self, table: str) -> TableDetails:
        """Return the properties of a table (`main.table`) that are only in its `CREATE TABLE`.

        Raises:
            SourceMisconfigured: There is no such table.
        """
        current = self._definition(table, _START_SECONDS)
        return self._rules.details(current.table, current.details)

    def _definition(self, table: str, seconds: float) -> Definition:
        way = self._ways.chosen(seconds)
        sql = self._query(way, statements, seconds).get(table.removeprefix(f"{DB}."))
        if sql is None:
            raise SourceMisconfigured(f"{self._ways.where}: there is no table {table}")
        return definition(sql)

    def snapshots(self) -> TursoSnapshots:
        """Return the object that plans and reads snapshots of the tables."""
        return TursoSnapshots(self._config, self._rules)

    def _way_of(self, position: TursoPosition) -> Way:
        """Return the mode that a position belongs to, with its database and log.

        Raises:
            SourceMisconfigured: The pipeline file names another mode.
        """
        mode = self._config.cdc_mode
        if mode not in {"auto", position.mode}:
            raise SourceMisconfigured(
                f"{self._ways.where}: the pipeline has been captured in mode {position.mode},"
                f" whose positions mean nothing in mode {mode}: set source.config.cdc_mode to"
                f" {position.mode}, or begin a new pipeline"
            )
        return self._ways.of(position.mode)

    @staticmethod
    def _query(way: Way, question: Callable[[TursoSession], _Answer], seconds: float) -> _Answer:
        with way.database.session(seconds) as session:
            return question(session)

    def _make_triggers(self, way: Way, seconds: float) -> None:
        """Create or update change table and triggers, if the pipeline file says so."""
        if way.mode != triggers.MODE or not self._config.auto_create_triggers:
            return
        # Usually nothing is missing: look without the write lock first.
        with way.database.session(seconds) as session:
            if triggers.is_complete(session, captured(session, self._ways.captures)):
                return
        with way.database.session(seconds, write=True) as session:
            triggers.make(session, captured(session, self._ways.captures))

    def _changes(
        self,
        way: Way,
        start: TursoPosition,
        limits: ReadLimits,
        registry: SourceNotes,
        *,
        tidy: bool,
    ) -> Generator[ChangeBatch]:
        reading = way.log.reading(start, registry)
        batches = Batches(self._config.id, self._rules, registry)
        page = min(self._config.batch_size, limits.max_events)
        deleted: TursoPosition | None = None
        while True:
            self._refuse_closed()
            self._make_triggers(way, _OPEN_SECONDS)
            step, page = self._step(way, reading, page)
            for part in step.parts:
                yield from _batch(batches, part).split(limits.max_events)
            if not step.parts:
                yield ChangeBatch(None, None, step.read_bytes)
            if tidy:
                deleted = self._delete(way, deleted)
            if not step.more:
                yield from self._wait(limits.max_wait)

    def _step(self, way: Way, reading: Reading, page: int) -> tuple[Step, int]:
        """Poll once; return the step and the page size, smaller if the server refused an answer."""
        while True:
            try:
                with way.database.session(_OPEN_SECONDS) as session:
                    return reading.step(session, page), page
            except ResponseTooLarge:
                if page == 1:
                    raise
                page = max(page // 4, 1)

    def _wait(self, max_wait: float) -> Iterator[ChangeBatch]:
        """Wait until the next poll is due; yield an empty batch every `max_wait` seconds."""
        until = time.monotonic() + self._config.poll_interval_ms / 1000
        while (left := until - time.monotonic()) > 0:
            self._closed.wait(min(left, max_wait))
            self._refuse_closed()
            yield ChangeBatch(None, None)

    def _refuse_closed(self) -> None:
        if self._closed.is_set():
            raise SourceUnavailable(f"{self._ways.where}: the source was closed")

    def _delete(self, way: Way, deleted: TursoPosition | None) -> TursoPosition | None:
        """Delete the changes that were confirmed since the last call.

        Returns:
            The position up to which changes are deleted; None as long as it is not known.
        """
        with self._lock:
            confirmed = self._confirmed
        if way.mode != triggers.MODE or confirmed is None:
            return deleted
        if deleted is not None and confirmed <= deleted:
            return deleted
        try:
            with way.database.session(_TIDY_SECONDS, write=True) as session:
                triggers.forget(session, confirmed)
        except Retryable:
            return deleted  # another connection has the write lock
        return confirmed


def _batch(batches: Batches, part: Part) -> ChangeBatch:
    rows = batches.batch(part.changes, part.reached) if part.changes else None
    size = 0 if rows is None else rows.nbytes
    return ChangeBatch(rows, part.end, size, part.parked)


def _turso_position(position: Position) -> TursoPosition:
    if not isinstance(position, TursoPosition):
        raise CorruptLog(f"not a position of Turso or SQLite: {position.to_json()}")
    return position
