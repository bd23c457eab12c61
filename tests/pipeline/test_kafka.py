"""From PostgreSQL to Kafka: real runs, seen by a consumer of the topics."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deltaforge_dagster.cli.main import app
from deltaforge_lab.servers.kafka import KafkaServer
from tests.e2e.conftest import Shop, shop
from tests.e2e.deployment import eventually
from tests.fix_kafka import Record, StartKafka, read_topic
from tests.fix_spark import SparkAddress
from tests.pipeline.live import Feed, in_one_segment, opened_feed

__all__ = ["shop"]

pytestmark = [pytest.mark.spark, pytest.mark.postgres, pytest.mark.redis, pytest.mark.kafka]

RUN = "{idle_seconds: 60, lease_seconds: 20, renew_seconds: 1}"

MakeFeed = Callable[..., Feed]


@pytest.fixture
def make_feed(shop: Shop, spark_server: SparkAddress, tmp_path: Path) -> Iterator[MakeFeed]:
    """Make a feed with two Kafka sinks on a broker, `least` and `once`, beside its Redis sink."""
    name = f"feed-{secrets.token_hex(4)}"
    with ExitStack() as stack:

        def make(server: KafkaServer, send_timeout: int = 60, segment: str = "") -> Feed:
            sinks = "".join(
                f"    - type: kafka\n      config: {{id: {one}, brokers: '{server.brokers}', "
                f"topic: '{name}.{one}.${{source.table}}', send_timeout_secs: {send_timeout}, "
                f"exactly_once: {flag}}}\n"
                for one, flag in (("least", "false"), ("once", "true"))
            )
            text = shop.pipeline(name, run=RUN, range_="{max_events: 10}", more_sinks=sinks)
            text += segment
            path = tmp_path / f"{name}.yaml"
            return stack.enter_context(opened_feed(shop, path, text, spark_server))

        yield make


def records(feed: Feed, server: KafkaServer, sink: str, table: str) -> list[Record]:
    """Return what a consumer of committed messages gets of a sink."""
    return read_topic(server.brokers, f"{feed.name}.{sink}.{table}")


def ids(found: list[Record]) -> list[int]:
    """Return the ids of the rows in messages."""
    return [json.loads(one.value or b"")["after"]["id"] for one in found]


def test_changes_arrive_as_they_do_elsewhere(
    make_feed: MakeFeed, kafka_server: KafkaServer
) -> None:
    """Both kinds of sinks have every table's changes, keyed by the row, as Redis has them."""
    feed = make_feed(kafka_server)
    feed.shop.execute(
        "INSERT INTO customers SELECT n, 'ä' FROM generate_series(1, 2000) n",
        "INSERT INTO orders VALUES (7, 1, 9.50)",
        "UPDATE customers SET name = 'b' WHERE id = 2",
        "DELETE FROM customers WHERE id = 2",
    )
    feed.catch_up()

    for table in ("customers", "orders"):
        expected = [one["df-event"].encode() for one in feed.delivered(table)]
        for sink in ("least", "once"):
            found = records(feed, kafka_server, sink, table)
            assert [one.value for one in found] == expected
            assert {one.headers for one in found} == {()}
    last = records(feed, kafka_server, "once", "customers")[-3:]
    assert [json.loads(one.key or b"") for one in last] == [{"id": 2000}, {"id": 2}, {"id": 2}]


@pytest.mark.parametrize("fault", ["fail_during", "fail_after"])
def test_a_lost_acknowledgement(
    make_feed: MakeFeed,
    kafka_server: KafkaServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
) -> None:
    """At least once the batch comes again from its start; exactly once nothing comes twice."""
    faults = tmp_path / "faults"
    faults.mkdir()
    monkeypatch.setenv("DELTAFORGE_SINK_FAULTS", str(faults))
    feed = make_feed(kafka_server)
    feed.shop.execute("INSERT INTO customers SELECT n, 'x' FROM generate_series(1, 100) n")
    for sink in ("least", "once"):
        (faults / sink).write_text(f"{fault} once")
    feed.catch_up()  # ends with the failure
    feed.catch_up()

    first = [*range(1, 51)] if fault == "fail_during" else [*range(1, 101)]
    assert ids(records(feed, kafka_server, "least", "customers")) == [*first, *range(1, 101)]
    assert ids(records(feed, kafka_server, "once", "customers")) == [*range(1, 101)]


