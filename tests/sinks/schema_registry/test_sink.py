"""Messages in Avro on their way to a sink: they get the ids of their schemas, each of which is asked for once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pytest

from deltaforge_dagster.errors import LeaseLost, SinkRejected, SinkUnavailable
from deltaforge_dagster.sinks.base import (
    AVRO_MESSAGES,
    MESSAGES,
    MessageSchema,
    SendGuard,
    SinkBatch,
    SinkPosition,
)
from deltaforge_dagster.sinks.schema_registry import AvroSink, SchemaRegistryClient
from deltaforge_dagster.testing.sinks import allow
from deltaforge_lab.servers.schema_registry import SchemaRegistryServer
from tests.fix_schema_registry import StartSchemaRegistry
from tests.sinks.schema_registry.test_client import encoding

A, B = MessageSchema('{"type":"int"}', "ns.A"), MessageSchema('{"type":"long"}', "ns.B")


@dataclass
class Collected:
    """A sink that keeps what it is sent."""

    batches: list[SinkBatch] = field(default_factory=list)
    exactly_once = takes_parts = True

    def open(self) -> None:
        """Do nothing."""

    def position(self) -> SinkPosition | None:
        """Return None."""

    def send(self, batch: SinkBatch, guard: SendGuard) -> int:
        """Keep the batch."""
        guard()
        self.batches.append(batch)
        return 0

    def close(self) -> None:
        """Do nothing."""


def avro(*rows: tuple[str, bytes | None, int | None]) -> SinkBatch:
    """Return a batch of messages: topic, value and the number of the schema."""
    columns: list[dict[str, Any]] = [
        dict.fromkeys(MESSAGES.names, "")
        | {"ordinal": n, "destination": topic, "value": value, "schema": schema}
        for n, (topic, value, schema) in enumerate(rows)
    ]
    batch = pa.RecordBatch.from_pylist(columns, AVRO_MESSAGES)
    return SinkBatch(1, "5e9", batch, schemas=(A, B))


def record(number: int) -> bytes:
    """Return a message without the id of its schema."""
    return bytes(5) + bytes([number])


@contextmanager
def sink(url: str, strategy: str = "topic_name") -> Iterator[tuple[AvroSink, Collected]]:
    """Lend a sink, and where its messages arrive."""
    settings = encoding(url, subject_strategy=strategy)
    inner = Collected()
    with closing(AvroSink(inner, SchemaRegistryClient("topics", settings), settings)) as made:
        yield made, inner


def sent(inner: Collected) -> list[bytes | None]:
    """Return the values of the last batch."""
    return inner.batches[-1].messages.column("value").to_pylist()


@pytest.mark.parametrize(
    ("strategy", "subjects"),
    [
        ("topic_name", {"s1-value", "s2-value"}),
        ("record_name", {"ns.A", "ns.B"}),
        ("topic_record_name", {"s1-ns.A", "s1-ns.B", "s2-ns.A"}),
    ],
)
def test_ids(start_schema_registry: StartSchemaRegistry, strategy: str, subjects: set[str]) -> None:
    """Each message has the id of its own schema; raw ones and tombstones stay as they are. Any part of a batch will do."""
    server = start_schema_registry()
    with sink(server.url, strategy) as (to, inner):
        raw = b'{"a":1}'
        batch = avro(
            ("s1", record(1), 0),
            ("s1", None, None),
            ("s1", raw, None),
            ("s1", record(2), 1),
            ("s2", record(3), 0),
        )

        to.send(batch, allow)

        ids = {one: server.ask(f"/schemas/ids/{number}") for number in (1, 2) for one in [number]}
        number = {one["schema"]: n for n, one in ids.items()}
        a, b = (number[one.text].to_bytes(4, "big") for one in (A, B))
        expected = [b"\0" + a + b"\1", None, raw, b"\0" + b + b"\2", b"\0" + a + b"\3"]
        assert sent(inner) == expected
        assert inner.batches[-1].messages.schema.names == MESSAGES.names
        assert set(server.ask("/subjects")) == subjects
        to.send(replace(batch, messages=batch.messages.slice(1, 3)), allow)
        assert sent(inner) == expected[1:4]
        earlier = (batch.messages.slice(0, 2),)
        to.send(replace(batch, messages=batch.messages.slice(2), earlier=earlier), allow)
        parts = [one.column("value").to_pylist() for one in inner.batches[-1].parts]
        assert parts == [expected[:2], expected[2:]]
        assert batch.messages.column("value").to_pylist()[0] == record(1)  # shared with others


def test_known_schemas_need_no_registry(start_schema_registry: StartSchemaRegistry) -> None:
    """While it is down they are sent; a new one waits, and nothing of its batch is sent."""
    server = start_schema_registry()
    with sink(server.url) as (to, inner):
        to.send(avro(("t", record(1), 0)), allow)
        server.stop(immediate=True)

        to.send(avro(("t", record(2), 0)), allow)
        with pytest.raises(SinkUnavailable, match="cannot be reached"):
            to.send(avro(("t", record(3), 0), ("t", record(4), 1)), allow)
        assert len(inner.batches) == 2

        to.close()
        server.restart()
        to.open()
        to.send(avro(("t", record(3), 0), ("t", record(4), 1)), allow)
        assert sent(inner) == [b"\0\0\0\0\1\3", b"\0\0\0\0\2\4"]


def test_a_refused_schema_stops_the_sink(schema_registry: SchemaRegistryServer) -> None:
    """Nothing is sent, not even what stands before it; no schema of the subject is changed."""
    with sink(schema_registry.url) as (to, inner):
        to.send(avro(("refused", record(1), 1)), allow)

        with pytest.raises(SinkRejected, match="not compatible"):
            to.send(avro(("refused", record(1), 1), ("refused", record(1), 0)), allow)

        assert len(inner.batches) == 1
        assert len(schema_registry.versions("refused-value")) == 1


def test_a_lost_lease_registers_nothing(schema_registry: SchemaRegistryServer) -> None:
    """Whoever may not send any more does not change the registry either."""

    def refuse() -> None:
        raise LeaseLost("lost")

    with sink(schema_registry.url) as (to, inner):
        with pytest.raises(LeaseLost):
            to.send(avro(("lost", record(1), 0)), refuse)

        assert (inner.batches, schema_registry.versions("lost-value")) == ([], [])
        assert (to.exactly_once, to.takes_parts, to.traffic) == (True, True, None)
