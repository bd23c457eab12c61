"""A pipeline's status, and who says and takes back that it has failed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from deltaforge_dagster.config.load import BrokenPipeline, LoadedPipeline, load_pipeline
from deltaforge_dagster.errors import (
    DeltaforgeError,
    PositionLost,
    SourceUnavailable,
    SpecError,
    UnsupportedEvent,
)
from deltaforge_dagster.pipeline.capture import Capture
from deltaforge_dagster.pipeline.capture_watch import CaptureWatch
from deltaforge_dagster.pipeline.health import (
    Health,
    failure_of,
    health,
    tick_failed,
    tick_passed,
)
from deltaforge_dagster.state.store import StateStore
from tests.pipeline.test_catalog import FILE

NAME = "filed"


@pytest.fixture
def loaded(tmp_path: Path, sqlite_store: StateStore) -> LoadedPipeline:
    """A pipeline that the store knows."""
    (tmp_path / "filed.yaml").write_text(FILE)
    sqlite_store.register_pipeline(NAME, "hash", ["redis"])
    return load_pipeline(tmp_path / "filed.yaml")


def capture(error: DeltaforgeError | None, *, failed: bool, has_read: bool) -> Capture:
    """Return what a watch sees of a capture."""
    return cast(Capture, SimpleNamespace(error=error, failed=failed, has_read=has_read))


def test_what_people_want_is_the_status(sqlite_store: StateStore, loaded: LoadedPipeline) -> None:
    """A failure shows only while the pipeline is to run; a broken file always."""
    assert health(sqlite_store, loaded) == Health("running")
    tick_failed(sqlite_store, NAME, PositionLost("the slot is gone"))
    assert health(sqlite_store, loaded) == Health("failed", "the slot is gone")
    sqlite_store.set_want(NAME, "paused")
    assert health(sqlite_store, loaded) == Health("paused")
    sqlite_store.set_want(NAME, "stopped")
    assert health(sqlite_store, loaded) == Health("stopped")
    broken = BrokenPipeline(None, NAME, SpecError("odd"))
    assert health(sqlite_store, broken) == Health("failed", "odd")


def test_a_source_that_is_down_is_no_failure(
    sqlite_store: StateStore, loaded: LoadedPipeline
) -> None:
    """It is asked again, and nobody has to act."""
    tick_failed(sqlite_store, NAME, SourceUnavailable("refused"))
    assert health(sqlite_store, loaded).status == "running"


def test_a_tick_takes_back_what_a_tick_said(
    sqlite_store: StateStore, loaded: LoadedPipeline
) -> None:
    """But not what a run met: a tick does not read the log."""
    tick_failed(sqlite_store, NAME, PositionLost("the slot is gone"))
    tick_passed(sqlite_store, NAME)
    assert health(sqlite_store, loaded).status == "running"

    watch = CaptureWatch(sqlite_store, NAME)
    watch.look(capture(UnsupportedEvent("odd event"), failed=True, has_read=True))
    tick_passed(sqlite_store, NAME)
    tick_failed(sqlite_store, NAME, PositionLost("the slot is gone"))
    assert health(sqlite_store, loaded) == Health("failed", "odd event")


def test_a_run_takes_back_what_anybody_said(
    sqlite_store: StateStore, loaded: LoadedPipeline
) -> None:
    """Once it has read; that it began, or is being refused for now, says nothing."""
    for _ in range(2):
        tick_failed(sqlite_store, NAME, PositionLost("the slot is gone"))
        watch = CaptureWatch(sqlite_store, NAME)
        watch.look(None)
        watch.look(capture(None, failed=False, has_read=False))
        watch.look(capture(SourceUnavailable("refused"), failed=False, has_read=True))
        assert health(sqlite_store, loaded).status == "failed"
        watch.look(capture(None, failed=False, has_read=True))
        assert health(sqlite_store, loaded).status == "running"


def test_a_failure_that_comes_again_is_as_old_as_the_first(
    sqlite_store: StateStore, loaded: LoadedPipeline
) -> None:
    """A run every few seconds that meets the same is one failure."""
    since = []
    for _ in range(2):
        CaptureWatch(sqlite_store, loaded.name).look(
            capture(UnsupportedEvent("odd event"), failed=True, has_read=True)
        )
        row = sqlite_store.pipeline(NAME)
        assert row is not None
        failure = failure_of(row)
        assert failure is not None
        since.append(failure.since)
    assert since[0] == since[1]
