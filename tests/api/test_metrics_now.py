"""Tests of metrics that are computed at scrape time, and of failed runs, with a real state store."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import dagster as dg
import pytest

from deltaforge_dagster.assets.names import RUN_TAG, job_name
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.definitions import build_definitions
from deltaforge_dagster.state.reconciliations import TableProof
from deltaforge_dagster.state.records import EarlyConfirmation, HoldPart, SourceLog
from deltaforge_dagster.state.store import StateStore
from tests.api.conftest import Api
from tests.api.scraped import scrape
from tests.state.make import NAME, capture, deliver, expire, held, new_segment, position

GONE = """\
metadata: {{name: gone, tenant: acme}}
spec:
  source:
    type: turso
    config: {{id: db, url: {file}, tables: [orders], cdc_mode: triggers}}
  sinks:
    - {{type: redis, config: {{id: redis, uri: "redis://localhost:1", stream: s}}}}
"""


def test_how_late_each_sink_is(sqlite_store: StateStore) -> None:
    """A sink's lag is the age of the oldest change that it lacks; it is 0 for a sink that has everything."""
    lease = held(sqlite_store, "redis", "behind")
    at = int((sqlite_store.now() - 5000) * 1e6)
    with sqlite_store.fenced(lease) as writer:
        opened = writer.ranges.open(position(0), "spec-1", 1)
        writer.segments.add(new_segment(1, first_ts_us=at, last_ts_us=at), opened)
    deliver(sqlite_store, lease, "redis", 1)
    found = scrape(sqlite_store)
    assert found.of("sink_lag_seconds", pipeline=NAME, sink="redis") == 0
    assert found.of("sink_lag_seconds", pipeline=NAME, sink="behind") == pytest.approx(5000, 0.1)


def test_when_a_table_was_verified(sqlite_store: StateStore) -> None:
    """The metric has the time of the newest proof of each table of a sink."""
    held(sqlite_store)
    for at in (5.0, 7.0):
        proof = TableProof("copy", "public.items", position(1), at, 10)
        sqlite_store.reconciliations.prove(NAME, proof)
    found = scrape(sqlite_store)
    assert found.of("table_verified_ts", pipeline=NAME, sink="copy", table="public.items") == 7


def test_what_is_held_back(sqlite_store: StateStore) -> None:
    """Changes count as held until they are in the journal."""
    lease = held(sqlite_store)
    assert scrape(sqlite_store).of("held_events", pipeline=NAME) == 0
    part = HoldPart("table", "shop.items", "nobody knows", position(3), "held-1", "s", 2, 9)
    with sqlite_store.fenced(lease) as writer:
        writer.holds.keep([part], position(4))
    assert scrape(sqlite_store).of("held_events", pipeline=NAME) == 2
    capture(sqlite_store, lease, 1, 2)
    released = sqlite_store.holds.release(NAME, "table", "shop.items", "{}")
    with sqlite_store.fenced(lease) as writer:
        writer.holds.journaled(released, 2)
    assert scrape(sqlite_store).of("held_events", pipeline=NAME) == 0


def test_lost_runs_are_counted_by_who_comes_next(store: StateStore) -> None:
    """The next holder counts a lost run, but not one that released its lease or may only be slow."""

    def lost() -> float:
        return scrape(store).of("run_failures_total", pipeline=NAME, reason="lost")

    lease = held(store, run_id="killed")
    assert store.leases.acquire(NAME, "early", 60) is None
    expire(store)
    assert lost() == 0
    following = store.leases.acquire(NAME, "following", 60)
    assert following is not None
    assert lost() == 1
    with store.fenced(following) as writer:
        writer.lease.release()
    assert store.leases.acquire(NAME, "last", 60) is not None
    assert lost() == 1
    assert lease.epoch < following.epoch


def test_failed_runs_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A live run that cannot read its source fails in Dagster and counts once."""
    (tmp_path / "no.db").write_text("no database, however long one looks at it\n" * 99)
    file = tmp_path / "gone.yaml"
    file.write_text(GONE.format(file=tmp_path / "no.db"))
    monkeypatch.setenv("DELTAFORGE_PIPELINES", str(file))
    settings = Settings.from_env()
    job = build_definitions(settings).resolve_job_def(job_name("gone"))
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        tags = {RUN_TAG: "live"}
        ended = job.execute_in_process(instance=instance, tags=tags, raise_on_error=False)
    assert not ended.success
    store = StateStore.open(settings.state_url)
    found = scrape(store)
    store.close()
    assert found.of("run_failures_total", pipeline="gone", reason="failed") == 1
    assert found.of("run_failures_total", pipeline="gone") == 1


def test_the_server_itself(api: Api) -> None:
    """CPU, memory and open files of the server have the standard names of Prometheus clients."""
    text = api.client.get("/metrics").text
    names = {
        line.split()[0]: float(line.split()[1])
        for line in text.splitlines()
        if " " in line and line.startswith("process_")
    }
    for name in ("process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds"):
        assert names[name] > 0
    accept = {"Accept": "application/openmetrics-text;version=1.0.0"}
    assert "process_cpu_seconds_total" in api.client.get("/metrics", headers=accept).text


def test_the_sources_log(api: Api) -> None:
    """Metrics and API show what was last seen of it; nothing before that, and no figure that a source does not have."""
    api.create("orders")
    ops = api.client.get("/pipelines/orders").json()["ops"]
    assert (ops["source_log"], ops["confirmed_early"]) == (None, None)
    now = api.store.now()
    seen = SourceLog(
        now,
        4096,
        now - 5,
        unread=True,
        retained=9000,
        unread_since=now - 60,
        unconfirmed=8000,
        unconfirmed_since=now - 120,
        limit=10_000,
        limited_by="max_slot_wal_keep_size",
        growth=1.5,
        seconds_left=666.0,
    )
    api.store.pipelines.note_source_log("orders", seen)
    lease = api.store.leases.acquire("orders", "run-1", 60)
    assert lease is not None
    with api.store.fenced(lease) as writer:
        writer.pipeline.set_early_confirmation(EarlyConfirmation(now - 7, "it was too much"))

    ops = api.client.get("/pipelines/orders").json()["ops"]
    assert ops["source_log"] == asdict(seen)
    assert ops["confirmed_early"] == {"since": now - 7, "why": "it was too much"}
    found = scrape(api.store, api.context.loaded("orders"))

    def value(name: str) -> float:
        return found.of(f"source_log_{name}", pipeline="orders", source="db")

    assert value("ahead_bytes") == 4096
    assert value("ahead_seconds") == pytest.approx(60, abs=10)
    assert value("unconfirmed_bytes") == 8000
    assert value("unconfirmed_seconds") == pytest.approx(120, abs=10)
    assert (value("retained_bytes"), value("limit_bytes")) == (9000, 10_000)
    assert value("seconds_left") == 666
    assert found.of("confirmed_early", pipeline="orders") == 1
    assert found.of("journal_lacking_bytes", pipeline="orders") == 0
    assert found.of("journal_limit_bytes", pipeline="orders") == 10 << 30
    metrics = api.client.get("/metrics").text
    assert 'deltaforge_source_log_ahead_bytes{pipeline="orders",source="db"} 4096.0' in metrics
    assert "deltaforge_source_log_room_bytes{" not in metrics
