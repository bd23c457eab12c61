"""A pipeline over a database with a real store, journal and lease, and no sinks or Spark."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from deltaforge_dagster.config.engine import RangeLimits, SegmentLimits
from deltaforge_dagster.errors import SparkUnavailable
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.capture.backlog import Backlog
from deltaforge_dagster.pipeline.capture.capture import Capture, CaptureOptions
from deltaforge_dagster.pipeline.capture.committer import Ranges
from deltaforge_dagster.pipeline.run_context import ActiveLease, LeasedRun, SessionProvider
from deltaforge_dagster.positions import Position
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.testing.sources import (
    LIMITS,
    Taken,
    Versions,
    add,
)
from tests.pipeline.changes import eventually

COMPILING_SECONDS = 150.0
"""The first reader of a session may wait for the compiler."""
LIMITS_OF_SEGMENTS = SegmentLimits(min_ms=0, max_ms=100)


class CapturingBench(Protocol):
    """A database to capture from."""

    def source(self, **changed: Any) -> Any:
        """Return a new source."""
        ...

    def execute(self, *statements: str) -> None:
        """Run the statements in one transaction."""
        ...


class Stage:
    """A pipeline over a database: store, journal and capture, without sinks.

    Attributes:
        lease_seconds: How long a run that dies keeps the next one waiting.
        pauses: Whether new forms of tables wait for approval.
    """

    lease_seconds = 120.0
    pauses = False

    def __init__(
        self, bench: Any, store: StateStore, folder: Path, *, knows_tables: bool = False
    ) -> None:
        self.bench = bench
        self.store = store
        self.journal = Journal(f"file://{folder}")
        store.pipelines.register("p", "hash", ["s"])
        source = bench.source()
        self.start: Position = source.ensure_start()
        # Without definitions, as of tables that nobody could read when the pipeline began.
        known = source.definitions(self.start) if knows_tables else {}
        store.pipelines.set_start("p", self.start.to_json(), known)

    def capture(
        self,
        until: Callable[[Capture], bool],
        limits: SegmentLimits = LIMITS_OF_SEGMENTS,
        sessions: SessionProvider | None = None,
    ) -> Backlog | None:
        """Let one run capture until it is enough; with Spark, backlogs in parallel."""
        lease = ActiveLease.acquire(
            self.store,
            "p",
            str(uuid.uuid4()),
            seconds=self.lease_seconds,
            renew_seconds=self.lease_seconds / 6,
            on_renewal=lambda: None,
        )
        assert lease is not None
        row = self.store.pipelines.get("p")
        assert row is not None
        run = LeasedRun(self.store, self.journal, lease, warn=lambda _: None)
        ranges = Ranges(
            self.store,
            lease,
            spec_hash="hash",
            limits=RangeLimits(),
            opened=lambda _: None,
        )
        ranges.close_left_open()
        backlog = None
        if sessions is not None:
            backlog = Backlog(run, sessions, uid=row.uid, limits=limits)
            with contextlib.suppress(SparkUnavailable):  # or the one reader would be done before
                backlog.warm_up(self.bench.source()).result()
        capture = Capture(
            run,
            CaptureOptions(
                row=row,
                limits=limits,
                source_id="source",
                tenant="acme",
                pauses_tables=self.pauses,
            ),
            backlog=backlog,
            build_source=self.bench.source,
            ranges=ranges,
            someone_waits=lambda: True,
            segment_wanted=lambda: True,
            captured=lambda _: None,
        )
        try:
            eventually(lambda: until(capture) or capture.error is not None, COMPILING_SECONDS)
        finally:
            capture.stop()
            ranges.close("test")
            lease.release()
        assert capture.error is None, capture.error
        return backlog

    def rows(self) -> list[dict[str, Any]]:
        """Return every row of the journal, in order."""
        found: list[dict[str, Any]] = []
        for segment in self.store.segments.read("p"):
            for batch in self.journal.batches(segment):
                found += batch.to_pylist()
        return found

    def newest(self) -> list[dict[str, Any]]:
        """Return the rows of the newest segment."""
        found: list[dict[str, Any]] = []
        for segment in self.store.segments.read("p")[-1:]:
            for batch in self.journal.batches(segment):
                found += batch.to_pylist()
        return found

    def events(self, table: str) -> list[dict[str, Any]]:
        """Return a table's rows, without what depends on the journal."""
        places = {"segment", "ordinal", "synthetic", "schema_version", "schema_sequence"}
        return [
            {name: value for name, value in row.items() if name not in places}
            for row in self.rows()
            if row["table"] == table
        ]

    def never_held(self, table: str, count: int) -> list[dict[str, Any]]:
        """Return the same rows as a reader has them that knew the tables from the start."""
        notes = Versions()
        name = json.dumps([self.bench.database, table])
        columns = [["id", "int"], ["v", "longtext"]]
        notes.define({name: json.dumps({"columns": columns, "primary_key": ["id"]})}, self.start)
        source = self.bench.source(tables=(f"{self.bench.database}.{table}",))
        taken = Taken([], self.start, [])
        try:
            for batch in source.read(self.start, LIMITS, notes):
                add(taken, batch)
                if len(taken.rows) >= count and taken.batches[-1].end is not None:
                    break
        finally:
            source.close()
        places = {"schema_version", "schema_sequence"}
        return [
            {name: value for name, value in row.items() if name not in places}
            for row in taken.rows
            if row["table"] == table
        ]
