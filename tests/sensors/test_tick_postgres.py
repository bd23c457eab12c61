"""Tests of ticks with a real PostgreSQL server that is stopped, or that does not send captured tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

import dagster as dg
import psycopg
import pytest

from deltaforge_dagster.assets.names import REASON_TAG, RUN_TAG, asset_key, health_key
from deltaforge_dagster.config.file.load import LoadedPipeline, load_pipeline
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.health.health import Health, health
from deltaforge_dagster.resources.platform import build_source
from deltaforge_dagster.sensors import report, watch_room
from deltaforge_dagster.sensors import tick as module
from deltaforge_dagster.sensors.report import newest_evaluation
from deltaforge_dagster.sensors.tick import tick
from deltaforge_dagster.sensors.watch_room import WatchRoom
from deltaforge_dagster.state.records import SourceLog
from deltaforge_dagster.state.store import StateStore
from tests.fix_postgres import StartPostgres
from tests.pipeline.changes import eventually
from tests.sources.postgres.bench import PostgresBench

pytestmark = pytest.mark.postgres

FILE = """\
metadata: {{name: orders, tenant: acme}}
spec:
  source:
    type: postgres
    config: {{id: db, dsn: "{dsn}", slot: {slot}, publication: p, tables: [public.orders, public.items]}}
  sinks:
    - {{type: redis, config: {{id: redis, uri: "redis://localhost:1", stream: s}}}}
"""


@dataclass
class Ticked:
    """A pipeline that only ticks work on."""

    store: StateStore
    loaded: LoadedPipeline
    instance: dg.DagsterInstance
    journal: str = "memory://looked"

    def tick(self, room: WatchRoom | None = None) -> str:
        """Tick; return why nothing is started."""
        found = self.answer(room)
        assert isinstance(found, dg.SkipReason), found
        return str(found.skip_message)

    def answer(self, room: WatchRoom | None) -> dg.RunRequest | dg.SkipReason:
        """Tick; return the answer."""
        return tick(
            self.instance,
            self.store,
            self.loaded,
            lambda: build_source(self.loaded.spec),
            Journal(self.journal),
            room=room,
        )

    def check(self, name: str) -> str | None:
        """Return the description of a check of `changes`; None if it passes or was never evaluated."""
        return self._said(dg.AssetCheckKey(asset_key("orders", "changes"), name))

    def shown(self) -> object:
        """The status that the Catalog shows for the asset of the whole pipeline."""
        event = self.instance.get_latest_materialization_event(health_key("orders"))
        assert event is not None
        assert event.asset_materialization is not None
        return event.asset_materialization.metadata["status"].value

    def well(self) -> str | None:
        """The description of the check of the whole pipeline; None if it passes."""
        return self._said(dg.AssetCheckKey(health_key("orders"), "well"))

    def _said(self, key: dg.AssetCheckKey) -> str | None:
        shown = newest_evaluation(self.instance, key)
        return None if shown is None or shown.passed else str(shown.description)

    @property
    def health(self) -> Health:
        """The health of the pipeline."""
        return health(self.store, self.loaded)


@pytest.fixture
def ticked(
    sqlite_store: StateStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[PostgresBench], Ticked]]:
    """Start a pipeline over a database with its first tick."""
    monkeypatch.setattr(module, "_preflighted", {})  # of other tests' pipelines of that name
    threads = {"sensors": {"use_threads": True, "num_workers": 8}}
    with dg.DagsterInstance.ephemeral(settings=threads) as instance:

        def begin(bench: PostgresBench) -> Ticked:
            (tmp_path / "orders.yaml").write_text(FILE.format(dsn=bench.dsn, slot=bench.slot))
            made = Ticked(sqlite_store, load_pipeline(tmp_path / "orders.yaml"), instance)
            assert made.tick() == "start position fixed"
            return made

        yield begin


def test_a_start_that_has_to_wait_is_left_to_a_run(
    postgres_dsn: str, ticked: Callable[[PostgresBench], Ticked]
) -> None:
    """A tick has no time for a slot that waits for an open transaction; a run has."""
    with PostgresBench(postgres_dsn) as bench:
        with psycopg.connect(postgres_dsn) as other:
            other.execute("SELECT txid_current()")
            with pytest.raises(AssertionError, match=r"RunRequest.*'start'"):
                ticked(bench)
        assert bench.reader() is None
        assert ticked(bench).health.well


def test_a_server_that_is_stopped(
    start_postgres: StartPostgres, ticked: Callable[[PostgresBench], Ticked]
) -> None:
    """The next tick reports it everywhere, even while it waits after an empty run, and clears it after a restart."""
    server = start_postgres(None)
    with PostgresBench(server.create_database()) as bench:
        made = ticked(bench)
        made.store.pipelines.set_probe("orders", after=made.store.now() + 3600, wait=60.0)
        assert "asking again" in made.tick()
        assert made.health.status == "running"

        server.stop(immediate=True)
        assert made.tick().startswith("NOT WELL: source: PostgreSQL ")
        found = made.health
        assert (found.status, found.well) == ("failed", False)
        assert found.problems[0].next_attempt_at is not None
        assert found.problems[0].text == made.check("source")
        assert made.well() == f"error: source: {found.problems[0].text}"

        server.restart()
        assert "asking again" in made.tick()
        assert made.health.problems == ()
        assert made.check("source") is None
        assert made.well() is None
        bench.connection.close()
        bench.connection = psycopg.connect(bench.dsn, autocommit=True)


def test_a_table_that_is_no_longer_sent(
    postgres_dsn: str, ticked: Callable[[PostgresBench], Ticked]
) -> None:
    """A recreated table missing from a user's publication is reported with the statement that adds it, and then with what sinks lack."""
    with PostgresBench(postgres_dsn) as bench:
        bench.execute("CREATE PUBLICATION p FOR TABLE orders, items")
        made = ticked(bench)
        assert made.tick()
        assert made.health.well
        assert made.shown() == "running"

        bench.execute("DROP TABLE orders", "CREATE TABLE orders (id int PRIMARY KEY, v text)")
        statement = 'ALTER PUBLICATION "p" ADD TABLE "public"."orders"'
        assert statement in made.tick()
        failed = made.health
        assert failed.status == made.shown() == "failed"
        assert failed.problems[0].remedy == (statement,)
        assert statement in str(made.check("source"))
        assert statement in str(made.check("preflight"))

        bench.execute(statement)
        assert "NOT WELL: table public.orders: the table was dropped" in made.tick()
        assert made.health.status == "running"
        assert made.store.gaps.acknowledge("orders") == ["public.orders"]
        assert "NOT WELL" not in made.tick()
        assert made.health.problems == ()
        assert made.check("source") is None
        assert made.check("preflight") is None

        bench.execute("ALTER PUBLICATION p SET (publish = 'insert, truncate')")
        assert "NOT WELL" not in made.tick()
        (found,) = health(made.store, made.loaded).problems
        assert found.severity == "warning"
        assert "does not send every update, delete" in found.text


