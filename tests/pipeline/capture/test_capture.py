"""The capture thread: order of writes, retries, and what ends it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from deltaforge_dagster.config.engine import RangeLimits, SegmentLimits
from deltaforge_dagster.errors import SourceUnavailable, UnsupportedEvent
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.backoff import Backoff
from deltaforge_dagster.pipeline.capture import capture as capture_module
from deltaforge_dagster.pipeline.capture.capture import Capture, CaptureOptions
from deltaforge_dagster.pipeline.capture.segments import Ranges
from deltaforge_dagster.pipeline.run_context import ActiveLease, LeasedRun
from deltaforge_dagster.sources.postgres.position import LsnPosition
from deltaforge_dagster.state.store import StateStore
from tests.pipeline.changes import NOTHING, PlayedSource, eventually, transaction, unfinished


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

    def capture(self, source: PlayedSource) -> Capture:
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
            build_source=lambda: source,
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


def test_changes_become_segments_and_ranges(stage: Stage) -> None:
    """Every change is journaled once, in order, in numbered segments of a range."""
    capture = stage.capture(PlayedSource([transaction(1, 2), transaction(3), transaction(4, 5)]))
    eventually(lambda: capture.rows == 5)
    capture.stop()
    stage.ranges.close("test")

    assert stage.journaled() == [1, 2, 3, 4, 5]
    segments = stage.store.segments.read("p")
    assert [row.segment for row in segments] == list(range(1, len(segments) + 1))
    assert stage.captured == [row.segment for row in segments]
    assert stage.opened == [row.range for row in stage.store.ranges.read("p")]
    assert all(row.state == "closed" for row in stage.store.ranges.read("p"))


def test_a_range_closes_at_its_limit_and_the_next_follows(stage: Stage) -> None:
    """A range that is full closes with its last segment; the next segment opens another."""
    source = PlayedSource([transaction(1, 2, 3, 4)])
    capture = stage.capture(source)
    eventually(lambda: capture.rows == 4)
    capture.stop()
    source.batches.append(transaction(5))
    capture = stage.capture(source)
    eventually(lambda: capture.rows == 1)
    capture.stop()

    first, second = stage.store.ranges.read("p")
    assert (first.state, first.close_reason, first.rows) == ("closed", "max_events", 4)
    assert (second.state, second.first_segment) == ("open", first.last_segment + 1)


def test_a_lost_connection_is_taken_up_where_the_journal_ends(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a retryable error reading goes on behind the last segment: no loss, no repeat."""
    monkeypatch.setattr(capture_module, "Backoff", lambda: Backoff(initial=0.01))
    source = PlayedSource(
        [transaction(1), transaction(2), SourceUnavailable("cut"), transaction(3), transaction(4)]
    )
    capture = stage.capture(source)
    eventually(lambda: capture.rows == 4)
    capture.stop()

    assert stage.journaled() == [1, 2, 3, 4]
    assert len(source.readers) == 2
    assert capture.error is None


def test_a_journal_that_cannot_be_written_is_no_failure_of_the_source(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """The log names the journal, metrics count nothing against the source, and capture goes on."""
    monkeypatch.setattr(capture_module, "Backoff", lambda: Backoff(initial=0.01))
    (tmp_path / "journal").write_bytes(b"in the way")
    # A server says that nothing new has come before it sends again what could not be written.
    capture = stage.capture(PlayedSource([NOTHING, transaction(1), transaction(2)]))
    failed = "the journal or the state store cannot be used now"
    eventually(lambda: failed in caplog.messages)
    since = capture.failing_since
    eventually(lambda: caplog.messages.count(failed) == 5)
    assert capture.failing_since == since is not None, "to read again is no success"
    delays = [one.fields["sleep_seconds"] for one in caplog.records if failed == one.getMessage()]  # type: ignore[attr-defined]
    assert delays[-1] > 0, "the wait grows"
    (tmp_path / "journal").unlink()
    eventually(lambda: capture.rows == 2)
    capture.stop()

    assert stage.journaled() == [1, 2]
    assert not any("the source cannot be read" in one for one in caplog.messages)
    assert "source_errors_total" not in {one.name for one in stage.store.metrics.read()}


def test_an_unknown_event_ends_capture_after_what_came_before(stage: Stage) -> None:
    """A terminal error stops capture for good; the whole transactions before it are kept."""
    source = PlayedSource(
        [transaction(1), transaction(2), UnsupportedEvent("message 'X' at 0/9"), transaction(3)]
    )
    capture = stage.capture(source)
    eventually(lambda: not capture.alive)

    assert capture.failed
    assert "message 'X' at 0/9" in str(capture.error)
    assert stage.journaled() == [1, 2]


def test_stopping_keeps_whole_transactions_and_drops_the_open_one(stage: Stage) -> None:
    """What was committed is journaled by the stop; an open transaction is read again later."""
    source = PlayedSource([transaction(1), unfinished(2)])
    capture = stage.capture(source)
    eventually(lambda: capture.in_transaction)
    capture.stop()

    assert stage.journaled() == [1]
    row = stage.store.pipelines.get("p")
    assert row is not None
    assert row.captured_position == LsnPosition(1, 1).to_json()


def test_a_run_that_lost_its_lease_records_nothing(stage: Stage, tmp_path: Path) -> None:
    """Capture ends quietly when the lease is gone, without touching the source, or the store."""
    stage.lease.lost.set()
    source = PlayedSource([transaction(1)])
    capture = stage.capture(source)
    eventually(lambda: not capture.alive)

    assert source.readers == []
    assert stage.store.segments.read("p") == []
    assert not capture.failed
