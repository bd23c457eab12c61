"""Tests of which ticks of a code server may watch their sources."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import dagster as dg
import pytest
import yaml

from deltaforge_dagster.cli.installation.dagster_processes import THREADS
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.pipeline.control.unread_log import HeadWatch
from deltaforge_dagster.resources.instance import dagster_home
from deltaforge_dagster.sensors.watch_room import WatchRoom, places_to_watch
from tests.pipeline.changes import PlayedSource

ROOT = Path(__file__).parents[2]


def instance_with(folder: Path, settings: str) -> dg.DagsterInstance:
    """Return a Dagster instance with these settings."""
    (folder / "dagster.yaml").write_text(settings)
    return dg.DagsterInstance.from_config(str(folder))


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    """An instance whose daemon has eight threads for sensors."""
    with instance_with(tmp_path, "sensors: {use_threads: true, num_workers: 8}") as made:
        yield made


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code server has more threads than the daemon."""
    monkeypatch.setenv("DAGSTER_GRPC_MAX_WORKERS", "24")


def watch(
    stack: ExitStack, room: WatchRoom, instance: dg.DagsterInstance, began: float | None = None
) -> HeadWatch | None:
    """Begin the watch of a tick; without a time, of one that has all its time, however slow this machine is."""
    began = time.monotonic() + 60 if began is None else began
    return stack.enter_context(room.watch(instance, lambda: PlayedSource([]), began))


def test_half_of_the_threads_may_watch(
    instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the daemon or of the code server, whichever are fewer."""
    assert places_to_watch(instance) == 4
    monkeypatch.setenv("DAGSTER_GRPC_MAX_WORKERS", "6")
    assert places_to_watch(instance) == 3


def test_nobody_watches_where_sensors_wait_for_each_other(tmp_path: Path) -> None:
    """A daemon without threads evaluates the next sensor only after this one."""
    with instance_with(tmp_path, "telemetry: {enabled: false}") as instance, ExitStack() as stack:
        assert places_to_watch(instance) == 0
        assert watch(stack, WatchRoom(1), instance) is None


def test_a_tick_without_a_place_does_not_watch(instance: dg.DagsterInstance) -> None:
    """While four watch, a fifth tick only looks; once one has ended, the next may watch."""
    room = WatchRoom(4)
    with ExitStack() as stack:
        first = ExitStack()
        assert watch(first, room, instance) is not None
        assert all(watch(stack, room, instance) is not None for _ in range(3))
        assert watch(stack, room, instance) is None
        first.close()
        assert watch(stack, room, instance) is not None


@pytest.mark.parametrize(("pipelines", "seconds"), [(1, 4.0), (4, 4.0), (8, 2.0), (50, 0.32)])
def test_many_pipelines_watch_for_a_shorter_time(
    instance: dg.DagsterInstance, pipelines: int, seconds: float
) -> None:
    """Those that are more than the places share the time."""
    began = time.monotonic() + 60
    with ExitStack() as stack:
        watching = watch(stack, WatchRoom(pipelines), instance, began)
        assert watching is not None
        assert watching.until == pytest.approx(began + seconds)


@pytest.mark.parametrize(("pipelines", "ago"), [(1, 3.9), (100, 0.0)])
def test_a_tick_with_no_time_left_does_not_watch(
    instance: dg.DagsterInstance, pipelines: int, ago: float
) -> None:
    """The time counts from the beginning of the tick, so that the daemon's next round finds it ended."""
    with ExitStack() as stack:
        assert watch(stack, WatchRoom(pipelines), instance, time.monotonic() - ago) is None


def test_our_settings_leave_threads_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files for Dagster are the same, and Dagster takes them.

    On one machine runs are forked; the other file has a storage in PostgreSQL.

    The code server has more threads than the daemon for sensors, and the queue is read every second.
    """
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    ours = dagster_home(Settings.from_env({"DELTAFORGE_HOME": str(tmp_path)})) / "dagster.yaml"
    settings = [
        yaml.safe_load(path.read_text())
        for path in (ours, ROOT / "dagster.yaml", ROOT / "docker" / "dagster.yaml")
    ]
    settings[2].pop("storage")
    assert settings[0]["run_launcher"] == settings[1].pop("run_launcher")
    settings[0].pop("run_launcher")
    assert settings[0] == settings[1] == settings[2]
    with dg.DagsterInstance.from_config(str(ours.parent)) as instance:
        assert places_to_watch(instance) == 8
        assert instance.get_sensor_settings()["num_workers"] < THREADS
        assert instance.run_coordinator.dequeue_interval_seconds == 1  # type: ignore[attr-defined]
        queue = instance.get_concurrency_config().run_queue_config
        assert queue is not None
        assert queue.max_concurrent_runs == 10
