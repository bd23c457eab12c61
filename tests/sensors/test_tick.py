"""Tests of one tick with a real state store: what it reports about runs and sinks."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, cast

import dagster as dg
import pytest

from deltaforge_dagster import __version__
from deltaforge_dagster.assets.names import PIPELINE_TAG, RUN_TAG, asset_key, health_key
from deltaforge_dagster.config.file.load import LoadedPipeline, load_pipeline
from deltaforge_dagster.errors import SourceUnavailable
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.resources import left_tasks
from deltaforge_dagster.sensors import report
from deltaforge_dagster.sensors import tick as module
from deltaforge_dagster.sensors.report import newest_evaluation
from deltaforge_dagster.sensors.tick import current, tick
from deltaforge_dagster.sources.base import Source
from deltaforge_dagster.state.database.primitives import Kv
from deltaforge_dagster.state.records import HoldPart
from deltaforge_dagster.state.store import StateStore
from tests.state.make import NAME, capture, deliver, expire, held, position

FILE = """\
metadata: {name: orders, tenant: acme}
spec:
  source:
    type: postgres
    config: {id: db, dsn: "postgres://u@localhost/d", slot: s, publication: p, tables: [t]}
  sinks:
    - {type: redis, config: {id: redis, uri: "redis://localhost", stream: s}}
"""


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedPipeline:
    """The pipeline of the store."""
    (tmp_path / "orders.yaml").write_text(FILE)
    return load_pipeline(tmp_path / "orders.yaml")


def no_source() -> Source:
    """Raise an error, as if the source were unreachable."""
    raise SourceUnavailable("not there")


class SourceStub:
    """A source that is only closed."""

    def close(self) -> None:
        """Do nothing."""


@dg.op
def nothing() -> None:
    """Do nothing."""


@dg.job
def work() -> None:
    """A job for runs to create."""
    nothing()


@pytest.mark.parametrize("live", [True, False], ids=["live", "materialize"])
def test_a_run_that_lost_its_lease_is_reported(
    sqlite_store: StateStore, loaded: LoadedPipeline, monkeypatch: pytest.MonkeyPatch, live: bool
) -> None:
    """After a crash of the host a tick reports a live run, or a sink's catch-up, as failed."""
    tags = {PIPELINE_TAG: NAME, **({RUN_TAG: "live"} if live else {})}
    with dg.DagsterInstance.ephemeral() as instance:
        run = instance.create_run_for_job(work, status=dg.DagsterRunStatus.STARTED, tags=tags)
        held(sqlite_store, run_id=run.run_id)

        def status() -> dg.DagsterRunStatus:
            tick(instance, sqlite_store, loaded, no_source, Journal("memory://links"))
            found = instance.get_run_by_id(run.run_id)
            assert found is not None
            return found.status

        assert status() == dg.DagsterRunStatus.STARTED
        expire(sqlite_store)
        assert status() == dg.DagsterRunStatus.STARTED, "it may only be slow"
        monkeypatch.setattr(module, "LOST_SECONDS", 0.0)
        assert status() == dg.DagsterRunStatus.FAILURE


