"""Examples over PostgreSQL: CloudEvents, documents, production's Kafka, an audit trail."""

from __future__ import annotations

import datetime as dt
import json
import subprocess
import sys
import uuid
from contextlib import closing
from decimal import Decimal
from typing import Any

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext

from deltaforge_lab.servers.kafka import KafkaServer
from deltaforge_lab.servers.schema_registry import SchemaRegistryServer
from tests.examples.stage import EXAMPLES, Play, events, records
from tests.fix_nats import Admin
from tests.sinks.kafka.test_security import SECRET, SecureServer, secure

__all__ = ["secure"]

pytestmark = [
    pytest.mark.spark,
    pytest.mark.postgres,
    pytest.mark.kafka,
    pytest.mark.nats,
    pytest.mark.timeout(900),  # the first may wait for the compiler
]


def test_users_postgres_to_nats(play: Play, nats_admin: Admin) -> None:
    """A new user is a CloudEvent with the page's type, source and subject, and an absent old row."""
    example = play(
        "users-postgres-to-nats",
        "CREATE TABLE users (id int PRIMARY KEY, email text)",
        "CREATE TABLE profiles (user_id int PRIMARY KEY REFERENCES users, bio text)",
        "CREATE TABLE user_sessions (id int PRIMARY KEY, user_id int)",
    )
    stream = nats_admin.make(f"{example.own}_USERS", f"{example.own}_users.>")
    example.change(
        "INSERT INTO users VALUES (1, 'alice@example.com')",
        "INSERT INTO profiles VALUES (1, 'Hello')",
        "DELETE FROM profiles",
    )
    example.deliver()

    created, profile, deleted = (json.loads(one) for one in nats_admin.values(stream))
    nats_admin.delete(stream)
    assert created["specversion"] == "1.0"
    assert created["type"] == "com.acme.users.created"
    assert created["source"] == "deltaforge/users-postgres/public.users"
    assert created["subject"] == "public.users"
    after = {"id": 1, "email": "alice@example.com"}
    assert created["data"] == {"before": None, "after": after, "op": "c"}
    assert profile["subject"] == "public.profiles"
    assert (deleted["type"], deleted["data"]["op"]) == ("com.acme.users.deleted", "d")


METADATA = '{"brand": "Acme", "tags": ["audio"], "ratings": {"average": 4.50, "count": 1024}}'


def test_products_with_sensing(play: Play, kafka_server: KafkaServer) -> None:
    """Documents of any shape arrive as documents, to the digit, in a table each."""
    example = play(
        "products-with-sensing",
        "CREATE TABLE products (id serial PRIMARY KEY, name text, sku text UNIQUE,"
        " price decimal(10,2), metadata jsonb, specifications jsonb,"
        " created_at timestamptz DEFAULT now(), updated_at timestamptz DEFAULT now())",
        "CREATE TABLE product_variants (id serial PRIMARY KEY,"
        " product_id int REFERENCES products, variant_name text, attributes jsonb, pricing jsonb,"
        " created_at timestamptz DEFAULT now())",
    )
    example.change(
        "INSERT INTO products (name, sku, price, metadata, specifications)"
        f" VALUES ('Headphones', 'HP-1', 199.90, '{METADATA}', '{{}}')",
        "INSERT INTO product_variants (product_id, variant_name, pricing)"
        """ VALUES (1, 'black', '{"regional": {"EU": {"price": 179.00}}}')""",
    )
    example.deliver()

    found = records(example, kafka_server.brokers, "products.changes")
    product, variant = (one["payload"] for one in events(found))
    assert product["after"]["metadata"] == json.loads(METADATA)
    assert b'"average":4.50' in (found[0].value or b"")
    assert (product["after"]["price"], product["after"]["specifications"]) == ("199.90", {})
    assert variant["source"]["table"] == "product_variants"
    assert variant["after"]["pricing"] == {"regional": {"EU": {"price": 179.0}}}


