"""When a run is over: between two questions, what they are about goes on."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.errors import SourceUnavailable
from deltaforge_dagster.pipeline.capture.capture import CaptureFailure
from deltaforge_dagster.pipeline.run.progress import RunEnd
from deltaforge_dagster.pipeline.run_context import RunOptions
from deltaforge_dagster.sources.postgres.position import LsnPosition
from deltaforge_dagster.state.store import StateStore
from tests.pipeline.snapshotting import PIPELINE


class Capturing:
    """A capture whose last chunk is in the journal as soon as somebody has asked for the deliveries."""

    failure, in_transaction, moved_at = None, False, 0.0

    def __init__(self) -> None:
        self.chunks_waiting = True
        self.segments: set[str] = set()

    def splice(self) -> None:
        """Take the chunk over: the sink has a segment to deliver."""
        self.chunks_waiting, self.segments = False, {"s"}


class Recovering:
    """A capture that works again right after somebody has asked why it does not."""

    def __init__(self) -> None:
        self._failures = [failure(time.monotonic())]

    @property
    def failure(self) -> CaptureFailure | None:
        """Return the failure once."""
        return self._failures.pop() if self._failures else None


class Delivering:
    """Deliveries that are asked just before a chunk is taken over, at first."""

    errors: tuple[str, ...] = ()
    redriving: frozenset[str] = frozenset()

    def __init__(self, capture: Capturing) -> None:
        self._capture = capture

    moved_at = 0.0

    def behind(self, _: object) -> dict[str, int]:
        """Return what sinks lack now; then the chunk is taken over."""
        lacking = dict.fromkeys(self._capture.segments, 1)
        if self._capture.chunks_waiting:
            self._capture.splice()
        return lacking

    def stuck(self, _: object) -> set[str]:
        """Return the sinks that are not waited for."""
        return set()

    def wind_up(self) -> bool:
        """Return whether no sink is amid a commit."""
        return not self._capture.segments


def failure(since: float) -> CaptureFailure:
    """Return why a source that is retried cannot be read."""
    return CaptureFailure(SourceUnavailable("cut"), since, time.monotonic(), 1)


def options(*, until_caught_up: bool) -> RunOptions:
    """Return what a run is asked to do."""
    return RunOptions("run", cast("Any", None), until_caught_up=until_caught_up)


def test_what_is_spliced_between_two_questions_is_delivered(
    sqlite_store: StateStore, tmp_path: Path
) -> None:
    """A run until caught up does not end with a chunk that no sink has: what waits is asked for first."""
    (tmp_path / "p.yaml").write_text(PIPELINE)
    sqlite_store.pipelines.register("p", "hash", ["s"])
    capture = Capturing()
    end = RunEnd(
        load_pipeline(tmp_path / "p.yaml"),
        cast("Any", SimpleNamespace(store=sqlite_store, build_source=None)),
        options(until_caught_up=True),
        None,
        deliverers=cast("Any", Delivering(capture)),
        pressure=cast("Any", SimpleNamespace(paused=None)),
        capture=cast("Any", capture),
    )

    assert [end.reason(), end.reason()] == [None, None]
    capture.segments.clear()
    assert end.reason() == "caught up"


@pytest.mark.parametrize("until_caught_up", [True, False])
def test_what_is_captured_while_the_source_is_asked_is_delivered(
    sqlite_store: StateStore, tmp_path: Path, until_caught_up: bool
) -> None:
    """A slow source answers for its head only when capture has reached it: sinks have not, and the run goes on."""
    (tmp_path / "p.yaml").write_text(PIPELINE)
    sqlite_store.pipelines.register("p", "hash", ["s"])
    capture = Capturing()
    capture.chunks_waiting = False
    reading = SimpleNamespace(
        failure=None,
        chunks_waiting=False,
        moved_at=0.0,
        position=LsnPosition(5),
        passed=None,
    )

    def head() -> LsnPosition:
        if reading.position < LsnPosition(9):
            reading.moved_at, reading.position = time.monotonic(), LsnPosition(9)
            capture.segments.add("s")
        return LsnPosition(9)

    end = RunEnd(
        load_pipeline(tmp_path / "p.yaml"),
        cast(
            "Any",
            SimpleNamespace(
                store=sqlite_store,
                build_source=lambda: SimpleNamespace(head=head, close=lambda: None),
            ),
        ),
        options(until_caught_up=until_caught_up),
        LsnPosition(9),
        deliverers=cast("Any", Delivering(capture)),
        pressure=cast("Any", SimpleNamespace(paused=None)),
        capture=cast("Any", reading),
    )
    end._began -= 60

    assert [end.reason(), end.reason()] == [None, None]
    capture.segments.clear()
    reading.moved_at -= 60
    assert end.reason() == ("caught up" if until_caught_up else "idle")


def test_a_source_that_cannot_be_read_is_not_caught_up(
    sqlite_store: StateStore, tmp_path: Path
) -> None:
    """It is tried again; after as long as a run waits without work, capture has failed."""
    (tmp_path / "p.yaml").write_text(PIPELINE)
    sqlite_store.pipelines.register("p", "hash", ["s"])
    capture = Capturing()
    capture.chunks_waiting = False
    broken = SimpleNamespace(
        failure=failure(time.monotonic()),
        chunks_waiting=False,
        moved_at=time.monotonic(),
        position=LsnPosition(5),
        passed=None,
    )

    def end(goal: LsnPosition | None, *, until_caught_up: bool) -> str | None:
        return RunEnd(
            load_pipeline(tmp_path / "p.yaml"),
            cast("Any", SimpleNamespace(store=sqlite_store, build_source=None)),
            options(until_caught_up=until_caught_up),
            goal,
            deliverers=cast("Any", Delivering(capture)),
            pressure=cast("Any", SimpleNamespace(paused=None)),
            capture=cast("Any", broken),
        ).reason()

    for until_caught_up in (True, False):
        assert end(LsnPosition(9), until_caught_up=until_caught_up) is None
    broken.failure = failure(time.monotonic() - 3600)
    for until_caught_up in (True, False):
        assert end(LsnPosition(9), until_caught_up=until_caught_up) == "capture failed"
    broken.failure = None
    broken.position = LsnPosition(9)
    assert end(LsnPosition(9), until_caught_up=True) == "caught up"


def test_a_capture_that_recovers_meanwhile_has_not_failed(
    sqlite_store: StateStore, tmp_path: Path
) -> None:
    """The capture thread clears its failure at any time: each question reads it once."""
    (tmp_path / "p.yaml").write_text(PIPELINE)
    sqlite_store.pipelines.register("p", "hash", ["s"])

    end = RunEnd(
        load_pipeline(tmp_path / "p.yaml"),
        cast("Any", SimpleNamespace(store=sqlite_store, build_source=None)),
        options(until_caught_up=False),
        None,
        deliverers=cast("Any", Delivering(Capturing())),
        pressure=cast("Any", SimpleNamespace(paused=None)),
        capture=cast("Any", Recovering()),
    )

    assert not end._capture_failed()
    assert not end._capture_failed()


def test_a_commit_that_has_begun_is_finished(sqlite_store: StateStore, tmp_path: Path) -> None:
    """A run whose time is over ends after it; what waits for the next commit does not matter."""
    (tmp_path / "p.yaml").write_text(PIPELINE)
    sqlite_store.pipelines.register("p", "hash", ["s"])
    capture = Capturing()
    capture.splice()
    end = RunEnd(
        load_pipeline(tmp_path / "p.yaml"),
        cast("Any", SimpleNamespace(store=sqlite_store, build_source=None)),
        options(until_caught_up=False),
        None,
        deliverers=cast("Any", Delivering(capture)),
        pressure=cast("Any", SimpleNamespace(paused=None)),
        capture=None,
    )
    end._began -= 3600

    assert end.reason() is None
    capture.segments.clear()
    assert end.reason() == "max_seconds"


@pytest.mark.parametrize(("captures", "reasons"), [(True, [None, None]), (False, ["idle", "idle"])])
def test_a_resident_run_ends_by_itself_only_if_it_does_not_capture(
    sqlite_store: StateStore, tmp_path: Path, captures: bool, reasons: list[str | None]
) -> None:
    """Neither time nor idleness ends one that captures; that of a paused pipeline has nothing to wait for."""
    (tmp_path / "p.yaml").write_text(PIPELINE + "  engine: {run: {max_seconds: 0}}\n")
    sqlite_store.pipelines.register("p", "hash", ["s"])
    capture = Capturing()
    capture.chunks_waiting = False
    end = RunEnd(
        load_pipeline(tmp_path / "p.yaml"),
        cast("Any", SimpleNamespace(store=sqlite_store, build_source=None)),
        options(until_caught_up=False),
        None,
        deliverers=cast("Any", Delivering(capture)),
        pressure=cast("Any", SimpleNamespace(paused=None)),
        capture=cast("Any", capture) if captures else None,
    )
    end._began -= 86_400

    assert [end.reason(), end.reason()] == reasons
