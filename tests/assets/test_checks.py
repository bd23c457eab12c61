"""Tests of a pipeline's checks with a real state store."""

from __future__ import annotations

import time
from pathlib import Path

import dagster as dg

from deltaforge_dagster.assets.checks import DAY, check_specs, evaluate, sensing_checks
from deltaforge_dagster.config.file.load import LoadedPipeline, load_pipeline
from deltaforge_dagster.sources.findings import Finding
from deltaforge_dagster.state.store import StateStore
from tests.pipeline.sensed import documents, pipeline, sense
from tests.processors.rows import Row
from tests.state.make import NAME, capture, dead_letter, deliver, held, new_segment, position

FILE = """\
metadata: {name: orders, tenant: acme}
spec:
  source:
    type: postgres
    config: {id: db, dsn: "postgres://u@localhost/d", slot: s, publication: p, tables: [t]}
  sinks:
    - {type: redis, config: {id: redis, uri: "redis://localhost", stream: s}}
"""


def test_delivered(sqlite_store: StateStore, tmp_path: Path, instance: dg.DagsterInstance) -> None:
    """A sink that is behind is an error; one that had lost data or is paused is a warning."""
    (tmp_path / "orders.yaml").write_text(FILE)
    loaded = load_pipeline(tmp_path / "orders.yaml")
    lease = held(sqlite_store)
    capture(sqlite_store, lease, 1, 2)

    def delivered() -> tuple[bool, dg.AssetCheckSeverity, str | None]:
        checks = evaluate(instance, sqlite_store, loaded, None, [])
        (one,) = [check for check in checks if check.check_name == "delivered"]
        return one.passed, one.severity, one.description

    error, warning = dg.AssetCheckSeverity.ERROR, dg.AssetCheckSeverity.WARN
    with sqlite_store.fenced(lease) as writer:
        writer.checkpoints.resume_at("redis", 1, 2, True, notice="had lost data")
    assert delivered() == (False, error, "1 segment behind, range 1; had lost data")
    deliver(sqlite_store, lease, "redis", 2)
    assert delivered() == (False, warning, "had lost data")
    with sqlite_store.fenced(lease) as writer:
        writer.checkpoints.set_notice("redis", None)
    assert delivered()[0] is True
    sqlite_store.checkpoints.pause(NAME, "redis")
    capture(sqlite_store, lease, 3)
    resume = "to resume it: deltaforge sink resume orders redis"
    assert delivered() == (False, warning, f"paused, 1 segment kept for it; {resume}")
    assert loaded.name == NAME


def test_preflight(sqlite_store: StateStore, tmp_path: Path, instance: dg.DagsterInstance) -> None:
    """Errors fail, warnings warn, notes pass; each has its statement."""
    (tmp_path / "orders.yaml").write_text(FILE)
    loaded = load_pipeline(tmp_path / "orders.yaml")
    fine = Finding("slot", "ok", "there")
    known = Finding("keys", "note", "none: t", "ALTER TABLE t")
    odd = Finding("retention", "warning", "60 %", "SET x")
    wrong = Finding("wal_level", "error", "replica")

    def outcome(*found: Finding) -> tuple[bool, dg.AssetCheckSeverity, str | None]:
        checks = evaluate(instance, sqlite_store, loaded, None, found)
        (one,) = [check for check in checks if check.check_name == "preflight"]
        return one.passed, one.severity, one.description

    error, warning = dg.AssetCheckSeverity.ERROR, dg.AssetCheckSeverity.WARN
    assert outcome(fine)[0] is True
    assert outcome(fine, known) == (True, warning, "keys: none: t; run: ALTER TABLE t")
    assert outcome(known, odd)[:2] == (False, warning)
    assert outcome(odd, wrong) == (False, error, "wal_level: replica\nretention: 60 %; run: SET x")