def test_tasks_that_a_killed_run_has_left_in_spark_are_ended_once(
    sqlite_store: StateStore, loaded: LoadedPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once no run is live any more; a run that has released its lease has left none."""
    begun: list[list[str]] = []
    monkeypatch.setattr(left_tasks, "_run", begun.append)
    monkeypatch.setattr(module, "LOST_SECONDS", 0.0)
    tags = {PIPELINE_TAG: NAME, RUN_TAG: "live"}
    with dg.DagsterInstance.ephemeral() as instance:

        def ticked() -> int:
            tick(instance, sqlite_store, loaded, no_source, Journal("memory://left"))
            for thread in threading.enumerate():
                if thread.name == "left tasks":
                    thread.join()
            return len(begun)

        lease = held(sqlite_store, run_id="released")
        with sqlite_store.fenced(lease) as writer:
            writer.lease.set_session("session")
            writer.lease.release()
        assert ticked() == 0
        run = instance.create_run_for_job(work, status=dg.DagsterRunStatus.STARTED, tags=tags)
        held(sqlite_store, run_id=run.run_id)
        assert ticked() == 0, "it works"
        expire(sqlite_store)
        assert (ticked(), ticked()) == (1, 1)
        assert begun[0][1:] == ["-m", "deltaforge_dagster.resources.left_tasks", NAME]
        held(sqlite_store, run_id="the next one")
        assert ticked() == 1
        expire(sqlite_store)
        assert ticked() == 2


def test_a_failing_sink_shows_while_the_run_works(
    sqlite_store: StateStore, loaded: LoadedPipeline
) -> None:
    """The check fails once when the sink begins to fail, and passes once it has everything."""
    lease = held(sqlite_store, "redis")
    key = dg.AssetCheckKey(asset_key(NAME, "redis"), "delivered")
    with dg.DagsterInstance.ephemeral() as instance:

        def outcomes() -> list[bool]:
            tick(instance, sqlite_store, loaded, no_source, Journal("memory://links"))
            storage = instance.event_log_storage
            history = storage.get_asset_check_execution_history(key, limit=9)
            events = [one.event.dagster_event for one in reversed(history) if one.event]
            return [one.asset_check_evaluation_data.passed for one in events if one]

        capture(sqlite_store, lease, 1, 2)
        assert outcomes() == [], "to be behind is no failure"
        with sqlite_store.fenced(lease) as writer:
            writer.checkpoints.failed("redis", "refused", 0.0)
        assert outcomes() == [False]
        assert outcomes() == [False]
        deliver(sqlite_store, lease, "redis", 1)
        assert outcomes() == [False], "not everything yet"
        deliver(sqlite_store, lease, "redis", 2)
        assert outcomes() == [False, True]
        assert outcomes() == [False, True]


def test_what_is_kept_back_shows_while_the_run_works(
    sqlite_store: StateStore, loaded: LoadedPipeline
) -> None:
    """A hold fails its check once, however many events are added, and alerts can report it."""
    lease = held(sqlite_store, "redis", seconds=600)
    key = dg.AssetCheckKey(asset_key(NAME, "changes"), "holds")

    def keep(number: int) -> None:
        part = HoldPart(
            "table", "shop.items", "nobody knows", position(3), f"held-{number}", "s", 2, 9
        )
        with sqlite_store.fenced(lease) as writer:
            writer.holds.keep([part], position(3 + number))

    with dg.DagsterInstance.ephemeral() as instance:

        def outcomes() -> list[bool]:
            tick(instance, sqlite_store, loaded, no_source, Journal("memory://kept"))
            history = instance.event_log_storage.get_asset_check_execution_history(key, limit=9)
            events = [one.event.dagster_event for one in reversed(history) if one.event]
            return [one.asset_check_evaluation_data.passed for one in events if one]

        assert outcomes() == []
        keep(1)
        assert outcomes() == [False]
        shown = newest_evaluation(instance, key)
        assert shown is not None
        assert "shop.items" in str(shown.description)
        keep(2)
        assert outcomes() == [False]
        released = sqlite_store.holds.release(NAME, "table", "shop.items", "{}")
        with sqlite_store.fenced(lease) as writer:
            writer.holds.journaled(released, 2)
        assert outcomes() == [False, True]


def test_of_two_code_locations_one_has_the_pipeline(
    sqlite_store: StateStore, loaded: LoadedPipeline
) -> None:
    """The other one says who has it, and takes over once that one does not tick any more."""
    with dg.DagsterInstance.ephemeral() as instance:
        ours = current(instance, sqlite_store, loaded, "ours")
        theirs = current(instance, sqlite_store, loaded, "theirs")
        again = current(instance, sqlite_store, loaded, "ours")
        assert Kv(sqlite_store.database, "code_location").delete(NAME)  # as if it had expired
        later = current(instance, sqlite_store, loaded, "theirs")

    assert ours == again == later == loaded
    assert isinstance(theirs, dg.SkipReason)
    assert theirs.skip_message == (
        "NOT WELL: orders is in two code locations, and ours works on it: this one (theirs) does "
        "nothing; remove the pipeline from one of them"
    )


def test_costly_checks_are_evaluated_while_one_run_works(
    sqlite_store: StateStore, loaded: LoadedPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by its first tick, but once it is due: a range that Dagster does not have is reported, once."""
    lease = held(sqlite_store, "redis", run_id="resident")
    capture(sqlite_store, lease, 1)
    sqlite_store.ranges.mark_published(NAME, 1, "changes")
    key = dg.AssetCheckKey(asset_key(NAME, "changes"), "agreement")
    monkeypatch.setattr(module, "preflight_source", lambda *_: [])
    with dg.DagsterInstance.ephemeral() as instance:

        def failures() -> int:
            tick(instance, sqlite_store, loaded, cast("Any", SourceStub), Journal("memory://links"))
            storage = instance.event_log_storage
            return len(storage.get_asset_check_execution_history(key, limit=9))

        assert [failures(), failures()] == [0, 0]
        monkeypatch.setattr(module, "EVALUATED_SECONDS", 0.0)
        assert [failures(), failures()] == [1, 1]
        newest = newest_evaluation(instance, key)
        assert newest is not None
        assert "Dagster has no record of it" in str(newest.description)


@pytest.mark.parametrize("image", [None, "registry/shop:7"])
def test_a_tick_records_which_code_it_has(
    sqlite_store: StateStore,
    loaded: LoadedPipeline,
    monkeypatch: pytest.MonkeyPatch,
    image: str | None,
) -> None:
    """Our version, and in a container the image, so that a run of another one knows that it is old."""
    monkeypatch.delenv("DAGSTER_CURRENT_IMAGE", raising=False)
    if image is not None:
        monkeypatch.setenv("DAGSTER_CURRENT_IMAGE", image)
    held(sqlite_store, run_id="resident")
    with dg.DagsterInstance.ephemeral() as instance:
        tick(instance, sqlite_store, loaded, no_source, Journal("memory://links"))

    expected = __version__ if image is None else f"{__version__} in {image}"
    assert sqlite_store.pipelines.code(NAME) == expected


@pytest.mark.parametrize(("events", "plotted"), [("ranges", 3), ("tables", 1)])
def test_figures_are_plotted_with_ranges_only(
    sqlite_store: StateStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    events: str,
    plotted: int,
) -> None:
    """Once a minute while they change; with fewer events, health is reported only when it changes."""
    path = tmp_path / "orders.yaml"
    path.write_text(f"{FILE}  engine: {{dagster: {{events: {events}}}}}\n")
    monkeypatch.setattr(report, "_PLOT_SECONDS", 0.0)
    monkeypatch.setattr(report, "_plotted", {})
    lease = held(sqlite_store, "redis")
    with dg.DagsterInstance.ephemeral() as instance:
        for number in (1, 2, 3):
            capture(sqlite_store, lease, number)
            tick(instance, sqlite_store, load_pipeline(path), no_source, Journal("memory://links"))

        assert len(instance.fetch_materializations(health_key(NAME), limit=9).records) == plotted