def test_orders_to_avro_topics(
    play: Play, kafka_server: KafkaServer, schema_registry: SchemaRegistryServer
) -> None:
    """Consumers with Confluent's deserializer get rows with the types of their table, and tombstones."""
    example = play(
        "orders-to-avro-topics",
        "CREATE TABLE orders (id int PRIMARY KEY, total numeric(10,2), placed timestamp)",
        "CREATE TABLE order_items (id uuid PRIMARY KEY, count int)",
    )
    item = "0192f0c1-0000-7000-8000-00000000000a"
    example.change(
        "INSERT INTO orders VALUES (1, 9.50, '2026-03-01 12:00'), (2, 1, 'infinity')",
        f"INSERT INTO order_items VALUES ('{item}', 3)",
        "DELETE FROM orders WHERE id = 1",
    )
    example.deliver()

    def read(topic: str) -> list[Any]:
        place = SerializationContext(f"{example.own}_{topic}", MessageField.VALUE)
        found = records(example, kafka_server.brokers, topic)
        with closing(SchemaRegistryClient({"url": schema_registry.url})) as client:
            deserialize = AvroDeserializer(client)
            return [deserialize(one.value, place) for one in found]

    created, deleted, tombstone = read("avro.orders")
    placed = dt.datetime(2026, 3, 1, 12, tzinfo=dt.UTC)
    assert created["after"] == {"id": 1, "total": Decimal("9.50"), "placed": placed}
    assert (deleted["op"], deleted["before"]["id"], tombstone) == ("d", 1, None)
    (added,) = read("avro.order_items")
    assert added["after"] == {"id": uuid.UUID(item), "count": 3}
    (letter,) = example.store.dead_letters.read(example.loaded.name)
    assert "its column 'placed' does not fit" in letter.error_message


def test_orders_to_kafka_prod(play: Play, secure: SecureServer) -> None:
    """Over TLS, with SCRAM, in transactions: those who read committed messages have each change once."""
    table = "(id int PRIMARY KEY, total numeric(10,2))"
    example = play(
        "orders-to-kafka-prod",
        *(f"CREATE TABLE {one} {table}" for one in ("orders", "order_items", "payments")),
        KAFKA_BROKERS=secure.ports["SECRET"],
        KAFKA_USERNAME="df",
        KAFKA_PASSWORD=SECRET,
        KAFKA_CA=str(secure.files["ours"]),
    )
    secure.create_topic(f"{example.own}_orders.cdc.events", partitions=3)
    for number in range(1, 4):
        example.change(
            f"INSERT INTO orders VALUES ({number}, 9.50)",
            f"INSERT INTO payments VALUES ({number}, 9.50)",
        )
        example.deliver()

    found = records(example, secure.brokers, "orders.cdc.events")
    assert sorted(
        (one["payload"]["source"]["table"], one["payload"]["after"]["id"]) for one in events(found)
    ) == [(table, number) for table in ("orders", "payments") for number in (1, 2, 3)]
    assert {tuple(one) for one in events(found)} == {("schema", "payload")}
    assert len({one.offset for one in found}) > 1  # markers of commits take offsets, too


AUDITED = {
    "users": "email text, password_hash text, ssn text, tax_id text",
    "user_profiles": "user_id int, date_of_birth date, bio text",
    "payment_methods": "user_id int, card_number text, cvv text, account_number text",
    "transactions": "amount numeric(10,2), currency text",
    "roles": "name text",
    "permissions": "name text",
    "user_roles": "user_id int, role_id int",
}


