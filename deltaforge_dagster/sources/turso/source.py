"""Turso, libSQL and SQLite as a source: a table of changes, or new rows, read at intervals.

There is no log that a server sends: a reading looks, hands on what it has found, and looks again after
`poll_interval_ms`, or at once while there is more. A position belongs to a mode (`modes.mode`); the mode of a
pipeline's first position stays, also under `cdc_mode: auto`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import TypeVar

import orjson
import pyarrow as pa

from deltaforge_dagster.config.engine.columns import ColumnOptions
from deltaforge_dagster.errors import (
    CorruptLog,
    NotAllowed,
    Retryable,
    SourceMisconfigured,
    SourceUnavailable,
)
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import ChangeBatch, ReadLimits, SourceNotes
from deltaforge_dagster.sources.findings import Finding
from deltaforge_dagster.sources.rows.arrays import with_tx_end
from deltaforge_dagster.sources.rows.columns import NO_RULES, ColumnRules
from deltaforge_dagster.sources.turso.config import DatabaseFile, TursoSourceConfig
from deltaforge_dagster.sources.turso.connection.files import written
from deltaforge_dagster.sources.turso.connection.hrana import ResponseTooLarge
from deltaforge_dagster.sources.turso.connection.sessions import TursoSession
from deltaforge_dagster.sources.turso.decode.changes import Batches, TursoChange
from deltaforge_dagster.sources.turso.modes import native, polling, triggers
from deltaforge_dagster.sources.turso.modes.mode import Way, Ways
from deltaforge_dagster.sources.turso.modes.native import NativeLog
from deltaforge_dagster.sources.turso.modes.readings import Part, Reading, Step
from deltaforge_dagster.sources.turso.position import TursoPosition
from deltaforge_dagster.sources.turso.preflight import preflight
from deltaforge_dagster.sources.turso.schema.definitions import (
    DB,
    Definition,
    captured,
    definition,
    statements,
)
from deltaforge_dagster.sources.turso.snapshot import TursoSnapshots
from deltaforge_dagster.tables import TableDetails, TableSchema

logger = logging.getLogger(__name__)

_HEAD_SECONDS = 2.0
_START_SECONDS = 5.0
_OPEN_SECONDS = 10.0
_TIDY_SECONDS = 0.2
"""How long deleting what every sink has may wait: it is tried again with the next look."""

_Answer = TypeVar("_Answer")


class TursoSource:
    """One database, as `sources.base.Source` promises.

    Args:
        config: `spec.source.config` of the pipeline file.
        columns: `spec.engine.columns`: what is hidden of rows.
    """

    def __init__(self, config: TursoSourceConfig, columns: ColumnOptions | None = None) -> None:
        self._made_of = (config, columns)
        self._config = config
        self._rules = NO_RULES if columns is None else ColumnRules(columns)
        self._ways = Ways(config)
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._confirmed: TursoPosition | None = None

    def __reduce__(self) -> tuple[type[TursoSource], tuple[object, ...]]:
        """Pickle only the arguments: the copy is a new source."""
        return TursoSource, self._made_of

    def head(self) -> TursoPosition:
        """Return the newest position now, within 2 seconds."""
        way = self._ways.chosen(_HEAD_SECONDS)
        return self._ask(way, way.log.newest, _HEAD_SECONDS)

    def ensure_start(self, at: Position | None = None) -> TursoPosition:
        """Return the position to start at; create the change table and triggers if the file says so.

        Args:
            at: A position to start at, if its changes are still there; None to let the mode choose.

        Raises:
            PositionLost: Changes after `at` are no longer there.
            SourceMisconfigured: The database lacks what the mode needs.
        """
        if at is not None:
            position = _own(at)
            way = self._of(position)
        else:
            way = self._ways.chosen(_START_SECONDS)
        self._make_triggers(way, _START_SECONDS)
        if at is None:
            return self._ask(way, way.log.start, _START_SECONDS)
        self._ask(way, lambda session: way.log.check(session, position), _START_SECONDS)
        return position

    def reset(self, *, dry_run: bool) -> list[str]:
        """Return nothing: a table of changes, and triggers, can be read from as long as they are there."""
        del dry_run
        return []

    def definitions(self, start: Position) -> dict[str, str]:
        """Return how tables were defined at a start position, in mode `native`."""
        position = _own(start)
        log = self._of(position).log
        if not isinstance(log, NativeLog):
            return {}
        way = self._of(position)
        return self._ask(way, lambda session: log.definitions(session, position), _START_SECONDS)

    def has_changes(self, after: Position) -> bool:
        """Say whether a captured table changed after a position.

        Raises:
            PositionLost: What follows it is no longer there.
        """
        position = _own(after)
        way = self._of(position)
        self._make_triggers(way, _HEAD_SECONDS)
        try:
            return self._ask(
                way, lambda session: way.log.has_changes(session, position), _HEAD_SECONDS
            )
        except ResponseTooLarge:
            return True  # there is much

    def log_ends(self, seconds: float) -> Generator[object]:  # noqa: ARG002 - no connection
        """Yield when a database's files were written, and their sizes; see `base.WatchableSource`.

        Nothing of a database on a server: there each question is a request that somebody pays for.
        """
        place = self._config.place
        if isinstance(place, DatabaseFile):
            while True:
                yield written(place.path)

    def maintain(self, position: Position | None) -> list[Finding]:
        """Return what keeps changes from being found, after making triggers where the file says so.

        Raises:
            DeltaforgeError: The database cannot be asked, or another mode was configured.
        """
        at = None if position is None else _own(position)
        way = self._ways.chosen(_HEAD_SECONDS) if at is None else self._of(at)
        if way.mode == native.MODE:
            return []  # one process at a time may open a file, and nothing in it decides what is seen
        self._make_triggers(way, _HEAD_SECONDS)
        found = preflight(way, self._ways, self._config, self._rules, at)
        return [
            one for one in found if one.level == "error" or (one.bad and one.subject == "tables")
        ]

    def preflight(
        self,
        position: Position | None,
        as_of: float | None,  # noqa: ARG002 - changes are kept by confirmation, not by age
        *,
        snapshot: bool = False,  # noqa: ARG002 - who may read a database may read all of it
    ) -> list[Finding]:
        """Return what is, and is not, as capture needs it, changing nothing."""
        at = None if position is None else _own(position)
        way = self._ways.chosen(_OPEN_SECONDS) if at is None else self._of(at)
        return preflight(way, self._ways, self._config, self._rules, at)

    def read(
        self, start: Position, limits: ReadLimits, registry: SourceNotes
    ) -> Generator[ChangeBatch]:
        """Yield every change after `start`, in the database's order, until closed.

        Raises:
            PositionLost: What follows `start` is no longer there.
            SourceUnavailable: The database is locked or cannot be reached, or the source was closed: read
                again from the end of the last whole transaction.
            SourceMisconfigured: The mode of the pipeline file is another one.
        """
        position = _own(start)
        yield from self._changes(self._of(position), position, limits, registry, tidy=True)

    def read_again(
        self, start: Position, limits: ReadLimits, registry: SourceNotes
    ) -> Iterator[ChangeBatch]:
        """Yield what `read` would, in mode `native`, whose table keeps what was captured.

        Raises:
            NotAllowed: In the other modes it is gone.
        """
        position = _own(start)
        way = self._of(position)
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

    def decode_held(
        self, events: Iterator[bytes], fix: str, position: Position, registry: SourceNotes
    ) -> Iterator[pa.RecordBatch]:
        """Yield the changes of held events of one table, as if they had never been held.

        Raises:
            UnsupportedEvent: It is still not certain what they mean.
        """
        at = _own(position)
        log = self._of(at).log
        create_table = orjson.loads(fix).get("create_table")
        batches = Batches(self._config.id, self._rules, registry)
        for data in events:
            match log:
                case NativeLog():
                    change: TursoChange = log.held(data, create_table)
                case triggers.TriggerLog():
                    change = log.held(data)
                case _:
                    change = polling.held(data)
            yield with_tx_end(batches.batch([change], at))

    def confirm(self, position: Position) -> None:
        """Let go of changes up to `position`: in mode `triggers` the reader deletes them soon."""
        with self._lock:
            self._confirmed = _own(position)

    def close(self) -> None:
        """End the reading; final."""
        self._closed.set()
        self._ways.close()

    def identity(self) -> str:
        """Return the file or URL: nothing in a database says which one it is."""
        return self._ways.where

    def relocate(self, position: Position, previous: str) -> Position:
        """Return where reading goes on in another file or on another server: where it was.

        In mode `polling` nothing tells whether it is the same database.

        Raises:
            PositionLost: The change of the position is not there.
        """
        at = _own(position)
        way = self._of(at)
        self._ask(way, lambda session: way.log.check(session, at), _OPEN_SECONDS)
        logger.warning("%s: read on from %s, as in %s", self._ways.where, at.to_json(), previous)
        return at

    def tables(self) -> list[str]:
        """Return `main.table` of every table that the patterns match now."""
        way = self._ways.chosen(_OPEN_SECONDS)
        found = self._ask(
            way, lambda session: captured(session, self._ways.captures), _OPEN_SECONDS
        )
        return [one.table.full_name for one in found.values()]

    def schema(self, table: str) -> TableSchema:
        """Return a table (`main.table`) as its rows show it now.

        Raises:
            SourceMisconfigured: There is no such table.
        """
        return self._rules.visible(self._definition(table, _OPEN_SECONDS).table)

    def database(self) -> None:
        """Return nothing: full names of tables begin with `main`."""

    def details(self, table: str) -> TableDetails:
        """Return what a table's statement (`main.table`) says and rows do not.

        Raises:
            SourceMisconfigured: There is no such table.
        """
        found = self._definition(table, _START_SECONDS)
        return self._rules.details(found.table, found.details)

    def _definition(self, table: str, seconds: float) -> Definition:
        way = self._ways.chosen(seconds)
        found = self._ask(way, statements, seconds).get(table.removeprefix(f"{DB}."))
        if found is None:
            raise SourceMisconfigured(f"{self._ways.where}: there is no table {table}")
        return definition(found)

    def snapshots(self) -> TursoSnapshots:
        """Return what reads the tables themselves."""
        return TursoSnapshots(self._config, self._rules)

    def _of(self, position: TursoPosition) -> Way:
        """Return the way that a position belongs to.

        Raises:
            SourceMisconfigured: The pipeline file names another.
        """
        mode = self._config.cdc_mode
        if mode not in {"auto", position.mode}:
            raise SourceMisconfigured(
                f"{self._ways.where}: the pipeline has been captured in mode {position.mode}, whose positions"
                f" mean nothing in mode {mode}: set source.config.cdc_mode to {position.mode}, or begin a"
                " new pipeline"
            )
        return self._ways.of(position.mode)

    @staticmethod
    def _ask(way: Way, question: Callable[[TursoSession], _Answer], seconds: float) -> _Answer:
        with way.database.session(seconds) as session:
            return question(session)

    def _make_triggers(self, way: Way, seconds: float) -> None:
        """Make table and triggers, if the file says so and they are not there as they have to be."""
        if way.mode != triggers.MODE or not self._config.auto_create_triggers:
            return
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
        deleted = start
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
        """Look once; with fewer rows at a time where a server gives no answer that large."""
        while True:
            try:
                with way.database.session(_OPEN_SECONDS) as session:
                    return reading.step(session, page), page
            except ResponseTooLarge:
                if page == 1:
                    raise
                page = max(page // 4, 1)

    def _wait(self, max_wait: float) -> Iterator[ChangeBatch]:
        """Wait until it is time to look again, with an empty batch each `max_wait` seconds."""
        until = time.monotonic() + self._config.poll_interval_ms / 1000
        while (left := until - time.monotonic()) > 0:
            self._closed.wait(min(left, max_wait))
            self._refuse_closed()
            yield ChangeBatch(None, None)

    def _refuse_closed(self) -> None:
        if self._closed.is_set():
            raise SourceUnavailable(f"{self._ways.where}: the source was closed")

    def _delete(self, way: Way, deleted: TursoPosition) -> TursoPosition:
        """Delete what was confirmed since the last time; return up to where."""
        with self._lock:
            confirmed = self._confirmed
        if way.mode != triggers.MODE or confirmed is None or confirmed <= deleted:
            return deleted
        try:
            with way.database.session(_TIDY_SECONDS, write=True) as session:
                triggers.forget(session, confirmed)
        except Retryable:
            return deleted  # somebody else writes now
        return confirmed


def _batch(batches: Batches, part: Part) -> ChangeBatch:
    rows = batches.batch(part.changes, part.reached) if part.changes else None
    size = 0 if rows is None else rows.nbytes
    return ChangeBatch(rows, part.end, size, part.held)


def _own(position: Position) -> TursoPosition:
    if not isinstance(position, TursoPosition):
        raise CorruptLog(f"not a position of Turso or SQLite: {position.to_json()}")
    return position
