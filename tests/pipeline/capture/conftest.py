"""A pipeline with a real store, journal and lease, to capture from a source that plays batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from deltaforge_dagster.config.engine import RangeLimits, SegmentLimits
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.capture.capture import Capture, CaptureOptions
from deltaforge_dagster.pipeline.capture.committer import Ranges
from deltaforge_dagster.pipeline.run_context import ActiveLease, LeasedRun
from deltaforge_dagster.sources.postgres.position import LsnPosition
from deltaforge_dagster.state.store import StateStore
from tests.pipeline.changes import PlayedSource


class Stage:
    """A pipeline with a real store, journal and lease, and no sinks or Spark."""

    def __init__(self, store: StateStore, folder: Path) -> None:
        self.store = store
        self.journal = Journal(f"file://{folder}")
        self.row = store.pipelines.register("p", "hash", ["s"])
        store.pipelines.set_start("p", LsnPosition(0).to_json())
        lease = ActiveLease.acquire(
            store, "p", "run", seconds=30, renew_seconds=5, on_renewal=lambda: None
        )
        assert lease is not None
        self.lease = lease
        self.opened: list[int] = []
        self.ranges = Ranges(
            store,
            lease,
            spec_hash="hash",
            limits=RangeLimits(max_events=4),
            opened=self.opened.append,
        )
        self.captured: list[int] = []

    def capture(
        self, source: PlayedSource, build_source: Callable[[], PlayedSource] | None = None
    ) -> Capture:
        """Start capturing from where the store says."""
        row = self.store.pipelines.get("p")
        assert row is not None
        return Capture(
            LeasedRun(self.store, self.journal, self.lease, warn=lambda _: None),
            CaptureOptions(
                row=row,
                limits=SegmentLimits(min_ms=1, max_ms=1000),
                source_id="source",
                tenant="acme",
            ),
            build_source=build_source or (lambda: source),
            ranges=self.ranges,
            someone_waits=lambda: True,
            segment_wanted=lambda: True,
            captured=self.captured.append,
        )

    def journaled(self) -> list[int]:
        """Return every captured id, in journal order."""
        found: list[int] = []
        for row in self.store.segments.read("p"):
            self.journal.verify(row)
            for batch in self.journal.open(row.path).iter_batches():
                found += [int(one) for one in pa.Table.from_batches([batch])["pos"].to_numpy()]
        return found


@pytest.fixture
def stage(sqlite_store: StateStore, tmp_path: Path) -> Iterator[Stage]:
    """A stage whose lease is released at the end."""
    made = Stage(sqlite_store, tmp_path / "journal")
    yield made
    made.lease.release()
