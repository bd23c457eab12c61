"""Messages in Avro on their way to a sink: they get the ids of their schemas, each asked for once.

Also a schema registry over HTTP: what it says, and what becomes of answers that are none.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from deltaforge_dagster.config.sinks import AvroEncoding
from deltaforge_dagster.errors import (
    AuthFailed,
    DeltaforgeError,
    LeaseLost,
    PermissionMissing,
    SettingsError,
    SinkRejected,
    SinkUnavailable,
)
from deltaforge_dagster.installation.process import free_port
from deltaforge_dagster.sinks.base import (
    AVRO_MESSAGES,
    MESSAGES,
    MessageSchema,
    SendGuard,
    SinkBatch,
    SinkPosition,
)
from deltaforge_dagster.sinks.schema_registry import AvroSink, SchemaRegistryClient, findings
from deltaforge_dagster.testing.sinks import allow
from deltaforge_lab.servers.schema_registry import SchemaRegistryServer
from tests.fix_schema_registry import StartSchemaRegistry
from tests.sinks.kafka.test_security import Authority

INT, LONG, TEXT = '{"type":"int"}', '{"type":"long"}', '{"type":"string"}'
SECRET = "geheim"


def encoding(url: str, **more: Any) -> AvroEncoding:
    """Return the settings of a sink."""
    return AvroEncoding.model_validate({"type": "avro", "schema_registry_url": url, **more})


@contextmanager
def client(url: str, **more: Any) -> Iterator[SchemaRegistryClient]:
    """Lend a client of a registry."""
    with closing(SchemaRegistryClient("topics", encoding(url, **more))) as registry:
        yield registry


def register(url: str, subject: str, schema: str, **more: Any) -> int:
    """Register a schema."""
    with client(url, **more) as registry:
        return registry.register(subject, schema)


def test_schemas_have_ids(schema_registry: SchemaRegistryServer) -> None:
    """A schema has the same id under each subject and each time; a compatible one is a new version."""
    with client(schema_registry.url + "/") as registry:
        first = registry.register("ids-a/b value", INT)

        assert registry.register("ids-a/b value", INT) == first
        assert registry.register("ids-other", INT) == first
        second = registry.register("ids-a/b value", LONG)
        assert schema_registry.versions("ids-a/b value") == [first, second]
        assert {"ids-a/b value", "ids-other"} <= set(registry.subjects())
        registry.close()
        assert registry.register("ids-other", INT) == first


def test_an_incompatible_schema(schema_registry: SchemaRegistryServer) -> None:
    """It is refused for good, with the registry's reason and what to do; the subject stays as it is."""
    first = register(schema_registry.url, "strict", INT)

    with pytest.raises(SinkRejected, match=r"not compatible.*int cannot be read as string.*PUT /config/strict"):  # fmt: skip
        register(schema_registry.url, "strict", TEXT)

    assert schema_registry.versions("strict") == [first]
    schema_registry.set_compatibility("NONE", "strict")
    assert register(schema_registry.url, "strict", TEXT) != first


def test_logging_in_over_tls(start_schema_registry: StartSchemaRegistry, tmp_path: Path) -> None:
    """With user, password and the authority's certificate; without one of them it says what is missing, and no secret."""
    ours, foreign = Authority(tmp_path, "ours"), Authority(tmp_path, "foreign")
    signed = ours.sign("registry")
    url = start_schema_registry(user=f"me:{SECRET}", certificate=signed, key=signed).url
    login = {"username": "me", "password": SECRET}

    assert register(url, "tls", INT, ca_file=str(ours.file), **login) == 1
    for settings, error in (
        ({"ca_file": str(ours.file)}, AuthFailed),
        ({"ca_file": str(ours.file), **login, "password": "wrong"}, AuthFailed),
        ({"ca_file": str(foreign.file), **login}, SinkUnavailable),
        (login, SinkUnavailable),
        ({"ca_file": str(tmp_path / "none.pem"), **login}, SettingsError),
    ):
        with pytest.raises(error) as caught:
            register(url, "tls", INT, **settings)
        assert SECRET not in str(caught.value)
        (finding,) = findings("topics", encoding(url, **settings), ["a"])
        assert (finding.level, SECRET in finding.text) == ("error", False)


def test_a_registry_that_is_down() -> None:
    """It may come back."""
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(SinkUnavailable, match=f"schema registry at {url} cannot be reached"):
        register(url, "a", INT)


@contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    """Run a server with the same answer to everything; yield its address."""

    class Handler(BaseHTTPRequestHandler):
        def respond(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = respond  # noqa: N815 - the names that the base class calls

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


MESSAGE = json.dumps({"error_code": 1, "message": "said why"}).encode()


@pytest.mark.parametrize(
    ("status", "body", "error", "says"),
    [
        (200, b"<html>welcome</html>", SinkRejected, "is not JSON"),
        (200, b"[1]", SinkRejected, "no id of a schema"),
        (200, b'{"id": "7"}', SinkRejected, "no id of a schema"),
        (200, b'{"id": true}', SinkRejected, "no id of a schema"),
        (200, b'{"id": 2147483648}', SinkRejected, "no id of a schema"),
        (302, b"", SinkRejected, "HTTP 302"),
        (404, b"nothing here", SinkRejected, "HTTP 404; check encoding.schema_registry_url"),
        (422, MESSAGE, SinkRejected, r"HTTP 422 \(said why\)"),
        (409, MESSAGE, SinkRejected, r"not compatible with an earlier one \(said why\)"),
        (401, MESSAGE, AuthFailed, "encoding.username"),
        (403, MESSAGE, PermissionMissing, r"HTTP 403 \(said why\)"),
        (429, b"", SinkUnavailable, "HTTP 429"),
        (500, MESSAGE, SinkUnavailable, r"HTTP 500 \(said why\)"),
        (503, b"\xff", SinkUnavailable, "HTTP 503"),
    ],
)
def test_other_answers(status: int, body: bytes, error: type[DeltaforgeError], says: str) -> None:
    """Each is an error that names sink and registry; what may pass is tried again, all else needs a person."""
    with answering(status, body) as url, pytest.raises(error, match=says) as caught:
        register(url, "a", INT)
    assert f"sink topics: the schema registry at {url}" in str(caught.value)


def test_preflight(schema_registry: SchemaRegistryServer) -> None:
    """It says what the registry demands of each subject that the file determines, and registers nothing."""
    register(schema_registry.url, "seen-value", INT)
    schema_registry.set_compatibility("NONE", "seen-value")
    before = schema_registry.ask("/subjects")

    def texts(names: list[str], **more: Any) -> list[str]:
        found = findings("topics", encoding(schema_registry.url, **more), names)
        return [f"{one.level}: {one.text}" for one in found]

    assert texts(["seen", "new", "cdc.${source.table}"]) == [
        f"ok: the schema registry at {schema_registry.url} answers",
        "ok: the compatibility of subject 'seen-value' is NONE",
        "ok: the compatibility of subject 'new-value', which it does not have yet, is BACKWARD",
    ]
    assert texts(["seen"], subject_strategy="record_name")[1:] == [
        "ok: the compatibility of its subjects is BACKWARD"
    ]
    assert schema_registry.ask("/subjects") == before
    with answering(200, b"[]") as url:
        (_, note) = findings("topics", encoding(url), ["a"])
    assert note.level == "note"


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