def test_a_broker_that_was_down_or_hung(make_feed: MakeFeed, start_kafka: StartKafka) -> None:
    """Three ranges without a broker, three while it hangs: Redis has them, one after the other.

    The same run delivers them to both Kafka sinks, in order, when the broker is back, while the
    source is idle. While it is dead they fail with a reason.
    """
    server = start_kafka()
    feed = make_feed(server, send_timeout=2)
    run = feed.begin()

    def insert_ranges(first: int) -> None:
        for number in range(first, first + 3):
            rows = f"SELECT 10 * {number} + n, 'x' FROM generate_series(0, 9) n"
            feed.shop.execute(f"INSERT INTO customers {rows}")
            eventually(lambda: (number, "redis") in published(), what="the range of Redis")  # noqa: B023

    def published() -> set[tuple[int, str]]:
        return feed.store.ranges.published(feed.name, 1, 9)

    def caught_up() -> bool:
        last = len(feed.store.ranges.read(feed.name))
        return published() >= {(last, sink) for sink in ("least", "once")}

    def error(sink: str) -> str:
        return feed.store.checkpoints.read(feed.name)[sink].last_error or ""

    insert_ranges(1)
    assert len(feed.delivered("customers")) == 30
    eventually(caught_up, what="the first delivery to Kafka")
    server.stop(immediate=True)
    insert_ranges(4)
    for sink in ("least", "once"):
        said = f"sink {sink}: kafka at {server.brokers}"
        eventually(lambda: said in error(sink), what="an error")  # noqa: B023
    server.restart()
    eventually(caught_up, what="the catch-up after the crash")
    server.pause()
    insert_ranges(7)
    server.resume()
    eventually(caught_up, what="the catch-up after the pause")

    expected = [*range(10, 100)]
    assert ids(records(feed, server, "once", "customers")) == expected
    assert [*dict.fromkeys(ids(records(feed, server, "least", "customers")))] == expected
    outcome = run.end()
    assert (outcome.captured, outcome.ranges) == (90, 9)


def test_a_replay_beside_a_live_run(
    make_feed: MakeFeed,
    kafka_server: KafkaServer,
    spark_server: SparkAddress,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Same keys and values, marked by a header; no checkpoint moves, and the run is not fenced."""
    feed = make_feed(kafka_server)
    monkeypatch.setenv("DELTAFORGE_PIPELINES", str(feed.path))
    spark_server.use(feed.path.parent / "home", monkeypatch)
    run = feed.begin()
    feed.shop.execute("INSERT INTO customers SELECT n, 'ä' FROM generate_series(1, 10) n")
    eventually(lambda: len(feed.store.ranges.read(feed.name, state="closed")) == 1, what="a range")
    feed.shop.execute("UPDATE customers SET name = 'b' WHERE id < 4", "DELETE FROM customers")
    everywhere = {(2, sink) for sink in ("redis", "least", "once")}
    eventually(
        lambda: feed.store.ranges.published(feed.name, 1, 2) >= everywhere, what="the delivery"
    )
    before, lease = feed.store.checkpoints.read(feed.name), feed.store.leases.get(feed.name)

    for sink in ("least", "once"):
        first = records(feed, kafka_server, sink, "customers")
        result = CliRunner().invoke(app, ["replay", feed.name, "--range", "1-2", "--sink", sink])
        assert result.exit_code == 0, result.output
        again = records(feed, kafka_server, sink, "customers")[len(first) :]
        assert [(one.key, one.value) for one in again] == [(one.key, one.value) for one in first]
        ((name, mark),) = {header for one in again for header in one.headers}
        assert (name, bool(mark)) == ("df-replay", True)

    assert feed.store.checkpoints.read(feed.name) == before
    now = feed.store.leases.get(feed.name)
    assert lease is not None
    assert now is not None
    assert (now.run_id, now.epoch) == (lease.run_id, lease.epoch)
    feed.shop.execute("INSERT INTO customers VALUES (11, 'c')")
    for sink in ("least", "once"):
        eventually(lambda: len(records(feed, kafka_server, sink, "customers")) == 47)  # noqa: B023
    outcome = run.end()
    assert outcome.delivered == {"redis": 24, "least": 24, "once": 24}
    assert outcome.sink_errors == {}


def test_units_are_transactions(
    make_feed: MakeFeed, kafka_server: KafkaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `batch` says is one transaction, also when one of the source is larger; none is divided.

    The marker of a commit takes an offset of its own, between the messages of two transactions.
    """
    feed = make_feed(kafka_server, segment=f"    segment: {in_one_segment(200, monkeypatch)}\n")
    feed.path.write_text(
        feed.path.read_text().replace("  engine:\n", "  batch: {max_events: 40}\n  engine:\n")
    )
    first = 1
    for count in (30, 30, 100, 5, 35):
        last = first + count - 1
        feed.shop.execute(
            f"INSERT INTO customers SELECT n, 'x' FROM generate_series({first}, {last}) n"
        )
        first = last + 1

    assert feed.catch_up().segments == 1

    found = records(feed, kafka_server, "once", "customers")
    assert ids(found) == [*range(1, 201)]
    offsets = [one.offset for one in found]
    gaps = [index for index in range(1, 200) if offsets[index] != offsets[index - 1] + 1]
    assert gaps == [30, 60, 160]
    assert ids(records(feed, kafka_server, "least", "customers")) == [*range(1, 201)]
