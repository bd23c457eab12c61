"""Examples whose stream a worker reads: the worker runs, and does what the page says."""

from __future__ import annotations

import datetime as dt
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import redis

from deltaforge_lab.servers.kafka import KafkaServer
from deltaforge_lab.servers.redis import RedisServer
from tests.e2e.deployment import eventually
from tests.examples.stage import EXAMPLES, Play, entries, events, records

pytestmark = [
    pytest.mark.spark,
    pytest.mark.mysql,
    pytest.mark.redis,
    pytest.mark.kafka,
    pytest.mark.timeout(900),  # the first may wait for the compiler
]


@contextmanager
def working(name: str, uri: str, stream: str) -> Iterator[None]:
    """Let a worker work."""
    program = str(EXAMPLES / "workers" / f"{name}.py")
    process = subprocess.Popen([sys.executable, program, uri, "--stream", stream])
    try:
        yield
        assert process.poll() is None, "the worker has ended"
    finally:
        process.terminate()
        process.wait(120)


def test_cache_invalidation(
    play: Play, redis_client: redis.Redis, redis_server: RedisServer
) -> None:
    """A user's new address makes five keys stale; every table's keys, strategy and tags are right."""
    example = play(
        "cache-invalidation",
        "CREATE TABLE users (id int PRIMARY KEY, email varchar(99))",
        "CREATE TABLE products (id int PRIMARY KEY, category_id int)",
        "CREATE TABLE orders (id int PRIMARY KEY, user_id int)",
        "CREATE TABLE inventory (id int PRIMARY KEY, product_id int)",
        "INSERT INTO users VALUES (1, 'old@example.com')",
    )
    example.change(
        "UPDATE users SET email = 'new@example.com'",
        "INSERT INTO products VALUES (1, 3), (2, NULL)",
        "INSERT INTO orders VALUES (5, 1)",
        "INSERT INTO inventory VALUES (8, 2)",
        "DELETE FROM orders",
    )
    example.deliver()

    stream = f"{example.own}_cache:invalidations"
    found = [
        json.loads(one["df-event"]) for one in entries(example, redis_client, "cache:invalidations")
    ]
    rows = [one["after"] or one["before"] for one in found]
    of_user = [
        "user:1", "user:email:new@example.com", "user:email:old@example.com", "user:1:orders", "user:1:profile",
    ]  # fmt: skip
    assert rows[0]["_cache_keys"] == of_user
    assert [row["_cache_keys"] for row in rows[1:]] == [
        ["product:1", "product:1:details", "category:3:products"],
        ["product:2", "product:2:details"],
        ["order:5", "user:1:orders"],
        ["inventory:2", "product:2:stock"],
        ["order:5", "user:1:orders"],
    ]
    strategies = ["batched", "batched", "batched", "batched", "immediate", "immediate"]
    assert [row["_invalidation_strategy"] for row in rows] == strategies
    assert found[0]["tags"] == ["cache:invalidate", "strategy:batched", "keys:5"]
    assert found[-1]["after"] is None
    assert "_cache_keys" not in found[0]["before"]

    stale = {key for row in rows for key in row["_cache_keys"]}
    for key in (*stale, "user:2", "product:3"):
        redis_client.set(key, "cached")
    with working("cache_worker", redis_server.uri, stream):
        eventually(lambda: not redis_client.exists(*stale), what="the invalidation")
        eventually(lambda: not redis_client.xpending(stream, "cache-workers")["pending"])
    assert redis_client.exists("user:2", "product:3") == 2
    (group,) = redis_client.xinfo_groups(stream)
    assert group["last-delivered-id"] == redis_client.xinfo_stream(stream)["last-generated-id"]