def test_a_journal_that_cannot_be_written(
    postgres_dsn: str, ticked: Callable[[PostgresBench], Ticked], tmp_path: Path
) -> None:
    """The next tick reports it before anything is captured, and clears it once it can be written."""
    with PostgresBench(postgres_dsn) as bench:
        made = ticked(bench)
        (tmp_path / "journal").write_text("not a folder")
        made.journal = (tmp_path / "journal").as_uri()
        said = f"journal folder {tmp_path}/journal: not a directory"
        assert made.tick() == f"NOT WELL: journal: {said}"
        assert made.health.error == made.check("source") == said
        (tmp_path / "journal").unlink()
        assert "NOT WELL" not in made.tick()
        assert made.health.problems == ()


def test_a_scheduled_tick_says_when_it_comes_again(
    start_postgres: StartPostgres, ticked: Callable[[PostgresBench], Ticked], tmp_path: Path
) -> None:
    """The next attempt is that of the schedule, which takes the sensor's place."""
    server = start_postgres(None)
    with PostgresBench(server.create_database()) as bench:
        made = ticked(bench)
        path = tmp_path / "orders.yaml"
        path.write_text(path.read_text() + '  engine: {dagster: {schedule: "7 3 * * *"}}\n')
        made.loaded = load_pipeline(path)
        server.stop(immediate=True)
        assert made.tick().startswith("NOT WELL: source: PostgreSQL ")
        at = made.health.problems[0].next_attempt_at
        assert at is not None
        assert datetime.fromtimestamp(at, UTC).strftime("%H:%M") == "03:07"
        server.restart()
        bench.connection.close()
        bench.connection = psycopg.connect(bench.dsn, autocommit=True)


def test_a_slot_that_is_gone(postgres_dsn: str, ticked: Callable[[PostgresBench], Ticked]) -> None:
    """A missing slot is one message with the commands that fix it."""
    with PostgresBench(postgres_dsn) as bench:
        made = ticked(bench)
        bench.drop_slot()
        said = made.tick()
        assert "is gone" in said
        assert "run: deltaforge recover orders" in said


@contextmanager
def watching(
    bench: PostgresBench, made: Ticked, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Future[dg.RunRequest | dg.SkipReason]]:
    """Tick in another thread; yield once the tick has found nothing and asks where the log ends."""
    monkeypatch.setattr(watch_room, "WATCH_SECONDS", 300.0)
    asks = (
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'deltaforge/orders'"
        " AND query LIKE 'SELECT pg_current_wal_flush_lsn%%' AND query_start > %s"
    )
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(made.answer, WatchRoom(1))
        eventually(lambda: bench.value(asks, "-infinity"))
        seen = bench.value("SELECT clock_timestamp()")
        eventually(lambda: bench.value(asks, seen))
        assert not answer.done()
        yield answer
        bench.execute(bench.insert("orders", 99))  # also ends a watch that a test has not ended


