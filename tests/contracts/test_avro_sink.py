"""What every sink promises a deliverer, kept by one whose messages are Avro, with transactions of Kafka."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import fastavro
import pyarrow as pa
import pytest

from deltaforge_dagster.config.sinks import AvroEncoding
from deltaforge_dagster.kernels.avro_bytes import varint
from deltaforge_dagster.sinks.base import (
    AVRO_MESSAGES,
    MessageSchema,
    SendGuard,
    Sink,
    SinkBatch,
    SinkPosition,
)
from deltaforge_dagster.sinks.schema_registry.client import SchemaRegistryClient
from deltaforge_dagster.sinks.schema_registry.sink import AvroSink
from deltaforge_dagster.testing.sinks import (
    ExactlyOnceContract,
    SinkContract,
    Subject,
    allow,
    messages,
)
from deltaforge_lab.servers.kafka import KafkaServer
from deltaforge_lab.servers.schema_registry import SchemaRegistryServer
from tests.contracts.test_sink import kafka_subject
from tests.fix_kafka import read_topic

pytestmark = pytest.mark.kafka

TEXT = MessageSchema('{"type":"string"}', "string")


@dataclass(frozen=True)
class Texts:
    """Sends the contract's messages, which are text, as strings of Avro."""

    inner: Sink

    @property
    def exactly_once(self) -> bool:
        """Whether the sink keeps its own position."""
        return self.inner.exactly_once

    @property
    def takes_parts(self) -> bool:
        """Whether the sink takes several parts at once."""
        return self.inner.takes_parts

    def open(self) -> None:
        """Open the sink."""
        self.inner.open()

    def position(self) -> SinkPosition | None:
        """Return the sink's position."""
        return self.inner.position()

    def send(self, batch: SinkBatch, guard: SendGuard) -> int:
        """Send the values as records."""
        *earlier, messages = (encoded(part) for part in batch.parts)
        given = replace(batch, messages=messages, earlier=tuple(earlier), schemas=(TEXT,))
        return self.inner.send(given, guard)

    def close(self) -> None:
        """Close the sink."""
        self.inner.close()


def encoded(messages: pa.RecordBatch) -> pa.RecordBatch:
    """Return messages whose values are records."""
    rows = [
        {**one, "value": b"\0" * 5 + varint(len(text)) + text, "schema": 0}
        for one in messages.to_pylist()
        for text in [one["value"].encode()]
    ]
    return pa.RecordBatch.from_pylist(rows, AVRO_MESSAGES)


def decoded(value: bytes) -> str:
    """Return the string in a message."""
    assert value[0] == 0
    return str(fastavro.schemaless_reader(io.BytesIO(value[5:]), "string", None))


@pytest.fixture
def subject(
    request: pytest.FixtureRequest,
    kafka_server: KafkaServer,
    schema_registry: SchemaRegistryServer,
) -> Iterator[Subject]:
    """A Kafka sink with transactions, open."""
    plain = kafka_subject(request, exactly_once=True)
    encoding = AvroEncoding(
        type="avro", schema_registry_url=schema_registry.url, subject_strategy="record_name"
    )

    def wrapped(inner: Sink) -> Sink:
        return Texts(AvroSink(inner, SchemaRegistryClient("subject", encoding), encoding))

    def texts(*marks: tuple[str, bytes]) -> Callable[[str], list[str]]:
        def read(name: str) -> list[str]:
            records = read_topic(kafka_server.brokers, plain.destination(name))
            return [decoded(one.value or b"") for one in records if one.headers == marks]

        return read

    made = Subject(
        sink=wrapped(plain.sink),
        another=lambda: wrapped(plain.another()),
        destination=plain.destination,
        delivered=texts(),
        replayed=texts(("df-replay", b"r1")),
    )
    made.sink.open()
    # The guard is called for the registration, too; the contract counts the calls for messages.
    made.sink.send(messages([(plain.destination("first"), "{}")]), allow)
    yield made
    made.sink.close()


@pytest.fixture
def exact(subject: Subject) -> Subject:
    """The same: it stores its position."""
    return subject


@pytest.mark.soak("faults")
class TestAvroSink(SinkContract):
    """The promises of every sink; the sink inside keeps them in the gate."""


class TestAvroSinkExactlyOnce(ExactlyOnceContract):
    """The promises of a sink that stores its position."""
