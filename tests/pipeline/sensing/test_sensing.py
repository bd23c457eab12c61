"""Sensing beside deliveries: what it finds out, how often it counts, and what its failures cost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.pipeline.encode import encoder
from deltaforge_dagster.pipeline.run.live import RunOutcome
from deltaforge_dagster.pipeline.sensing import views
from deltaforge_dagster.pipeline.sensing.job import learned_by
from deltaforge_dagster.sensing.learning import Learned
from deltaforge_dagster.state.metric_families import SCHEMA_EVENTS
from tests.e2e.conftest import Shop, shop
from tests.e2e.deployment import eventually
from tests.fix_spark import SparkAddress
from tests.pipeline.live import Background, Feed, opened_feed

__all__ = ["shop"]

pytestmark = [
    pytest.mark.spark,
    pytest.mark.postgres,
    pytest.mark.redis,
    pytest.mark.timeout(1500),  # the first may wait for the compiler
]

RUN = "{idle_seconds: 600, lease_seconds: 30, renew_seconds: 1}"
SENSING = """\
  processors:
    - {type: filter, ops: [create]}
  schema_sensing:
    enabled: true
    sampling: {warmup_events: 20, sample_rate: 2}
    high_cardinality: {min_events: 20}
"""

LEARNED_BY = "deltaforge_dagster.pipeline.sensing.sensing.learned_by"


@pytest.fixture
def feed(shop: Shop, spark_server: SparkAddress, tmp_path: Path) -> Iterator[Feed]:
    """A pipeline with sensing, behind a processor."""
    shop.execute("ALTER TABLE customers ADD COLUMN doc jsonb")
    path = tmp_path / "feed.yaml"
    text = shop.pipeline("feed", run=RUN) + SENSING
    with opened_feed(shop, path, text, spark_server) as opened:
        yield opened


def insert(shop: Shop, first: int, count: int) -> None:
    """Insert customers, each with a document whose map has a name of its own."""
    shop.execute(
        "INSERT INTO customers SELECT n, 'c' || n, jsonb_build_object('plan', 'free', 'sizes', "
        "jsonb_build_object('unit', 'cm', 'k' || n, n)) "
        f"FROM generate_series({first}, {first + count - 1}) n"
    )


def sensed(feed: Feed) -> int:
    """Return up to which segment is known, -1 while it is not all that is captured."""
    row, progress = feed.store.pipelines.get("feed"), feed.store.sensing.progress("feed")
    assert row is not None
    reached = 0 if progress is None else progress.segment
    return reached if reached == row.next_segment - 1 else -1


def ended(run: Background) -> RunOutcome:
    """Ask a run to end, and wait for it as long as a busy machine takes."""
    run.run.request_end()
    return run.outcome(180)


def looked_at(feed: Feed) -> float:
    """Return how many rows were looked at, as they are counted for metrics."""
    return sum(one.value for one in feed.store.metrics.read() if one.name == SCHEMA_EVENTS.name)


def test_documents_and_drift(feed: Feed, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark learns from what the chain left, run after run; each row counts once, and sinks have all."""
    monkeypatch.setattr(encoder, "SMALL_ROWS", -1)
    run = feed.begin()
    insert(shop, 1, 50)
    shop.execute("UPDATE customers SET name = 'dropped' WHERE id = 1")
    eventually(lambda: sensed(feed) > 0, seconds=400)
    assert ended(run).reason == "asked"
    run = feed.begin()
    insert(shop, 51, 30)
    eventually(lambda: len(feed.delivered("customers")) == 80, seconds=400)
    eventually(lambda: sensed(feed) > 1, seconds=400)
    ended(run)

    (doc,) = views.schemas(feed.store, feed.loaded)
    assert (doc["table"], doc["event_count"], doc["sampled_count"]) == (
        "public.customers:doc", 80, 20 + 30,
    )  # fmt: skip
    paths = views.classifications(feed.store, feed.loaded, "customers:doc")["paths"]
    assert paths["sizes"]["has_dynamic_fields"]
    assert paths["sizes"]["stable_fields"] == ["unit"]
    (drift,) = views.drifts(feed.store, feed.loaded)
    assert (drift["table"], drift["has_drift"]) == ("public.customers", False)
    assert drift["events_analyzed"] == looked_at(feed) == 50
    assert feed.store.sensing.facts("feed")["drift/public.customers"] == 0


def test_a_failure_stops_nothing(feed: Feed, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sinks get everything while sensing breaks; the reason is reported, and a later run catches up."""

    def broken(_report: object) -> list[Learned]:
        raise DeltaforgeError("no idea")

    monkeypatch.setattr(LEARNED_BY, broken)
    run = feed.begin()
    insert(shop, 1, 10)
    eventually(lambda: len(feed.delivered("customers")) == 10, seconds=400)
    progress = feed.store.sensing.progress
    eventually(lambda: getattr(progress("feed"), "problem", None) == "no idea", seconds=400)
    assert sensed(feed) == -1
    monkeypatch.setattr(LEARNED_BY, learned_by)
    eventually(lambda: sensed(feed) > 0, seconds=400)
    ended(run)

    assert looked_at(feed) == 10
    now = progress("feed")
    assert now is not None
    assert (now.problem, now.skipped) == (None, 0)