def test_a_tick_answers_when_something_is_committed(
    postgres_dsn: str,
    ticked: Callable[[PostgresBench], Ticked],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tick that began before the commit requests a run; health was reported before it watched."""
    with PostgresBench(postgres_dsn) as bench:
        made = ticked(bench)
        with watching(bench, made, monkeypatch) as answer:
            assert made.shown() == "running"
            bench.execute(bench.insert("other", 1))
            bench.execute(bench.insert("orders", 1))

            requested = answer.result()
        assert isinstance(requested, dg.RunRequest)
        assert requested.tags[RUN_TAG] == "live"
        assert requested.tags[REASON_TAG] == "changes"


def test_a_tick_without_a_change_ends(
    postgres_dsn: str,
    ticked: Callable[[PostgresBench], Ticked],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When its time is up the tick says what it says without a watch."""
    with PostgresBench(postgres_dsn) as bench:
        made = ticked(bench)
        monkeypatch.setattr(watch_room, "WATCH_SECONDS", 2.0)
        assert made.tick(WatchRoom(1)) == made.tick()


def pause(store: StateStore) -> None:
    """Pause the pipeline."""
    store.pipelines.set_desired_state("orders", "paused")


def work(store: StateStore) -> None:
    """Begin to work on the pipeline, as `deltaforge run` does."""
    assert store.leases.acquire("orders", "by hand", 300) is not None


@pytest.mark.parametrize(
    ("happens", "said"), [(pause, "capture is paused"), (work, "run by hand is working on it")]
)
def test_what_happens_during_a_watch_counts(
    postgres_dsn: str,
    ticked: Callable[[PostgresBench], Ticked],
    monkeypatch: pytest.MonkeyPatch,
    happens: Callable[[StateStore], None],
    said: str,
) -> None:
    """No run is requested if somebody has paused the pipeline, or works on it, since the tick began."""
    with PostgresBench(postgres_dsn) as bench:
        made = ticked(bench)
        with watching(bench, made, monkeypatch) as answer:
            happens(made.store)
            bench.execute(bench.insert("orders", 1))

            skipped = answer.result()
        assert isinstance(skipped, dg.SkipReason)
        assert said in str(skipped.skip_message)


class NoRoom(WatchRoom):
    """Fails the test when a tick wants to watch."""

    def watch(self, *arguments: object) -> NoReturn:
        """Fail."""
        pytest.fail(f"watched: {arguments}")


def test_nothing_waits_behind_a_watch(
    start_postgres: StartPostgres, ticked: Callable[[PostgresBench], Ticked]
) -> None:
    """A tick does not watch while a snapshot's run may be due, or the source is down."""
    server = start_postgres(None)
    with PostgresBench(server.create_database()) as bench:
        made = ticked(bench)
        server.stop(immediate=True)
        assert "NOT WELL" in made.tick(NoRoom(1))
        server.restart()
        made.store.snapshots.request("orders", cause="command")
        assert "no changes" in made.tick(NoRoom(1))
        bench.connection.close()
        bench.connection = psycopg.connect(bench.dsn, autocommit=True)


def test_log_that_is_not_captured(
    postgres_dsn: str, ticked: Callable[[PostgresBench], Ticked], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ticks measure it, also while the pipeline is paused, and say whether it has changes of captured tables."""
    with PostgresBench(postgres_dsn) as bench:
        pipeline = ticked(bench)

        def log(statement: str) -> SourceLog:
            bench.execute("SET synchronous_commit = on", statement)
            pipeline.answer(None)
            found = pipeline.health.log
            assert found is not None
            assert found.bytes is not None
            assert found.retained is not None
            assert found.retained >= found.bytes > 0
            return found

        first = log("INSERT INTO other SELECT n, 'x' FROM generate_series(1, 1000) n")
        assert first.unread is False
        assert first.bytes is not None
        pipeline.store.pipelines.set_desired_state("orders", "paused")
        second = log("INSERT INTO orders SELECT n, 'x' FROM generate_series(1, 1000) n")
        assert second.unread is None
        assert (second.bytes or 0) > first.bytes + 50_000
        assert second.growing_since == first.growing_since or first.seen_at
        monkeypatch.setattr(report, "_PLOT_SECONDS", 0.0)
        third = log("INSERT INTO orders VALUES (0, 'x')")
        assert third.growing_since == second.growing_since
        key = health_key("orders")
        event = pipeline.instance.get_latest_materialization_event(key)
        assert event is not None
        assert event.asset_materialization is not None
        figures = event.asset_materialization.metadata
        assert figures["log_ahead_bytes"].value == third.bytes
        assert figures["log_retained_bytes"].value == third.retained
        assert figures["log_unconfirmed_bytes"].value == third.unconfirmed == third.bytes
        assert third.unread_since == first.unread_since
        assert (third.limit, third.limited_by, third.room) == (None, None, None)
        assert {"behind_segments", "dead_letters", "lag_seconds"} < figures.keys()
        pipeline.store.pipelines.set_desired_state("orders", "running")
        assert log("INSERT INTO orders VALUES (-1, 'x')").unread is True
