"""The capture thread: order of writes, retries, and what ends it."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltaforge_dagster.errors import SourceUnavailable, UnsupportedEvent
from deltaforge_dagster.pipeline.backoff import Backoff
from deltaforge_dagster.pipeline.capture import capture as capture_module
from deltaforge_dagster.pipeline.capture.capture import Capture
from deltaforge_dagster.sources.postgres.position import LsnPosition
from tests.pipeline.capture.conftest import Stage
from tests.pipeline.changes import NOTHING, PlayedSource, eventually, transaction, unfinished


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


def test_a_source_that_opens_again_is_told_what_was_confirmed_meanwhile(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While no source is open nobody hears of a confirmed position, and it is not confirmed again."""
    monkeypatch.setattr(capture_module, "Backoff", lambda: Backoff(initial=0.01))
    source = PlayedSource([transaction(1), SourceUnavailable("cut"), transaction(2)])
    started: list[Capture] = []

    def build_source() -> PlayedSource:
        if source.readers:  # between two attempts
            eventually(lambda: started)
            started[0].confirm(LsnPosition(1, 1))
        return source

    started.append(stage.capture(source, build_source))
    eventually(lambda: started[0].rows == 2)
    started[0].stop()

    assert source.confirmed == [LsnPosition(1, 1)]
    assert source.readers == [LsnPosition(0), LsnPosition(1)]


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
    first = capture.failure
    eventually(lambda: caplog.messages.count(failed) == 5)
    later = capture.failure
    assert first is not None
    assert later is not None, "to read again is no success"
    assert later.since == first.since
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
