"""Metrics are counted once, with what they count, and add up over runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.state import metric_families as families
from deltaforge_dagster.state.metric_families import FAMILIES
from deltaforge_dagster.state.metrics import Tally
from deltaforge_dagster.state.store import StateStore
from tests.state.make import NAME, capture, held, new_segment, position


def numbers(store: StateStore, name: str) -> dict[str, float]:
    """Return what is stored of a family, by its labels."""
    return {
        ",".join(one.labels.values()): one.value for one in store.metrics.read() if one.name == name
    }


def events(count: int) -> Tally:
    """Return the tally of some messages."""
    tally = Tally()
    tally.add(families.SINK_EVENTS, count, sink="redis")
    return tally


def test_counts_add_up_and_gauges_replace(store: StateStore) -> None:
    """Counters of several writes and runs add up, a gauge is its last value, on every database."""
    lease = held(store, "redis")
    for amount in (3, 4):
        tally = events(amount)
        tally.set(families.SOURCE_LAG, float(amount), source="db")
        tally.observe(families.SINK_LATENCY, 0.003, sink="redis")
        with store.fenced(lease) as writer:
            writer.metrics.count(tally)
    assert numbers(store, "sink_events_total") == {"redis": 7}
    assert numbers(store, "source_lag_seconds") == {"db": 4}
    assert numbers(store, "sink_latency_seconds") == {"0.005,redis": 2}
    assert numbers(store, "sink_latency_seconds_sum") == {"redis": pytest.approx(0.006)}


def test_a_write_that_is_repeated_counts_once(sqlite_store: StateStore) -> None:
    """A segment or checkpoint written again, its first answer lost, is not counted again."""
    lease = held(sqlite_store, "redis")
    for _ in range(2):
        with sqlite_store.fenced(lease) as writer:
            number = writer.ranges.open(position(0), "hash", 1)
            writer.segments.add(new_segment(1), number, tally=events(1))
    for _ in range(2):
        with sqlite_store.fenced(lease) as writer:
            writer.checkpoints.advance("redis", 1, 2, True, position(1), tally=events(10))
    assert numbers(sqlite_store, "sink_events_total") == {"redis": 11}


def test_what_is_not_written_is_not_counted(sqlite_store: StateStore) -> None:
    """A transaction that fails counts nothing."""
    lease = held(sqlite_store, "redis")

    def fail() -> None:
        with sqlite_store.fenced(lease) as writer:
            writer.metrics.count(events(1))
            writer.checkpoints.advance("redis", 9, 0, True, None)

    with pytest.raises(NotAllowed):
        fail()
    assert sqlite_store.metrics.read() == []


def test_changes_of_the_desired_state_are_counted(sqlite_store: StateStore) -> None:
    """A pause and what follows it count once each, however often they are asked for."""
    held(sqlite_store)
    for want in ("paused", "paused", "running", "running", "stopped", "running"):
        sqlite_store.pipelines.set_desired_state(NAME, want)
    assert numbers(sqlite_store, "pipeline_pauses_total") == {"": 1}
    assert numbers(sqlite_store, "pipeline_resumes_total") == {"": 2}


def test_lacking_rows(store: StateStore) -> None:
    """A sink lacks the rows behind its checkpoint, also within a segment; nothing if detached."""
    lease = held(store, "all", "none", "some", "gone")
    capture(store, lease, 1, 2, 3)
    with store.fenced(lease) as writer:
        writer.checkpoints.advance("all", 3, 2, True, None)
        writer.checkpoints.advance("some", 2, 0, False, None)
        writer.checkpoints.detach("gone", "full")
    assert store.metrics.lacking_rows() == {(NAME, "none"): 9, (NAME, "some"): 5}


@given(values=st.lists(st.floats(0, 100), min_size=1))
def test_every_observation_is_in_one_bucket(values: list[float]) -> None:
    """The buckets hold each value once, the one with the lowest bound that is not below it."""
    tally = Tally()
    for value in values:
        tally.observe(families.SINK_LATENCY, value, sink="s")
    rows, _ = tally.rows("p")
    buckets = {
        float(json.loads(row["labels"])["le"]): row["value"]
        for row in rows
        if row["name"] == "sink_latency_seconds"
    }
    bounds = [*families.SECONDS, float("inf")]
    for low, bound in zip([-1.0, *bounds], bounds, strict=False):
        assert buckets.get(bound, 0) == sum(low < value <= bound for value in values)


def test_labels_are_those_of_the_family() -> None:
    """A metric cannot be counted with other labels than it has."""
    with pytest.raises(ValueError, match="sink_events_total has the labels"):
        Tally().add(families.SINK_EVENTS, table="orders")


def test_names() -> None:
    """Names are Prometheus' own: counters end as people know them, labels are few and plain."""
    for name, family in FAMILIES.items():
        assert name == family.name
        assert name.replace("_", "").isalnum()
        assert name.islower()
        assert len(set(family.labels)) == len(family.labels) <= 4
        assert bool(family.buckets) == (family.kind == "histogram")
        assert list(family.buckets) == sorted(set(family.buckets))


def test_a_store_of_before_counts_from_zero(tmp_path: Path) -> None:
    """Opening a store makes room for metrics; nothing is counted yet."""
    store = StateStore.open(f"sqlite:///{tmp_path}/state.db")
    assert store.metrics.read() == []
    store.close()
