"""A schema registry over HTTP: what it says, and what becomes of answers that are none."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from deltaforge_dagster.config.sinks.encoding import AvroEncoding
from deltaforge_dagster.errors import (
    AuthFailed,
    DeltaforgeError,
    PermissionMissing,
    SettingsError,
    SinkRejected,
    SinkUnavailable,
)
from deltaforge_dagster.installation.process import free_port
from deltaforge_dagster.sinks.schema_registry.client import SchemaRegistryClient
from deltaforge_dagster.sinks.schema_registry.preflight import findings
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
