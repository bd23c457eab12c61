"""How a schema registry is reached: certificates of clients, and tokens of OAuth's client credentials."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import httpx
import pytest

from deltaforge_dagster.config.sinks import AvroEncoding
from deltaforge_dagster.errors import (
    AuthFailed,
    DeltaforgeError,
    PermissionMissing,
    SettingsError,
    SinkRejected,
    SinkUnavailable,
)
from deltaforge_dagster.installation.process import free_port
from deltaforge_dagster.sinks.registry_connection import REQUEST_SECONDS
from deltaforge_dagster.sinks.schema_registry import SchemaRegistryClient, findings
from deltaforge_lab.servers.http import HttpAnswer, HttpServer, Received
from deltaforge_lab.servers.schema_registry import SchemaRegistryServer
from tests.e2e.deployment import eventually
from tests.fix_schema_registry import StartSchemaRegistry
from tests.sinks.kafka.test_security import Authority

INT, LONG = '{"type":"int"}', '{"type":"long"}'
SECRET = "ge+heim:ß"
USER = "admin:other"
TOKEN = "abc.DEF-1"


def encoding(url: str, **more: Any) -> AvroEncoding:
    """Return the settings of a sink."""
    return AvroEncoding.model_validate({"type": "avro", "schema_registry_url": url, **more})


def oauth(url: str, **more: Any) -> dict[str, Any]:
    """Return the login of a client whose tokens the server at `url` gives."""
    return {
        "oauth_token_url": f"{url}/token",
        "oauth_client_id": "df",
        "oauth_client_secret": SECRET,
        **more,
    }


@contextmanager
def client(url: str, **more: Any) -> Iterator[SchemaRegistryClient]:
    """Lend a client of a registry."""
    with closing(SchemaRegistryClient("topics", encoding(url, **more))) as registry:
        yield registry


def subjects(url: str, **more: Any) -> list[str]:
    """Ask a registry for its subjects."""
    with client(url, **more) as registry:
        return registry.subjects()


def register(url: str, **more: Any) -> int:
    """Register a schema; the server of `http_server` takes no other requests."""
    with client(url, **more) as registry:
        return registry.register("a", INT)


@pytest.fixture
def start_oauth(start_schema_registry: StartSchemaRegistry) -> Callable[..., SchemaRegistryServer]:
    """Start a registry that wants tokens, which it gives itself."""

    def start(**options: Any) -> SchemaRegistryServer:
        return start_schema_registry(user=USER, oauth=f"df:{SECRET}", **options)

    return start


def test_a_certificate_of_the_client(
    start_schema_registry: StartSchemaRegistry, tmp_path: Path
) -> None:
    """It is shown, and its key may be in a file of its own; without it, or with a stranger's, the registry refuses."""
    ours, foreign = Authority(tmp_path, "ours"), Authority(tmp_path, "foreign")
    signed = ours.sign("registry")
    server = start_schema_registry(certificate=signed, key=signed, authority=ours.file)
    trusted = {"ca_file": str(ours.file)}
    both = ours.sign("client")
    key, certificate = tmp_path / "key", tmp_path / "certificate"
    text = both.read_text()
    begin = text.index("-----BEGIN CERTIFICATE")
    key.write_text(text[:begin])
    certificate.write_text(text[begin:])

    with client(server.url, **trusted, certificate_file=str(both)) as registry:
        assert registry.register("mtls", INT) == 1
    split = {"certificate_file": str(certificate), "key_file": str(key)}
    assert subjects(server.url, **trusted, **split) == ["mtls"]
    for more in ({}, {"certificate_file": str(foreign.sign("stranger"))}):
        with pytest.raises(AuthFailed, match=r"refuses the client's certificate.*certificate_file"):
            subjects(server.url, **trusted, **more)
        (finding,) = findings("topics", encoding(server.url, **trusted, **more), ["a"])
        assert (finding.level, "certificate_file" in finding.text) == ("error", True)


def test_certificates_that_cannot_be_used(tmp_path: Path) -> None:
    """A missing file is named; a key that is encrypted or lacks is no question on the terminal, but an error."""
    ours = Authority(tmp_path, "ours")
    lost, good = str(tmp_path / "lost.pem"), str(ours.sign("client"))
    url = "https://127.0.0.1:1"
    for field, files in (
        ("ca_file", {"ca_file": lost}),
        ("certificate_file", {"certificate_file": lost}),
        ("key_file", {"certificate_file": good, "key_file": lost}),
    ):
        with pytest.raises(SettingsError, match=rf"encoding\.{field} names the file .*lost\.pem"):
            subjects(url, **files)
    for unusable in (ours.sign("locked", password=SECRET), ours.file):
        with pytest.raises(SettingsError, match="no certificate with its key, or the key is enc"):
            subjects(url, certificate_file=str(unusable))