def test_ecommerce_analytics(
    play: Play, kafka_server: KafkaServer, redis_client: redis.Redis, redis_server: RedisServer
) -> None:
    """Rows have their dimensions and metrics, at both sinks; the worker's counters add up."""
    example = play(
        "ecommerce-analytics",
        "CREATE TABLE orders (id int PRIMARY KEY, customer_id int, status varchar(20),"
        " channel varchar(20), total decimal(10,2), item_count int)",
        "CREATE TABLE order_items (id int PRIMARY KEY, order_id int, product_id int, quantity int,"
        " line_total decimal(10,2))",
        "CREATE TABLE payments (id int PRIMARY KEY, order_id int, method varchar(20),"
        " amount decimal(10,2))",
        "CREATE TABLE cart_events (id int PRIMARY KEY, status varchar(20))",
    )
    example.change(
        "SET timestamp = 1705312200",  # one time for all, so that no hour ends between them
        "INSERT INTO orders VALUES (1, 42, 'new', NULL, 750.00, 3), (2, 42, 'new', 'app', 9.50, NULL)",
        "INSERT INTO order_items VALUES (1, 1, 7, NULL, 19.00)",
        "INSERT INTO payments VALUES (1, 1, 'card', 750.00)",
        "INSERT INTO cart_events VALUES (1, NULL)",
        "UPDATE orders SET status = 'paid' WHERE id = 2",
        "DELETE FROM cart_events",
    )
    example.deliver()

    found = events(records(example, kafka_server.brokers, "analytics.events"))
    stream = f"{example.own}_analytics:realtime"
    streamed = entries(example, redis_client, "analytics:realtime")
    assert [json.loads(one["df-event"]) for one in streamed] == found
    assert [one["tags"] for one in found] == [
        ["orders", "c", "high_value", "status:new"],
        ["orders", "c", "status:new"],
        ["order_items", "c"],
        ["payments", "c"],
        ["cart_events", "c"],
        ["orders", "u", "status:paid"],
        ["cart_events", "d"],
    ]
    analytics = [one["after"]["_analytics"] for one in found[:-1]]
    at = dt.datetime.fromtimestamp(found[0]["ts_ms"] / 1000, dt.UTC)
    when = {"hour_of_day": at.hour, "day_of_week": at.isoweekday() % 7}
    assert analytics[0] == {
        "event_type": "orders.created",
        "dimensions": {**when, "customer_id": 42, "status": "new", "channel": "web"},
        "metrics": {"event_count": 1, "order_total": 750, "item_count": 3},
    }
    assert analytics[1]["dimensions"]["channel"] == "app"
    assert analytics[1]["metrics"] == {"event_count": 1, "order_total": 9.5, "item_count": 0}
    assert analytics[2]["dimensions"] == {**when, "order_id": 1, "product_id": 7}
    assert analytics[2]["metrics"] == {"event_count": 1, "quantity": 1, "line_total": 19}
    assert analytics[3]["dimensions"] == {**when, "order_id": 1, "payment_method": "card"}
    assert analytics[3]["metrics"] == {"event_count": 1, "payment_amount": 750}
    assert analytics[4]["event_type"] == "cart_events.created"
    assert (analytics[4]["dimensions"], analytics[4]["metrics"]) == (when, {"event_count": 1})
    assert analytics[5]["event_type"] == "orders.updated"

    day = f"{at.year}:{at.month}:{at.day}"
    hour = f"{day}:{at.hour}"
    last = redis_client.xinfo_stream(stream)["last-generated-id"]
    for _ in range(2):  # started again, it counts nothing twice
        with working("counter_worker", redis_server.uri, stream):
            eventually(lambda: redis_client.get("stats:place") == last, what="the counting")
    assert redis_client.hgetall(f"stats:events:{hour}") == {
        "orders.created": "2",
        "order_items.created": "1",
        "payments.created": "1",
        "cart_events.created": "1",
        "orders.updated": "1",
    }
    assert redis_client.ttl(f"stats:events:{hour}") > 0
    assert redis_client.get(f"stats:orders:count:{hour}") == "2"
    assert redis_client.get(f"stats:orders:revenue:{hour}") == "759.5"
    assert redis_client.hgetall(f"stats:orders:channel:{day}") == {"web": "1", "app": "1"}
    (alert,) = redis_client.lrange("alerts:high_value_orders", 0, -1)
    assert json.loads(alert) == {"order_id": 1, "total": "750.00"}
