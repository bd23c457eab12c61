"""Ten thousand updates of one row, from one run to every kind of sink, in order."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from pathlib import Path

import psycopg
import pytest

from deltaforge_lab.servers.http import HttpServer
from deltaforge_lab.servers.kafka import KafkaServer
from deltaforge_lab.servers.nats import NatsServer
from tests.e2e.conftest import Shop, shop
from tests.fix_kafka import read_topic
from tests.fix_nats import Admin
from tests.fix_spark import SparkAddress
from tests.pipeline.live import opened_feed

__all__ = ["shop"]

pytestmark = [
    pytest.mark.spark,
    pytest.mark.postgres,
    pytest.mark.redis,
    pytest.mark.kafka,
    pytest.mark.nats,
]

UPDATES = 10_000
RUN = "{idle_seconds: 60, lease_seconds: 20, renew_seconds: 1}"
TIERS = {"least": "false", "once": "true"}

COUNT_UP = f"""
DO $$ BEGIN
    FOR n IN 1..{UPDATES} LOOP
        UPDATE customers SET name = n::text WHERE id = 1;
        IF n % 7 = 0 THEN COMMIT; END IF;
    END LOOP;
END $$
"""


def versions(events: Iterable[str | bytes]) -> list[int]:
    """Return the versions of the row, as events have them."""
    return [int(json.loads(event)["after"]["name"]) for event in events]


def test_ten_thousand_updates_of_one_row(
    *,
    shop: Shop,
    kafka_server: KafkaServer,
    nats_server: NatsServer,
    nats_admin: Admin,
    nats_stream: str,
    http_server: HttpServer,
    spark_server: SparkAddress,
    tmp_path: Path,
) -> None:
    """Each of them arrives once and in order, at both tiers, though transactions and blocks end anywhere.

    The topics have several partitions, and segments are small.
    """
    name = f"order-{secrets.token_hex(4)}"
    sinks = (
        f"    - {{type: file, config: {{id: file, path: '{tmp_path}/out/a.jsonl'}}}}\n"
        f"    - {{type: http, config: {{id: http, url: '{http_server.url}', batch_mode: true, "
        "max_in_flight: 4}}\n"
    )
    for tier, flag in TIERS.items():
        kafka_server.create_topic(f"{name}.{tier}", partitions=4)
        sinks += (
            f"    - {{type: kafka, config: {{id: kafka-{tier}, brokers: '{kafka_server.brokers}', "
            f"topic: '{name}.{tier}', exactly_once: {flag}}}}}\n"
            f"    - {{type: redis, config: {{id: redis-{tier}, uri: '{shop.redis_uri}', "
            f"stream: '{name}.{tier}', exactly_once: {flag}}}}}\n"
            f"    - {{type: nats, config: {{id: nats-{tier}, url: '{nats_server.url}', "
            f"subject: '{nats_stream}.{tier}', stream: '{nats_stream}', exactly_once: {flag}}}}}\n"
        )
    text = shop.pipeline(name, run=RUN, more_sinks=sinks)
    text += "    segment: {max_events: 3000}\n"
    with opened_feed(shop, tmp_path / f"{name}.yaml", text, spark_server) as feed:
        shop.execute("INSERT INTO customers VALUES (1, '0')")
        with psycopg.connect(shop.dsn, autocommit=True) as connection:
            connection.execute(COUNT_UP)
        outcome = feed.catch_up()

    expected = list(range(UPDATES + 1))
    assert set(outcome.delivered.values()) == {UPDATES + 1}
    assert versions((tmp_path / "out/a.jsonl").read_text().splitlines()) == expected
    arrays = [json.loads(body) for body in http_server.bodies()]
    assert [int(one["after"]["name"]) for array in arrays for one in array] == expected
    for tier in TIERS:
        entries = shop.entries(f"{name}.{tier}")
        assert versions(entry["df-event"] for entry in entries) == expected
        assert versions(nats_admin.values(nats_stream, f"{nats_stream}.{tier}")) == expected
        records = read_topic(kafka_server.brokers, f"{name}.{tier}")
        assert len({record.partition for record in records}) == 1
        assert versions(record.value or b"" for record in records) == expected