def test_a_token_is_kept_until_it_is_refused(
    start_oauth: Callable[..., SchemaRegistryServer],
) -> None:
    """One is enough for all requests; when the server has revoked it, another one is fetched at once."""
    server = start_oauth()
    with client(server.url, **oauth(server.url)) as registry:
        first = registry.register("a", INT)
        assert registry.register("b", INT) == first
        assert registry.subjects() == ["a", "b"]
        registry.close()  # its token stays valid
        assert registry.subjects() == ["a", "b"]
        assert server.ask("/token") == {"given": 1, "refused": 0}

        server.stop()
        server.restart()
        assert registry.register("a", LONG) != first
        assert server.ask("/token") == {"given": 1, "refused": 1}


def test_a_token_that_expires(start_oauth: Callable[..., SchemaRegistryServer]) -> None:
    """Another one is fetched before the registry refuses it."""
    server = start_oauth(token_seconds=2.0)
    with client(server.url, **oauth(server.url)) as registry:
        registry.register("a", INT)
        time.sleep(2.1)
        registry.register("b", INT)

    assert server.ask("/token") == {"given": 2, "refused": 0}


def test_tokens_over_tls(start_oauth: Callable[..., SchemaRegistryServer], tmp_path: Path) -> None:
    """The token URL is asked with the same authorities and the same certificate as the registry."""
    ours = Authority(tmp_path, "ours")
    signed = ours.sign("registry")
    server = start_oauth(certificate=signed, key=signed, authority=ours.file)
    files = {"ca_file": str(ours.file), "certificate_file": str(ours.sign("client"))}

    assert subjects(server.url, **files, **oauth(server.url)) == []
    with pytest.raises(AuthFailed, match=f"its token URL {server.url}/token refuses the client's"):
        subjects(server.url, ca_file=str(ours.file), **oauth(server.url))
    with pytest.raises(SinkUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
        subjects("http://127.0.0.1:1", **oauth(server.url))


def test_a_wrong_secret(
    start_oauth: Callable[..., SchemaRegistryServer], caplog: pytest.LogCaptureFixture
) -> None:
    """The credentials are refused; no text has them, not even logs of libraries."""
    caplog.set_level(logging.DEBUG)
    server = start_oauth()
    wrong = oauth(server.url, oauth_client_secret="falsch")

    with pytest.raises(AuthFailed, match=r"\(invalid_client\) .*oauth_client_secret") as caught:
        subjects(server.url, **wrong)
    (finding,) = findings("topics", encoding(server.url, **wrong), ["a"])
    assert finding.level == "error"
    assert subjects(server.url, **oauth(server.url)) == []
    text = f"{caught.value} {finding.text} {caplog.text}"
    assert not [word for word in ("falsch", SECRET, "Bearer", "Basic") if word in text]


def said(**content: Any) -> bytes:
    """Return the JSON of an answer."""
    return json.dumps(content).encode()


@pytest.mark.parametrize(
    ("answer", "error", "says"),
    [
        (HttpAnswer(401, body=said(error="invalid_client")), AuthFailed, r"HTTP 401 \(invalid_client\)"),
        (HttpAnswer(400, body=said(error="unauthorized_client")), AuthFailed, "HTTP 400"),
        (HttpAnswer(400, body=said(error="invalid_scope", error_description="no x")), SinkRejected, r"\(invalid_scope: no x\); check encoding\.oauth_token_url and encoding\.oauth_scope"),
        (HttpAnswer(400, body=said(error=f"was {SECRET}")), SinkRejected, r"\(was \*\*\*\)"),
        (HttpAnswer(403), PermissionMissing, "HTTP 403"),
        (HttpAnswer(429), SinkUnavailable, "HTTP 429"),
        (HttpAnswer(400, body=said(error="temporarily_unavailable")), SinkRejected, "temporarily"),
        (HttpAnswer(503, body=b"<html>"), SinkUnavailable, "HTTP 503"),
        (HttpAnswer(drop=True), SinkUnavailable, "cannot be reached"),
        (HttpAnswer(302, {"location": "/elsewhere"}), SinkRejected, "HTTP 302"),
        (HttpAnswer(200, body=b"<html>"), SinkRejected, "no token"),
        (HttpAnswer(200, body=b"[]"), SinkRejected, "no token"),
        (HttpAnswer(200, body=said(access_token=1)), SinkRejected, "no token"),
        (HttpAnswer(200, body=said(access_token=f"{TOKEN}\n")), SinkRejected, "no token"),
    ],
)  # fmt: skip
def test_no_token(
    http_server: HttpServer, answer: HttpAnswer, error: type[DeltaforgeError], says: str
) -> None:
    """The error names the token URL and has neither secret nor token; the registry is not asked, nobody else either."""
    http_server.answer = lambda _: answer
    with pytest.raises(error, match=says) as caught:
        register(http_server.url, **oauth(http_server.url))

    assert f"its token URL {http_server.url}/token" in str(caught.value)
    assert not [word for word in (SECRET, TOKEN) if word in str(caught.value)]
    assert {one.target for one in http_server.received} == {"/token"}


def test_what_is_sent(http_server: HttpServer) -> None:
    """The secret only to the token URL, encoded as RFC 6749 says; the token and Confluent Cloud's ids only to the registry."""
    http_server.answer = lambda one: HttpAnswer(
        200, body=said(access_token=TOKEN) if one.target == "/token" else said(id=1)
    )
    cloud = {"oauth_logical_cluster": "lsrc-1", "oauth_identity_pool": "pool-1,pool-2"}
    register(http_server.url, **oauth(http_server.url))
    register(http_server.url, **oauth(http_server.url, oauth_scope="a b", **cloud))

    plain_token, plain, scoped_token, scoped = http_server.received
    forms = [parse_qs(one.body.decode()) for one in (plain_token, scoped_token)]
    asked = {"grant_type": ["client_credentials"]}
    assert forms == [asked, {**asked, "scope": ["a b"]}]
    basic = httpx.BasicAuth("df", "ge%2Bheim%3A%C3%9F").auth_flow(httpx.Request("GET", ""))
    login = next(basic).headers["authorization"]
    assert {one.headers["authorization"] for one in (plain_token, scoped_token)} == {login}
    assert {one.headers["authorization"] for one in (plain, scoped)} == {f"Bearer {TOKEN}"}
    names = ("target-sr-cluster", "confluent-identity-pool-id")
    assert [[one.headers.get(name) for name in names] for one in http_server.received] == [
        [None, None],
        [None, None],
        [None, None],
        ["lsrc-1", "pool-1,pool-2"],
    ]


@pytest.mark.parametrize(
    ("lifetime", "tokens"),
    [({}, 1), ({"expires_in": "soon"}, 1), ({"expires_in": "3600"}, 1), ({"expires_in": 0}, 2)],
)
def test_lifetimes(http_server: HttpServer, lifetime: dict[str, Any], tokens: int) -> None:
    """A token without a lifetime is used until the registry refuses it; numbers may be text."""
    http_server.answer = lambda one: HttpAnswer(
        200, body=said(access_token=TOKEN, **lifetime) if one.target == "/token" else said(id=1)
    )
    with client(http_server.url, **oauth(http_server.url)) as registry:
        registry.register("a", INT)
        registry.register("a", INT)

    assert [one.target for one in http_server.received].count("/token") == tokens


def test_a_registry_that_refuses_new_tokens(http_server: HttpServer) -> None:
    """It is asked once, and the error says which of the settings decide what a token permits."""
    http_server.answer = lambda one: HttpAnswer(
        200 if one.target == "/token" else 401, body=said(access_token=TOKEN)
    )
    with pytest.raises(AuthFailed, match=r"HTTP 401 \(encoding\.oauth_scope"):
        register(http_server.url, **oauth(http_server.url))

    assert [one.target for one in http_server.received] == ["/token", "/subjects/a/versions"]


def test_a_token_url_that_is_down(http_server: HttpServer) -> None:
    """The error names it, and not the registry, which is up."""
    gone = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(SinkUnavailable, match=f"its token URL {gone}/token cannot be reached"):
        register(http_server.url, **oauth(gone))


@pytest.mark.parametrize("hanging", ["/token", "/subjects/a/versions"])
def test_closing_ends_a_request(http_server: HttpServer, hanging: str) -> None:
    """At once, whichever server does not answer; nothing more is asked, until the next request."""
    slow = [True]

    def answer(one: Received) -> HttpAnswer:
        body = said(access_token=TOKEN, id=1)
        return HttpAnswer(200, body=body, after=60.0 if slow[0] and one.target == hanging else 0.0)

    http_server.answer = answer
    with (
        client(http_server.url, **oauth(http_server.url)) as registry,
        ThreadPoolExecutor() as pool,
    ):
        request = pool.submit(registry.register, "a", INT)
        eventually(lambda: hanging in [one.target for one in http_server.received])
        begin = time.monotonic()
        registry.close()

        with pytest.raises(SinkUnavailable, match="cannot be reached"):
            request.result()
        assert time.monotonic() - begin < REQUEST_SECONDS / 2
        assert http_server.received[-1].target == hanging
        slow[0] = False
        assert registry.register("a", INT) == 1
