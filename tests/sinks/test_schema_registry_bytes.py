"""Messages that are bytes and no text arrive unchanged in every kind of sink that takes them."""

from __future__ import annotations

import contextlib
import secrets
from typing import cast

import pyarrow as pa
import pytest
import redis

from deltaforge_dagster.sinks.base import AVRO_MESSAGES, Sink, SinkBatch
from deltaforge_dagster.sinks.http.client import ClientSettings
from deltaforge_dagster.sinks.http.requests import RequestForm
from deltaforge_dagster.sinks.http.sink import HttpSink
from deltaforge_dagster.sinks.nats.sink import NatsSink
from deltaforge_dagster.sinks.redis.sink import RedisSink
from deltaforge_dagster.sinks.registry import message_sink_types
from deltaforge_dagster.sinks.schema_registry import AvroSink, SchemaRegistryClient
from deltaforge_dagster.testing.sinks import allow
from deltaforge_lab.servers.http import HttpServer
from deltaforge_lab.servers.nats import NatsServer
from deltaforge_lab.servers.redis import RedisServer
from deltaforge_lab.servers.schema_registry import SchemaRegistryServer
from tests.fix_nats import Admin
from tests.sinks.test_schema_registry import A, encoding

BYTES = bytes(range(256)) + b"\r\n\0\n"


def send(inner: Sink, registry: SchemaRegistryServer, destination: str) -> bytes:
    """Send two messages, and return what each of them must be."""
    row = {
        "ordinal": 0, "destination": destination, "key": "k", "value": bytes(5) + BYTES,
        "event_id": "e0", "idempotency_key": "i0", "schema": 0,
    }  # fmt: skip
    rows = [row, {**row, "ordinal": 1, "event_id": "e1", "idempotency_key": "i1"}]
    settings = encoding(registry.url)
    client = SchemaRegistryClient("bytes", settings)
    with contextlib.closing(AvroSink(inner, client, settings)) as sink:
        sink.open()
        messages = pa.RecordBatch.from_pylist(rows, AVRO_MESSAGES)
        assert sink.send(SinkBatch(1, "5e9", messages, schemas=(A,)), allow) == 1
        return b"\0" + client.register(f"{destination}-value", A.text).to_bytes(4, "big") + BYTES


@pytest.mark.redis
def test_redis(redis_server: RedisServer, schema_registry: SchemaRegistryServer) -> None:
    """An entry's `df-event` has the bytes."""
    stream = f"df_{secrets.token_hex(6)}"
    expected = send(RedisSink("bytes", redis_server.uri), schema_registry, stream)

    with contextlib.closing(redis.Redis.from_url(redis_server.uri)) as client:
        entries = cast("list[tuple[bytes, dict[bytes, bytes]]]", client.xrange(stream))

    assert [fields[b"df-event"] for _, fields in entries] == [expected] * 2


@pytest.mark.nats
def test_nats(
    nats_server: NatsServer,
    nats_admin: Admin,
    nats_stream: str,
    schema_registry: SchemaRegistryServer,
) -> None:
    """A message's payload is the bytes."""
    subject = f"{nats_stream}.bytes"
    inner = NatsSink("bytes", nats_server.url, f"{nats_stream}.>", stream=nats_stream)
    expected = send(inner, schema_registry, subject)

    assert [one.value for one in nats_admin.read(nats_stream, subject)] == [expected] * 2


def test_http(http_server: HttpServer, schema_registry: SchemaRegistryServer) -> None:
    """A request's body is the bytes."""
    url = f"{http_server.url}/avro"
    inner = HttpSink("bytes", RequestForm(content_type="application/avro"), ClientSettings())
    expected = send(inner, schema_registry, url)

    assert http_server.bodies("/avro") == [expected] * 2


def test_which_kinds_take_bytes() -> None:
    """Files have lines, so they take none."""
    kinds = {name for name, kind in message_sink_types().items() if kind.config.takes_bytes}
    assert kinds == {"kafka", "redis", "nats", "http"}