def test_dead_letters(
    sqlite_store: StateStore, tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    """Dead letters are a warning, and an error if the queue is almost full; the result has their age."""
    (tmp_path / "orders.yaml").write_text(
        FILE + "  journal: {enabled: true, dlq: {max_entries: 20}}\n"
    )
    loaded = load_pipeline(tmp_path / "orders.yaml")
    lease = held(sqlite_store)

    def found(entries: int) -> dg.AssetCheckEvaluation:
        with sqlite_store.fenced(lease) as writer:
            letters = [dead_letter(number) for number in range(entries)]
            writer.dead_letters.add("redis", letters, max_entries=99, overflow="block")
        checks = evaluate(instance, sqlite_store, loaded, None, [])
        (one,) = [check for check in checks if check.check_name == "dead_letters"]
        return one

    error, warning = dg.AssetCheckSeverity.ERROR, dg.AssetCheckSeverity.WARN
    assert found(0).passed
    some = found(3)
    assert (some.passed, some.severity) == (False, warning)
    assert some.description is not None
    assert some.description.endswith("deltaforge dlq list orders")
    assert some.metadata["entries"].value == 3
    age = some.metadata["oldest_seconds"].value
    assert isinstance(age, int)
    assert age < 100
    nearly = found(16)
    assert (nearly.severity, "80% full, 16 of 20" in str(nearly.description)) == (warning, True)
    assert found(19).severity == error


def test_freshness(sqlite_store: StateStore, tmp_path: Path, instance: dg.DagsterInstance) -> None:
    """A sink that lacks an old change is late; one that has everything is fresh, however quiet the source is."""
    (tmp_path / "orders.yaml").write_text(
        FILE + "  engine: {dagster: {freshness: {warn_seconds: 100, error_seconds: 1000}}}\n"
    )
    loaded = load_pipeline(tmp_path / "orders.yaml")
    lease = held(sqlite_store)

    def outcome() -> tuple[bool, dg.AssetCheckSeverity, str | None]:
        checks = evaluate(instance, sqlite_store, loaded, None, [])
        (one,) = [check for check in checks if check.check_name == "freshness"]
        return one.passed, one.severity, one.description

    def capture_of(number: int, *, ago: float) -> None:
        at = int((sqlite_store.now() - ago) * 1e6)
        with sqlite_store.fenced(lease) as writer:
            opened = writer.ranges.open(position(number - 1), "spec-1", number)
            writer.segments.add(new_segment(number, first_ts_us=at, last_ts_us=at), opened)
            writer.ranges.close(opened, "max_events", f"hash-{number}")

    error, warning = dg.AssetCheckSeverity.ERROR, dg.AssetCheckSeverity.WARN
    assert outcome()[0] is True
    capture_of(1, ago=5000)
    capture_of(2, ago=500)
    assert outcome() == (False, error, "lacks a change that is older than 1000 s")
    deliver(sqlite_store, lease, "redis", 1)
    assert outcome() == (False, warning, "lacks a change that is older than 100 s")
    deliver(sqlite_store, lease, "redis", 2)
    assert outcome()[0] is True
    capture_of(3, ago=0)
    assert outcome()[0] is True
    with sqlite_store.fenced(lease) as writer:
        writer.checkpoints.detach("redis", "the journal is full")
    assert outcome() == (False, error, "detached: nothing is delivered to it")


WARN = dg.AssetCheckSeverity.WARN


def at(rows: list[Row], seconds: float) -> list[Row]:
    """Return rows whose events happened at this time."""
    return [{**one, "ts_us": int(seconds * 1e6)} for one in rows]


def outcomes(store: StateStore, loaded: LoadedPipeline) -> dict[str, tuple[bool, str | None]]:
    """Return for each check whether it passed, and its description."""
    found = list(sensing_checks(store, loaded))
    assert {one.severity for one in found} <= {WARN}
    return {one.check_name: (one.passed, one.description) for one in found}


def test_only_where_it_is_enabled(sqlite_store: StateStore, tmp_path: Path) -> None:
    """A pipeline without sensing does not have its checks."""
    for sensing, names in (("enabled: true", {"sensing", "drift"}), ("enabled: false", set())):
        loaded = pipeline(tmp_path, sensing)
        assert {one.name for one in check_specs(loaded)} & {"sensing", "drift"} == names
        assert outcomes(sqlite_store, loaded).keys() == names


def test_drift_warns_for_a_day(sqlite_store: StateStore, tmp_path: Path) -> None:
    """Differing columns are named with the kind of difference and without values; old drift is not."""
    loaded = pipeline(tmp_path)
    sense(sqlite_store, loaded, at(documents(31), time.time()))
    assert outcomes(sqlite_store, loaded) == {
        "sensing": (True, None),
        "drift": (False, "public.orders.gone: missing_column\npublic.orders.id: unexpected_null"),
    }


def test_what_is_long_past_passes(sqlite_store: StateStore, tmp_path: Path) -> None:
    """Drift that was last seen more than a day ago no longer counts."""
    loaded = pipeline(tmp_path, "enabled: true")
    sense(sqlite_store, loaded, at(documents(31), time.time() - DAY - 60))
    assert outcomes(sqlite_store, loaded)["drift"] == (True, None)


def test_a_failure_warns(sqlite_store: StateStore, tmp_path: Path) -> None:
    """The check has the reason why sensing has stopped."""
    loaded = pipeline(tmp_path)
    lease = sense(sqlite_store, loaded, documents(2))
    with sqlite_store.fenced(lease) as writer:
        writer.sensing.fail("segment 2: missing")
    assert outcomes(sqlite_store, loaded)["sensing"] == (False, "segment 2: missing")