def test_compliance_audit_trail(play: Play, kafka_server: KafkaServer) -> None:
    """Tags say what the row is, and what changed, in their order; no secret is left in either image."""
    example = play(
        "compliance-audit-trail",
        *(f"CREATE TABLE {one} (id int PRIMARY KEY, {rest})" for one, rest in AUDITED.items()),
        *(f"ALTER TABLE {one} REPLICA IDENTITY FULL" for one in list(AUDITED)[:4]),
        "ALTER TABLE user_profiles ALTER bio SET STORAGE EXTERNAL",
        f"CREATE PUBLICATION audit_pub FOR TABLE {', '.join(AUDITED)}"
        " WITH (publish = 'insert, update, delete')",
    )
    example.change("INSERT INTO users VALUES (1, 'a@example.com', 'hash1', '123-45-6789', NULL)")
    example.change("UPDATE users SET email = 'b@example.com', password_hash = 'hash2'")
    example.change("INSERT INTO payment_methods VALUES (1, 1, '4111-1111-1111', '123', '987')")
    example.change("INSERT INTO user_profiles VALUES (1, 1, '1990-01-01', repeat('long ', 9999))")
    example.change("UPDATE user_profiles SET date_of_birth = '1990-01-02'")
    example.change(
        "INSERT INTO transactions VALUES (1, 9.50, 'EUR')", "INSERT INTO roles VALUES (1, 'x')"
    )
    example.change("INSERT INTO user_roles VALUES (1, 1, 1)", "DELETE FROM users")
    example.deliver()

    found = records(example, kafka_server.brokers, "audit.trail.events")
    payloads = [one["payload"] for one in events(found)]
    of_users = [
        "audited", "sensitivity:HIGH", "classification:PII", "retention:2190d",
        "regulation:GDPR", "regulation:CCPA",
    ]  # fmt: skip
    of_cards = [
        "audited", "sensitivity:HIGH", "classification:PCI", "retention:2555d",
        "regulation:PCI-DSS", "regulation:SOX",
    ]  # fmt: skip
    of_profiles = [of_users[0], "sensitivity:MEDIUM", *of_users[2:]]
    of_roles = ["audited", "sensitivity:LOW", "classification:INTERNAL", "retention:1095d"]
    assert [(one["source"]["table"], one["tags"]) for one in payloads] == [
        ("users", of_users),
        ("users", [*of_users, "changed:email", "changed:password_hash"]),
        ("payment_methods", of_cards),
        ("user_profiles", of_profiles),
        ("user_profiles", [*of_profiles, "changed:date_of_birth"]),
        ("transactions", of_cards),
        ("roles", of_roles),
        ("user_roles", [of_roles[0], "sensitivity:MEDIUM", *of_roles[2:]]),
        ("users", of_users),
    ]
    created, updated, card, _, profile, transaction, *_, deleted = payloads
    hidden = {
        name: value
        for field in ("password_hash", "ssn", "tax_id")
        for name, value in ((field, "[REDACTED]"), (f"_{field}_redacted", True))
    }
    assert created["after"] == {"id": 1, "email": "a@example.com", **hidden}
    assert updated["before"] == created["after"]
    assert updated["after"] == deleted["before"] == {"id": 1, "email": "b@example.com", **hidden}
    assert (card["after"]["cvv"], card["after"]["_card_number_redacted"]) == ("[REDACTED]", True)
    assert profile["after"]["date_of_birth"] == "[REDACTED]"
    assert transaction["after"] == {"id": 1, "amount": "9.50", "currency": "EUR"}
    assert not [
        one
        for one in found
        for secret in (b"hash1", b"hash2", b"123-45-6789", b"4111-1111")
        if secret in (one.value or b"")
    ]

    lines = b"\n".join(one.value or b"" for one in found[:2])
    parser = [sys.executable, str(EXAMPLES / "workers" / "tag_parser.py")]
    output = subprocess.run(
        parser, input=lines, capture_output=True, check=True, timeout=240
    ).stdout
    assert json.loads(output.splitlines()[1]) == {
        "table": "users", "op": "u", "audited": True, "sensitivity": "HIGH", "classification": "PII",
        "retention": "2190d", "regulation": ["GDPR", "CCPA"], "changed": ["email", "password_hash"],
    }  # fmt: skip
