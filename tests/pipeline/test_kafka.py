"""From PostgreSQL to Kafka: real runs, seen by a consumer of the topics."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from deltaforge_dagster.servers.kafka import KafkaServer
from tests.e2e.conftest import Shop, shop
from tests.e2e.deployment import eventually
from tests.fix_kafka import Record, StartKafka, read_topic
from tests.fix_spark import SparkAddress
from tests.pipeline.live import Feed, opened_feed

__all__ = ["shop"]

pytestmark = [pytest.mark.spark, pytest.mark.postgres, pytest.mark.redis, pytest.mark.kafka]

RUN = "{idle_seconds: 60, lease_seconds: 20, renew_seconds: 1}"

MakeFeed = Callable[[KafkaServer], Feed]


@pytest.fixture
def make_feed(shop: Shop, spark_server: SparkAddress, tmp_path: Path) -> Iterator[MakeFeed]:
    """Make a feed with two Kafka sinks on a broker, `least` and `once`, beside its Redis sink."""
    name = f"feed-{secrets.token_hex(4)}"
    with ExitStack() as stack:

        def make(server: KafkaServer) -> Feed:
            sinks = "".join(
                f"    - type: kafka\n      config: {{id: {one}, brokers: '{server.brokers}', "
                f"topic: '{name}.{one}.${{source.table}}', send_timeout_secs: 2, "
                f"exactly_once: {flag}}}\n"
                for one, flag in (("least", "false"), ("once", "true"))
            )
            text = shop.pipeline(name, run=RUN, more_sinks=sinks)
            path = tmp_path / f"{name}.yaml"
            return stack.enter_context(opened_feed(shop, path, text, spark_server.remote))

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


def test_a_broker_that_was_down(make_feed: MakeFeed, start_kafka: StartKafka) -> None:
    """The sinks fail with a reason while the broker is dead, and catch up when it is back."""
    server = start_kafka()
    feed = make_feed(server)
    feed.shop.execute("INSERT INTO customers VALUES (1, 'x')")
    feed.catch_up()
    server.stop(immediate=True)
    feed.shop.execute("INSERT INTO customers SELECT n, 'x' FROM generate_series(2, 100) n")
    run = feed.begin()

    def error(sink: str) -> str:
        return feed.store.checkpoints(feed.name)[sink].last_error or ""

    for sink in ("least", "once"):
        said = f"sink {sink}: kafka at {server.brokers}"
        eventually(lambda: said in error(sink), what="an error")  # noqa: B023
    run.end()
    server.restart()
    feed.catch_up()

    for sink in ("least", "once"):
        assert ids(records(feed, server, sink, "customers")) == [*range(1, 101)]
