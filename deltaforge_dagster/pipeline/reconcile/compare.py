"""Compares the tables of sinks with the source.

A window is compared at once. If anything differs, that proves nothing yet, because the sink may
lack what the read saw: the comparison waits until the sink's table certainly has it
(`journal_reach`), and compares again. By then the table may also have changes that the read did not
see; the journal has them, and they are applied to the window's rows (`expected`). So a difference
that remains is one, whatever was written meanwhile.

Rows that only the sink has are searched for after the last window: they are the rows whose keys no
window had, and that no change since has added.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.errors import (
    DeltaforgeError,
    JournalDamaged,
    NotAllowed,
    Retryable,
    SinkUnavailable,
    SparkUnavailable,
    TableRejected,
)
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.backoff import Backoff
from deltaforge_dagster.pipeline.lake.comparer import LakeComparer
from deltaforge_dagster.pipeline.reconcile.expected import ExpectedRows, SourceWindow, table_of
from deltaforge_dagster.pipeline.reconcile.journal_reach import JournalReach
from deltaforge_dagster.pipeline.reconcile.obstacles import obstacle
from deltaforge_dagster.pipeline.reconcile.reports import TableReport
from deltaforge_dagster.pipeline.run_context import SessionProvider
from deltaforge_dagster.pipeline.snapshots.read import first_not_visible
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sinks.lake.config import LakeSinkConfig
from deltaforge_dagster.sinks.registry import LakeSinkType, TableSinkType, sink_types
from deltaforge_dagster.sinks.tables.comparer import ComparedRows, ComparedView, TableComparer
from deltaforge_dagster.sinks.tables.config import TableSinkConfig
from deltaforge_dagster.sinks.tables.staged import StagedCommit
from deltaforge_dagster.sinks.tables.writer import TableOwner
from deltaforge_dagster.sources.base import Source
from deltaforge_dagster.sources.snapshot import Chunk, ChunkReader, SnapshotSource
from deltaforge_dagster.state.reconciliations import TableProof
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.state.table_commits import TableCommits
from deltaforge_dagster.tables import TableSchema

_ATTEMPTS = 5
"""How often a window is read before its table counts as not comparable."""
_PATIENCE = 120.0
"""Seconds to wait for a sink that does not move."""
_CLAIM_SECONDS = 900.0
"""How long a table stays claimed after the last window of a process that has died."""
_REPAIRS = 20
"""How often a repair is attempted that comes after another commit each time."""
_SETTLEMENTS = 50
"""How often rows are compared that differ while a commit is under way."""
_BUSY = (
    "rows differ, but a commit came in between each time; try again while less is written, or with "
    "a larger commit_seconds of the sink"
)
_POLL_SECONDS = 0.2
_RATED_SECONDS = 30.0
"""How long a window takes at most at a given rate: it is read at once, and then nothing is."""
_WATERMARK_SECONDS = 30.0  # with an older one, reads look further back in the journal


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """What to compare, and how fast.

    Attributes:
        sink: The sink; None for all that keep tables.
        table: Full name of a table of the source; None for all that were captured.
        sample: Which part of the windows is compared, from 0 to 1.
        deadline: When to begin no further window, by the monotonic clock; None for never.
        rate: How many rows a second are read at most; None for any number.
        repair: Whether rows that differ are made what they should be.
        window_rows: How many rows a window should have; None for what suits the sink.
        patience: Seconds to wait for a sink that does not move.
    """

    sink: str | None = None
    table: str | None = None
    sample: float = 1.0
    deadline: float | None = None
    rate: float | None = None
    repair: bool = False
    window_rows: int | None = None
    patience: float = _PATIENCE


@dataclass(frozen=True, slots=True)
class TableComparison:
    """Compares the tables of one pipeline.

    Attributes:
        loaded: The pipeline file.
        store: The state store.
        journal: The journal.
        source: The pipeline's source.
        sessions: Lends a Spark session, for tables that Spark reads.
        options: What to compare.
    """

    loaded: LoadedPipeline
    store: StateStore
    journal: Journal
    source: Source
    sessions: Callable[[], AbstractContextManager[SessionProvider]]
    options: CompareOptions = CompareOptions()

    def execute(self) -> Iterator[TableReport]:
        """Compare one table after the other; yield the report of each.

        A table that cannot be compared has a report that says why; the others go on.

        Raises:
            NotAllowed: There is no such sink or table, or no sink keeps tables.
            StoreUnavailable: The state store cannot be reached.
            SourceUnavailable: The source cannot be reached.
        """
        tables, uncaptured = self._tables()
        for config, kind in self._sinks():
            for table in tables:
                yield self._report(config, kind, table)
            for name in uncaptured:
                problem = "nothing of it was captured yet, neither a change nor a snapshot"
                yield TableReport(config.id, name, (), problem=problem)

    def repair(self, report: TableReport) -> tuple[TableReport, TableReport]:
        """Repair a table that differs, and compare it again.

        Returns:
            What was repaired, and how the table is now.
        """
        only = replace(self.options, sink=report.sink, table=report.table)
        (repaired,) = replace(self, options=replace(only, repair=True)).execute()
        (now,) = replace(self, options=only).execute()
        return repaired, now

    def _report(
        self, config: TableSinkConfig, kind: TableSinkType[TableSinkConfig], table: TableSchema
    ) -> TableReport:
        report = TableReport(config.id, table.full_name, ())
        try:
            report.destination = config.name_of(table.db, table.schema, table.table)
            with self._claimed(report) as prolong:
                self._compare(config, kind, table, report, prolong)
        except DeltaforgeError as error:
            report.problem = str(error)
        return report

    def _compare(
        self,
        config: TableSinkConfig,
        kind: TableSinkType[TableSinkConfig],
        table: TableSchema,
        report: TableReport,
        prolong: Callable[[], None],
    ) -> None:
        loaded, source = self.loaded, self.source
        problem = obstacle(self.store, loaded.spec, config, source, table)
        if problem is not None:
            raise NotAllowed(problem)
        assert isinstance(source, SnapshotSource)
        commits = self.store.table_commits.read(loaded.name, config.id)
        assert commits is not None
        destination = tuple(report.destination)
        owner = TableOwner(commits.front.owner, loaded.name, config.id)
        comparer = self._comparer(kind, config, owner, destination)
        expected = ExpectedRows(
            loaded.spec,
            config,
            kind.column_types(),
            self.store,
            self.journal,
            table.full_name,
            destination,
        )
        try:
            comparison = _TableComparison(self, source, expected, comparer, report)
            comparison.execute(prolong)
        finally:
            comparer.close()
        if report.whole and not report.differs and report.position is not None:
            proof = TableProof(
                config.id, table.full_name, report.position, self.store.now(), report.rows
            )
            self.store.reconciliations.prove(loaded.name, proof)

    def _comparer(
        self,
        kind: TableSinkType[TableSinkConfig],
        config: TableSinkConfig,
        owner: TableOwner,
        destination: tuple[str, ...],
    ) -> TableComparer:
        if isinstance(kind, LakeSinkType):
            assert isinstance(config, LakeSinkConfig)
            dialect = kind.dialect(config)
            return LakeComparer(self.sessions, dialect, config, owner, destination)
        return kind.build_comparer(config, owner, destination)

    @contextlib.contextmanager
    def _claimed(self, report: TableReport) -> Iterator[Callable[[], None]]:
        """Claim a table; provide what prolongs the claim."""
        holder, name, claims = uuid.uuid4().hex, self.loaded.name, self.store.reconciliations

        def claim() -> None:
            if not claims.claim(name, report.sink, report.table, holder, _CLAIM_SECONDS):
                raise NotAllowed("another comparison of it is under way")

        claim()
        compared = False
        try:
            yield claim
            compared = report.whole
        except (NotAllowed, TableRejected):
            compared = True  # as far as it can be
            raise
        finally:
            claims.release(name, report.sink, report.table, holder, compared=compared)

    def _sinks(self) -> list[tuple[TableSinkConfig, TableSinkType[TableSinkConfig]]]:
        """Return the chosen sinks that keep tables."""
        name, chosen = self.loaded.name, self.options.sink
        blocks = {block.config.id: block for block in self.loaded.spec.spec.sinks}
        if chosen is not None and chosen not in blocks:
            raise NotAllowed(
                f"pipeline {name!r} has no sink {chosen!r} (there is: {', '.join(blocks)})"
            )
        sinks = []
        for block in blocks.values():
            kind, config = sink_types()[block.type], block.config
            if chosen not in {None, config.id}:
                continue
            if isinstance(kind, TableSinkType) and isinstance(config, TableSinkConfig):
                sinks.append((config, kind))
            elif chosen is not None:
                raise NotAllowed(
                    f"sink {chosen!r} keeps no tables, so there is nothing to compare with; "
                    f"deltaforge verify {name} checks what was captured"
                )
        if not sinks:
            raise NotAllowed(f"no sink of pipeline {name!r} keeps tables")
        return sinks

    def _tables(self) -> tuple[list[TableSchema], list[str]]:
        """Return the present version of each chosen table, and tables without any version."""
        histories = self.store.schemas.histories(self.loaded.name)
        tables = {history.name: history.current.table for history in histories}
        chosen = self.options.table
        existing = set(self.source.tables())
        if chosen is None:
            return [tables[name] for name in sorted(tables)], sorted(existing - tables.keys())
        if chosen not in existing | tables.keys():
            raise NotAllowed(
                f"pipeline {self.loaded.name!r} captures no table {chosen!r}; write full names, "
                "such as public.orders"
            )
        return ([tables[chosen]], []) if chosen in tables else ([], [chosen])


class _RowsMoved(Retryable):
    """Rows of other windows got keys of this one, and the log does not have all of their values."""


class _TableComparison:
    """Compares one table of a sink."""

    def __init__(
        self,
        comparison: TableComparison,
        source: SnapshotSource,
        expected: ExpectedRows,
        comparer: TableComparer,
        report: TableReport,
    ) -> None:
        self._name = comparison.loaded.name
        self._store = comparison.store
        self._options = comparison.options
        self._snapshots = source.snapshots()
        self._reach = JournalReach(comparison.store, self._name, source)
        self._expected = expected
        self._comparer = comparer
        self._report = report
        self._watermark = ""
        self._marked_at = float("-inf")
        self._first: int | None = None
        self._last_read: tuple[Position, float] | None = None
        self._kept: list[StagedCommit] = []
        self._moved = False  # whether changes of the last view gave rows other keys

    def execute(self, prolong: Callable[[], None]) -> None:
        """Compare window after window, then search for rows that no window had."""
        try:
            self._compare(prolong)
        finally:
            for staged in self._kept:
                staged.discard()

    def _compare(self, prolong: Callable[[], None]) -> None:
        chunks = self._chunks()
        with self._snapshots.reader() as reader:
            for chunk in chunks:
                if self._is_over():
                    return
                prolong()
                began = time.monotonic()
                compared = self._retried(reader, chunk)
                self._report.add(compared)
                self._slow_down(compared.rows, time.monotonic() - began)
        if self._report.compared == self._report.windows and not self._is_over():
            extra = self._certain(self._extra_rows, *self._last())
            if extra.differs and self._options.repair:
                self._repair(lambda view: view.remove_extra_rows(), lambda view: view.extra_rows())
            self._report.add_extra(extra)

    def _chunks(self) -> Sequence[Chunk]:
        """Return the chunks to compare, in order."""
        rows = self._options.window_rows or self._comparer.window_rows
        if self._options.rate is not None:
            rows = min(rows, max(1, round(self._options.rate * _RATED_SECONDS)))
        chunks = list(self._snapshots.plan([self._report.table], rows))
        self._report.windows = len(chunks)
        if self._options.sample >= 1.0:
            return chunks
        count = math.ceil(len(chunks) * self._options.sample)
        return sorted(random.sample(chunks, count), key=lambda chunk: chunk.number)

    def _is_over(self) -> bool:
        deadline = self._options.deadline
        return deadline is not None and time.monotonic() >= deadline

    def _slow_down(self, rows: int, seconds: float) -> None:
        if self._options.rate is not None:
            time.sleep(max(0.0, rows / self._options.rate - seconds))

    def _retried(self, reader: ChunkReader, chunk: Chunk) -> ComparedRows:
        """Compare a chunk; read it again if that fails for a reason that may be over."""
        backoff = Backoff()
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return self._window(reader, chunk)
            except (SinkUnavailable, SparkUnavailable):
                raise  # the sink has forgotten the windows before
            except (Retryable, JournalDamaged):
                if attempt == _ATTEMPTS:
                    raise
                self._marked_at = float("-inf")
                time.sleep(backoff.next_delay())
        raise AssertionError

    def _window(self, reader: ChunkReader, chunk: Chunk) -> ComparedRows:
        window = self._read(reader, chunk)
        try:
            if table_of(window.staged) is None:
                return ComparedRows()
            compared = self._certain(
                lambda through: self._compared(window, through), window.position, window.read_at
            )
            if compared.differs and self._options.repair:
                self._repair(lambda view: view.repair(), lambda view: view.differences(), window)
            return compared
        finally:
            if self._comparer.keeps_windows:
                self._kept.append(window.staged)
            else:
                window.staged.discard()

    def _read(self, reader: ChunkReader, chunk: Chunk) -> SourceWindow:
        """Read a chunk of the source's table.

        Raises:
            JournalDamaged: The journal no longer has the changes since, as after a long wait.
        """
        if time.monotonic() - self._marked_at > _WATERMARK_SECONDS:
            self._watermark, self._marked_at = self._snapshots.watermark(), time.monotonic()
        before = self._store.pipelines.get(self._name)
        assert before is not None
        read = reader.read(chunk, self._watermark)
        read_at = self._store.now()
        staged = self._expected.rows(read, chunk.number)
        first = first_not_visible(self._store, before, read.read_view.to_json())
        if first is None:
            staged.discard()
            raise JournalDamaged(f"{self._name}: the journal does not go back to the read")
        self._first = first if self._first is None else min(first, self._first)
        self._last_read = (read.position, read_at)
        self._report.position = self._report.position or read.position.to_json()
        return SourceWindow(staged, read.read_view, read.position, read_at, first)

    def _last(self) -> tuple[Position, float]:
        """Return the position of the last read, and when it had begun."""
        assert self._last_read is not None, "a table has at least one chunk"
        return self._last_read

    def _certain(
        self, compare: Callable[[int], ComparedRows], position: Position, read_at: float
    ) -> ComparedRows:
        """Return what a comparison finds once the sink has everything before a position.

        Args:
            compare: Compares, given a segment that the sink's table has at least.
            position: The position of a read.
            read_at: When the read had begun, by the store's clock.
        """
        # A table that cannot have the rows yet may get a column from what it lacks.
        with contextlib.suppress(TableRejected):
            compared = compare(self._front())
            if not compared.differs:
                return compared
        front = self._await_sink(position, read_at)
        for _ in range(_SETTLEMENTS):
            before = self._commits()
            compared = compare(front)
            if not compared.differs or self._counts(before):
                return compared
            time.sleep(_POLL_SECONDS)
            front = self._front()
        raise NotAllowed(_BUSY)

    def _counts(self, before: TableCommits) -> bool:
        """Return whether what was found counts: no commit was under way since."""
        return self._comparer.exact or (not _planned(before) and before == self._commits())

    def _compared(self, window: SourceWindow, front: int) -> ComparedRows:
        """Compare the rows of a window."""
        with self._view(front, window) as view:
            compared = view.differences()
            self._check_moved(compared)
            return compared

    def _check_moved(self, compared: ComparedRows) -> None:
        """Check that what differs is not what the log lacks of rows that got other keys.

        Raises:
            _RowsMoved: It may be; a new read of the window has all of these rows.
        """
        if compared.differs and self._moved:
            raise _RowsMoved(
                "rows differ, but rows whose large values the log lacks got other keys meanwhile; "
                "try again while less is written"
            )

    def _extra_rows(self, front: int) -> ComparedRows:
        """Search for rows that no window had."""
        with self._view(front) as view:
            return view.extra_rows()

    def _repair(
        self,
        repair: Callable[[ComparedView], bool],
        compare: Callable[[ComparedView], ComparedRows],
        window: SourceWindow | None = None,
    ) -> None:
        """Repair the rows of a window, or those that no window had, and compare them again.

        Raises:
            NotAllowed: Commits come first all the time.
            TableRejected: The repair has no effect.
        """
        backoff = Backoff(_POLL_SECONDS, maximum=5.0)
        for _ in range(_REPAIRS):
            before = self._commits()
            with self._view(self._front(), window, locked=True) as view:
                compared = compare(view)
                if not compared.differs:
                    return
                if window is not None:
                    self._check_moved(compared)
                if self._counts(before) and repair(view):
                    if not compare(view).differs:
                        return
                    raise TableRejected(
                        "rows differ even after they were repaired: does a trigger or rule of the "
                        "sink's table change them?"
                    )
            time.sleep(backoff.next_delay())
        raise NotAllowed(_BUSY)

    @contextlib.contextmanager
    def _view(
        self, front: int, window: SourceWindow | None = None, *, locked: bool = False
    ) -> Iterator[ComparedView]:
        """Provide the sink's table, with what it should have.

        Args:
            front: A segment that the sink's table has at least.
            window: The window that is compared; None to search for rows that no window had.
            locked: Whether the table may be changed.

        Raises:
            TableRejected: The sink's table cannot have the rows.
        """
        assert self._first is not None
        first, read_view = (
            (self._first, None) if window is None else (window.first, window.read_view)
        )
        self._moved = False
        with self._comparer.view(front, locked=locked) as view:
            rows = None if window is None else table_of(window.staged)
            if rows is not None:
                view.load(rows)
            with self._expected.changes(first, view.through, read_view) as changes:
                if changes is not None:
                    view.change(changes)
                    self._moved = any(step.kind == "rekey" for step in changes.steps)
                yield view

    def _commits(self) -> TableCommits:
        commits = self._store.table_commits.read(self._name, self._report.sink)
        assert commits is not None
        return commits

    def _front(self) -> int:
        """Return the last segment that the sink's table is known to have."""
        commits = self._commits()
        suspended = commits.suspended.get(tuple(self._report.destination))
        if suspended is not None and suspended.recreate:
            raise NotAllowed("it is being loaded again")
        return commits.front.segment if suspended is None else suspended.segment

    def _await_sink(self, position: Position, read_at: float) -> int:
        """Wait until the sink's table has everything that a read saw; return its last segment.

        Raises:
            NotAllowed: The sink does not move.
        """
        needed: int | None = None
        front = self._front()
        moved_at = time.monotonic()
        while True:
            needed = self._reach.through(position, read_at) if needed is None else needed
            before, front = front, self._front()
            if needed is not None and front >= needed:
                return front
            if front != before:
                moved_at = time.monotonic()
            if time.monotonic() - moved_at > self._options.patience:
                raise NotAllowed(
                    f"rows differ, but the sink has not everything that the source had at "
                    f"{position.to_json()}, and does not move; let the pipeline run "
                    f"(deltaforge status {self._name})"
                )
            time.sleep(_POLL_SECONDS)


def _planned(commits: TableCommits) -> bool:
    """Return whether a commit may be under way."""
    plans = [commits.front.planned_to, *(table.planned_to for table in commits.suspended.values())]
    return any(plan is not None for plan in plans)
