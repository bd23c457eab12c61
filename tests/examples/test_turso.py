"""The example over Turso: its change table, a script, Kafka."""

from __future__ import annotations

import pytest

from deltaforge_lab.servers.kafka import KafkaServer
from tests.examples.stage import Play, events, records

pytestmark = [
    pytest.mark.spark,
    pytest.mark.kafka,
    pytest.mark.timeout(900),  # the first may wait for the compiler
]


def test_turso2kafka(play: Play, kafka_server: KafkaServer) -> None:
    """Inserts, updates and deletes of the three tables arrive in order, with what the script adds."""
    example = play(
        "turso2kafka",
        "CREATE TABLE users (id INTEGER PRIMARY KEY, name TEXT, picture BLOB)",
        "CREATE TABLE orders (id INTEGER PRIMARY KEY, user_id INTEGER, total REAL)",
        "CREATE TABLE order_items (order_id INTEGER, line INTEGER, PRIMARY KEY (order_id, line))",
        "CREATE TABLE sessions (id INTEGER PRIMARY KEY)",
    )
    example.change(
        "INSERT INTO users VALUES (1, 'Zoë', x'00ff')",
        "INSERT INTO orders VALUES (7, 1, 10)",
        "INSERT INTO order_items VALUES (7, 1)",
        "INSERT INTO sessions VALUES (1)",
    )
    example.change("UPDATE orders SET total = 12.5", "DELETE FROM order_items")
    example.deliver()

    found = records(example, kafka_server.brokers, "turso.changes")
    changes = sorted(events(found), key=lambda one: int(one["source"]["sequence"]))
    assert [(one["op"], one["source"]["table"]) for one in changes] == [
        ("c", "users"), ("c", "orders"), ("c", "order_items"), ("u", "orders"), ("d", "order_items"),
    ]  # fmt: skip
    after = changes[0]["after"]
    assert after.pop("processed_at").endswith("Z")
    assert after == {"id": 1, "name": "Zoë", "picture": {"_base64": "AP8="}, "source_type": "turso"}
    assert changes[3]["before"] == {"id": 7, "user_id": 1, "total": 10.0}
    assert changes[4]["before"] == {"order_id": 7, "line": 1}
    source = changes[0]["source"]
    assert (source["connector"], source["name"], source["db"]) == ("turso", "turso-main", "main")
    assert [one.get("tx_end", False) for one in changes] == [False, False, True, False, True]
    assert {one.key for one in found} == {b'{"id":1}', b'{"id":7}', b'{"order_id":7,"line":1}'}
