"""What runs count: on real servers, over several runs, and for each kind of trouble."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from deltaforge_dagster.config.logs import setup_logs
from deltaforge_dagster.errors import (
    AuthFailed,
    DeltaforgeError,
    ProcessorFailed,
    SinkOverdue,
    SinkUnavailable,
    Undeliverable,
)
from deltaforge_dagster.installation.process import free_port
from deltaforge_dagster.journal.writer import WrittenSegment
from deltaforge_dagster.pipeline import meters
from deltaforge_dagster.sinks.base import MESSAGES, Traffic
from deltaforge_dagster.state.metrics import Tally
from tests.api.scraped import scrape
from tests.config.test_logs import lines, own_logs
from tests.e2e.conftest import Shop, shop
from tests.fix_spark import SparkAddress
from tests.pipeline.live import Feed, opened_feed
from tests.pipeline.process.test_processing import MASK, with_processors

__all__ = ["own_logs", "shop"]

PATIENT = "{idle_seconds: 1, lease_seconds: 120, renew_seconds: 1}"
"""No run loses its lease because the machine is busy: what two runs count is compared."""


def pluralize(tally: Tally) -> dict[str, float]:
    """Return what a tally holds, by name and labels."""
    added, last = tally.rows("p")
    return {row["name"] + row["labels"]: row["value"] for row in (*added, *last)}


def messages(count: int) -> pa.RecordBatch:
    """Return messages with values of three bytes."""
    row = {
        "ordinal": 0,
        "destination": "d",
        "value": "abc",
        "event_id": "e",
        "idempotency_key": "i",
    }
    (batch,) = pa.Table.from_pylist([row] * count, MESSAGES).to_batches()
    return batch


def test_a_captured_segment() -> None:
    """Changes count by table and op, rows of snapshots once more; lag is the age of the newest."""
    segment = WrittenSegment(
        "id", "path", "sum", "hash", 7, 500,
        counts={"s.a": {"c": 3, "r": 2}, "s.b": {"u": 2}},
        schema_versions={"s.a": "v1", "s.b": "v2"}, first_ts_us=1_000_000, last_ts_us=9_000_000,
        newest={"s.a": 9_000_000, "s.b": 4_000_000}, memory=3000,
    )  # fmt: skip
    met = {("s.a", "v1"), ("s.b", "v1")}
    found = pluralize(meters.captured("db", segment, 10.0, met))
    assert found['source_events_total{"op":"c","source":"db","table":"s.a"}'] == 3
    assert found['source_events_total{"op":"u","source":"db","table":"s.b"}'] == 2
    assert found['snapshot_rows_total{"table":"s.a"}'] == 2
    assert 'snapshot_rows_total{"table":"s.b"}' not in found
    assert found['source_lag_seconds{"source":"db"}'] == 1
    assert found['source_table_lag_seconds{"table":"s.b"}'] == 6
    assert found['source_bytes_total{"source":"db"}'] == 3000
    assert found["bytes_total{}"] == 500
    assert found['batch_events{"le":"10"}'] == 1
    assert found['source_schema_cache_hits_total{"source":"db"}'] == 1
    assert found['source_schema_cache_misses_total{"source":"db"}'] == 1
    again = pluralize(meters.captured("db", segment, 10.0, met))
    assert again['source_schema_cache_hits_total{"source":"db"}'] == 2
    both = replace(segment, schema_versions={"s.a": ["v1", "v2"]})
    found = pluralize(meters.captured("db", both, 10.0, met))
    assert found['source_schema_cache_hits_total{"source":"db"}'] == 1
    assert found['source_schema_cache_misses_total{"source":"db"}'] == 1


def test_a_clock_that_is_behind_gives_no_negative_lag() -> None:
    """A change from the future has no age."""
    segment = WrittenSegment(
        "id", "path", "sum", "hash", 1, 1, {"a.b": {"c": 1}}, {}, 9, 20_000_000, {"a.b": 2}, 1
    )
    found = pluralize(meters.captured("db", segment, 10.0, set()))
    assert found['source_lag_seconds{"source":"db"}'] == 0


@pytest.mark.parametrize(
    ("error", "kind", "more"),
    [
        (SinkUnavailable("gone"), "connect", set()),
        (AuthFailed("no"), "auth", set()),
        (SinkOverdue("late"), "backpressure", {'coordinator_sink_timeout_total{"sink":"s"}'}),
        (
            Undeliverable("nowhere", 3, "routing"),
            "other",
            {'sink_routing_errors_total{"kind":"routing","sink":"s"}'},
        ),
    ],
)
def test_a_sink_that_fails(error: DeltaforgeError, kind: str, more: set[str]) -> None:
    """A failure counts once by sink, once by kind, and as what else it is."""
    meter = meters.SinkMeter("s")
    meter.failed(error)
    assert pluralize(meter.drain()).keys() == {
        'sink_errors_total{"sink":"s"}',
        f'sink_failures_total{{"kind":"{kind}","sink":"s"}}',
        *more,
    }
    assert not meter.drain()


def test_a_sink_that_delivers() -> None:
    """Batches count with their messages and sizes; the first opening is no reconnect."""
    meter = meters.SinkMeter("s")
    for _ in range(3):
        meter.opened()
    for count in (2, 0, 5):
        meter.sends()
        meter.sent([messages(count) if count else messages(1).slice(0, 0)])
    meter.did(Traffic(commits=2, aborts=1, retries=4, waiting=9, waiting_bytes=90))
    found = pluralize(meter.drain())
    assert found['sink_events_total{"sink":"s"}'] == 7
    assert found['sink_batch_total{"sink":"s"}'] == 2
    assert found['sink_bytes_total{"sink":"s"}'] >= 21
    assert found['sink_reconnects_total{"sink":"s"}'] == 2
    assert found['sink_txn_commits_total{"sink":"s"}'] == 2
    assert found['sink_txn_aborts_total{"sink":"s"}'] == 1
    assert found['kafka_produce_retries_total{"sink":"s"}'] == 4
    assert found['kafka_producer_queue_bytes{"sink":"s"}'] == 90
    meter.did(Traffic(retries=1))
    assert pluralize(meter.drain()) == {'kafka_produce_retries_total{"sink":"s"}': 1}


def test_traffic_is_taken_once() -> None:
    """What was taken counts from 0 again; how full a queue is stays."""
    traffic = Traffic(commits=2, waiting=3)
    assert traffic.take() == Traffic(commits=2, waiting=3)
    assert traffic.take() == Traffic(waiting=3)


def test_the_processor_that_broke() -> None:
    """An error of the chain counts for the processor that it names, if there is one of that id."""
    error = ProcessorFailed("segment 3: processor mask: it broke")
    assert pluralize(meters.processing_failed(error, ["mask"])) == {
        'processor_errors_total{"processor":"mask"}': 1
    }
    assert not meters.processing_failed(error, ["other"])
    assert not meters.processing_failed(ProcessorFailed("no memory"), ["mask"])


@pytest.fixture
def make_feed(
    shop: Shop, spark_server: SparkAddress, tmp_path: Path
) -> Iterator[Callable[[], Feed]]:
    """Make a feed with a processor, and beside its sink one that cannot be reached."""
    nowhere = (
        f'    - {{type: redis, config: {{id: nowhere, uri: "redis://127.0.0.1:{free_port()}", '
        'required: false, stream: "x"}}\n'
    )
    text = with_processors(shop.pipeline("feed", run=PATIENT, more_sinks=nowhere), MASK)
    with opened_feed(shop, tmp_path / "feed.yaml", text, spark_server) as feed:
        yield lambda: feed


@pytest.mark.spark
@pytest.mark.postgres
@pytest.mark.redis
@pytest.mark.usefixtures("own_logs")
def test_runs_add_up(
    make_feed: Callable[[], Feed], shop: Shop, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two runs and what they did: each change, message and failure counts once, in the store alone.

    Their log says the same, each line with its pipeline and run.
    """
    feed = make_feed()
    setup_logs({})
    capsys.readouterr()
    shop.execute("INSERT INTO customers VALUES (1, 'a'), (2, 'hidden'), (3, 'c')")
    outcome = feed.catch_up()
    assert (outcome.reason, [*outcome.sink_errors]) == ("caught up", ["nowhere"])
    shop.execute(
        "UPDATE customers SET name = 'b' WHERE id = 1", "INSERT INTO orders VALUES (1, 1, 2)"
    )
    outcome = feed.catch_up()
    assert (outcome.reason, [*outcome.sink_errors]) == ("caught up", ["nowhere"])

    found = scrape(feed.store, feed.loaded)
    source = {"pipeline": "feed", "source": "feed-source"}
    assert found.of("source_events_total", **source, table="public.customers", op="c") == 3
    assert found.of("source_events_total", **source, table="public.customers", op="u") == 1
    assert found.of("source_events_total", **source, table="public.orders", op="c") == 1
    assert found.of("processor_events_in_total", pipeline="feed", processor="mask") == 5
    assert found.of("processor_events_out_total", pipeline="feed", processor="mask") == 4
    arrived = len(shop.entries("feed.customers")) + len(shop.entries("feed.orders"))
    assert arrived == 4
    assert found.of("sink_events_total", pipeline="feed", sink="redis") == arrived
    segments = len(feed.store.segments.read("feed"))
    for name in ("batch_events", "batch_bytes", "e2e_latency_seconds"):
        assert found.of(f"{name}_count", pipeline="feed") == segments, name
    assert found.of("batch_events_sum", pipeline="feed") == 5
    for stage in ("process", "sink", "commit"):
        assert found.of("stage_latency_seconds_count", pipeline="feed", stage=stage) >= segments
    assert found.of("bytes_total") == sum(row.bytes for row in feed.store.segments.read("feed"))
    assert 0 < found.of("e2e_latency_seconds_sum") < 600 * segments
    assert found.of("source_idle_seconds", **source) < 600
    assert 0 < time.time() - found.of("last_checkpoint_ts", pipeline="feed") < 600

    assert found.of("sink_failures_total", pipeline="feed", sink="nowhere", kind="connect") >= 1
    assert found.of("sink_checkpoint_status", sink="nowhere", required="false") == 0
    assert found.of("sink_checkpoint_status", sink="redis", required="true") == 1
    assert found.of("checkpoint_lag_events", sink="nowhere") == 5
    assert found.of("checkpoint_lag_events", sink="redis") == 0
    assert found.of("pipeline_channel_depth", pipeline="feed") == segments
    assert found.of("pipeline_status", pipeline="feed") == 1

    said = [line for line in lines(capsys) if line["target"].startswith("deltaforge_dagster.pip")]
    assert {(line["pipeline"], line["tenant"]) for line in said} == {("feed", "acme")}
    assert len({line["run"] for line in said}) == 2
    failed = [line for line in said if line["message"] == "the sink failed"]
    assert {(line["sink_id"], line["kind"]) for line in failed} == {("nowhere", "connect")}
    assert all(line["sleep_seconds"] > 0 and line["attempt"] for line in failed)
    summaries = [line for line in said if line["message"].startswith("captured ")]
    assert sum(line["events"] for line in summaries) == 5
    delivered = [line["sinks"]["redis"] for line in summaries]
    assert sum(one["events"] for one in delivered) == 4
    assert delivered[-1]["latency_ms_p95"] >= delivered[-1]["latency_ms_p50"] > 0
    assert any(line["sinks"]["nowhere"]["lag_seconds"] > 0 for line in summaries)
