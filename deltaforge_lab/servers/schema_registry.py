"""Run a schema registry, as a process of its own.

It has the part of Confluent's API that producers and consumers of Avro use.

Confluent Platform, "Schema Registry API Reference": subjects with versions, global ids,
compatibility (`BACKWARD`, `BACKWARD_TRANSITIVE`, `NONE`) for the registry and for subjects, basic
authentication, and TLS, also with certificates of clients. What it knows is in a file, so it
survives a restart. Confluent's own program is in no registry of packages.

It can also be the server that gives its clients tokens (`POST /token`; RFC 6749, section 4.4), all
of which a restart revokes; `GET /token` tells how many.
"""

from __future__ import annotations

import argparse
import base64
import json
import re
import secrets
import socket
import ssl
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, quote, quote_plus, unquote, urlsplit

from deltaforge_dagster.installation.process import ServerProcess, temporary_directory
from deltaforge_lab.servers.avro_compatibility import InvalidSchemaError, parse, problems
from deltaforge_lab.servers.base import OneProcessServer

_START_SECONDS = 60.0
_LEVELS = ("BACKWARD", "BACKWARD_TRANSITIVE", "NONE")
_MEDIA_TYPE = "application/vnd.schemaregistry.v1+json"


class SchemaRegistryServer(OneProcessServer):
    """A schema registry, created by `start`."""

    _stop_seconds = 5.0

    def __init__(self) -> None:
        super().__init__("schema registry")
        self._port = 0
        self._arguments: list[str] = []
        self._scheme = "http"
        self._user: str | None = None
        self._trusted: ssl.SSLContext | None = None

    @classmethod
    def start(
        cls,
        *,
        user: str | None = None,
        certificate: Path | None = None,
        key: Path | None = None,
        authority: Path | None = None,
        oauth: str | None = None,
        token_seconds: float = 3600.0,
    ) -> Self:
        """Start a registry.

        Args:
            user: `name:password` that every request needs.
            certificate: Certificate for TLS, which also says whom `ask` trusts.
            key: Its key.
            authority: Certificate of the authority that has signed those of clients, which need
                one then, and that of TLS.
            oauth: `id:secret` of the client that gets tokens, each of which is as good as `user`,
                which must be given, too.
            token_seconds: How long a token is valid.
        """
        server = cls()
        server._temporary = temporary_directory("schema-registry", None)
        server._data = server._temporary / "registry.json"
        server._user = user
        if user is not None:
            server._arguments += ["--user", user]
        if certificate is not None and key is not None:
            server._arguments += ["--certificate", str(certificate), "--key", str(key)]
            server._scheme = "https"
            server._trusted = ssl.create_default_context(cafile=certificate)
            server._trusted.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            if authority is not None:
                server._trusted.load_cert_chain(certificate, key)
                server._arguments += ["--authority", str(authority)]
        if oauth is not None:
            server._arguments += ["--oauth", oauth, "--token-seconds", str(token_seconds)]
        try:
            server._run_on_free_port(server._listen)
        except BaseException:
            server.close()
            raise
        return server

    @property
    def url(self) -> str:
        """The address of its API."""
        return f"{self._scheme}://127.0.0.1:{self._port}"

    def ask(self, path: str, content: Mapping[str, Any] | None = None, method: str = "GET") -> Any:
        """Return the answer to a request, JSON; raises if it is an error."""
        data = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, method=method)  # noqa: S310
        request.add_header("content-type", _MEDIA_TYPE)
        if self._user is not None:
            request.add_header("authorization", _basic(self._user))
        with urllib.request.urlopen(  # noqa: S310
            request, timeout=30, context=self._trusted
        ) as answer:
            return json.load(answer)

    def versions(self, subject: str) -> list[int]:
        """Return the ids of a subject's schemas, oldest first; empty for an unknown subject."""
        try:
            numbers = self.ask(f"/subjects/{quote(subject, safe='')}/versions")
        except urllib.error.HTTPError:
            return []
        return [
            self.ask(f"/subjects/{quote(subject, safe='')}/versions/{version}")["id"]
            for version in numbers
        ]

    def set_compatibility(self, level: str, subject: str | None = None) -> None:
        """Set the compatibility of a subject, or that of the registry."""
        path = "/config" if subject is None else f"/config/{quote(subject, safe='')}"
        self.ask(path, {"compatibility": level}, "PUT")

    def _listen(self, port: int) -> None:
        self._port = port

    def _run(self) -> None:
        assert self._temporary
        command = [sys.executable, "-m", __name__, str(self._port), str(self._data)]
        self._process = ServerProcess(
            "schema-registry",
            [*command, *self._arguments],
            directory=self._temporary,
            remove=self._temporary,
        )
        self._process.wait_until(self._answers, _START_SECONDS)

    def _answers(self) -> bool:
        try:
            self.ask("/subjects")
        except OSError:
            return False
        return True


class _RefusedError(Exception):
    """An answer that is an error."""

    def __init__(
        self, status: int, code: int, message: str, content: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.content = content or {"error_code": code, "message": message}


class _Registry:
    """What the registry knows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._content: dict[str, Any] = {"schemas": [], "subjects": {}, "levels": {"": "BACKWARD"}}
        if path.exists():
            self._content = json.loads(path.read_text())

    def answer(self, method: str, path: str, content: Any) -> Any:
        """Return the answer to a request."""
        with self._lock:
            for wanted, pattern, respond in self._requests():
                match = re.fullmatch(pattern, path)
                if wanted == method and match is not None:
                    answer = respond(
                        *map(unquote, match.groups()), *([] if content is None else [content])
                    )
                    if method != "GET":
                        self._path.write_text(json.dumps(self._content))
                    return answer
        raise _RefusedError(404, 404, "HTTP 404 Not Found")

    def _requests(self) -> list[tuple[str, str, Any]]:
        return [
            ("GET", "/subjects", lambda: sorted(self._content["subjects"])),
            ("GET", "/subjects/([^/]+)/versions", self._versions),
            ("GET", "/subjects/([^/]+)/versions/([^/]+)", self._version),
            ("POST", "/subjects/([^/]+)/versions", self._register),
            ("POST", "/subjects/([^/]+)", self._lookup),
            ("GET", "/schemas/ids/([0-9]+)", self._schema),
            ("GET", "/config", lambda: {"compatibilityLevel": self._content["levels"][""]}),
            (
                "GET", "/config/([^/]+)",
                lambda subject: {"compatibilityLevel": self._level(subject)},
            ),
            ("PUT", "/config", lambda content: self._set_level("", content)),
            ("PUT", "/config/([^/]+)", self._set_level),
        ]  # fmt: skip

    def _ids(self, subject: str) -> list[int]:
        if subject not in self._content["subjects"]:
            raise _RefusedError(404, 40401, f"Subject '{subject}' not found.")
        ids: list[int] = self._content["subjects"][subject]
        return ids

    def _versions(self, subject: str) -> list[int]:
        return list(range(1, len(self._ids(subject)) + 1))

    def _version(self, subject: str, version: str) -> Any:
        ids = self._ids(subject)
        number = len(ids) if version == "latest" else int(version)
        if not 1 <= number <= len(ids):
            raise _RefusedError(404, 40402, f"Version {version} not found.")
        return self._version_json(subject, number, ids[number - 1])

    def _version_json(self, subject: str, number: int, schema_id: int) -> Any:
        schema = self._content["schemas"][schema_id - 1]
        return {"subject": subject, "version": number, "id": schema_id, "schema": schema}

    def _register(self, subject: str, content: Any) -> Any:
        schema = _checked(content)
        ids = self._content["subjects"].get(subject, [])
        schemas = self._content["schemas"]
        schema_id = schemas.index(schema) + 1 if schema in schemas else 0
        if schema_id in ids:
            return {"id": schema_id}
        level = self._level(subject)
        earlier = [] if level == "NONE" else ids if level.endswith("TRANSITIVE") else ids[-1:]
        for earlier_id in earlier:
            reasons = problems(json.loads(schema), json.loads(schemas[earlier_id - 1]))
            if reasons:
                text = (
                    "Schema being registered is incompatible with an earlier schema for subject "
                    f'"{subject}", details: {reasons}'
                )
                raise _RefusedError(409, 409, text)
        if not schema_id:
            schemas.append(schema)
            schema_id = len(schemas)
        self._content["subjects"].setdefault(subject, []).append(schema_id)
        return {"id": schema_id}

    def _lookup(self, subject: str, content: Any) -> Any:
        schema = _checked(content)
        for number, schema_id in enumerate(self._ids(subject), start=1):
            if self._content["schemas"][schema_id - 1] == schema:
                return self._version_json(subject, number, schema_id)
        raise _RefusedError(404, 40403, "Schema not found")

    def _schema(self, number: str) -> Any:
        if not 1 <= int(number) <= len(self._content["schemas"]):
            raise _RefusedError(404, 40403, f"Schema {number} not found")
        return {"schema": self._content["schemas"][int(number) - 1]}

    def _level(self, subject: str) -> str:
        level: str = self._content["levels"].get(subject, self._content["levels"][""])
        return level

    def _set_level(self, subject: str, content: Any) -> Any:
        level = content.get("compatibility") if isinstance(content, dict) else None
        if level not in _LEVELS:
            raise _RefusedError(422, 42203, f"Invalid compatibility level {level}")
        self._content["levels"][subject] = level
        return {"compatibility": level}


def _checked(content: Any) -> str:
    """Return the schema of a request, as text with a single spelling."""
    try:
        schema = json.loads(content["schema"])
        parse(schema)
    except (KeyError, TypeError, ValueError, InvalidSchemaError) as error:
        raise _RefusedError(
            422, 42201, f"Input schema is an invalid Avro schema: {error}"
        ) from error
    return json.dumps(schema, separators=(",", ":"))


class _Logins:
    """Who may ask the registry.

    Args:
        user: `name:password`; None if everybody may.
        client: `id:secret` of the client that gets tokens; None for no tokens.
        token_seconds: How long a token is valid.
    """

    def __init__(self, user: str | None, client: str | None, token_seconds: float) -> None:
        self._user = None if user is None else _basic(user)
        # RFC 6749, section 2.3.1: both are encoded as in a form.
        self._client = (
            None if client is None else _basic(":".join(map(quote_plus, client.split(":", 1))))
        )
        self._token_seconds = token_seconds
        self._ends: dict[str, float] = {}
        self._refused = 0

    def check(self, authorization: str | None) -> None:
        """Refuse a request without a login."""
        if self._user is None or authorization == self._user:
            return
        if time.monotonic() < self._ends.get(authorization or "", 0.0):
            return
        self._refused += 1
        raise _RefusedError(401, 401, "Unauthorized")

    def new_token(self, authorization: str | None, form: str) -> dict[str, Any]:
        """Return the answer to a request for a token."""
        if self._client is None or authorization != self._client:
            raise _RefusedError(401, 401, "Unauthorized", {"error": "invalid_client"})
        if parse_qs(form).get("grant_type") != ["client_credentials"]:
            raise _RefusedError(400, 400, "", {"error": "unsupported_grant_type"})
        token = secrets.token_urlsafe()
        self._ends[f"Bearer {token}"] = time.monotonic() + self._token_seconds
        return {"access_token": token, "token_type": "Bearer", "expires_in": self._token_seconds}

    def counted(self) -> dict[str, int]:
        """Return how many tokens were given, and how many requests were refused."""
        return {"given": len(self._ends), "refused": self._refused}


def _basic(login: str) -> str:
    """Return the header of basic authentication."""
    return f"Basic {base64.b64encode(login.encode()).decode()}"


class _RegistryHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    registry: _Registry
    logins: _Logins

    def _respond(self) -> None:
        size = int(self.headers.get("content-length") or 0)
        text = self.rfile.read(size)
        try:
            status, answer = 200, self._answer(text.decode())
        except _RefusedError as error:
            status, answer = error.status, error.content
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-type", _MEDIA_TYPE)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_PUT = _respond  # noqa: N815 - the names that the base class calls

    def _answer(self, text: str) -> Any:
        path, authorization = urlsplit(self.path).path, self.headers.get("authorization")
        if (self.command, path) == ("POST", "/token"):
            return self.logins.new_token(authorization, text)
        self.logins.check(authorization)
        if path == "/token":
            return self.logins.counted()
        return self.registry.answer(self.command, path, json.loads(text) if text else None)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Log nothing."""


class _TlsServer(ThreadingHTTPServer):
    """Makes each connection in the thread that serves it, so that one that fails holds up none."""

    context: ssl.SSLContext

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection; tell a client without the right certificate why it gets no answer."""
        with self.context.wrap_socket(
            request, server_side=True, do_handshake_on_connect=False
        ) as secured:
            try:
                secured.do_handshake()
            except OSError:
                # Closed with something unread, the connection would be reset, and the alert lost.
                secured.settimeout(5.0)
                with suppress(OSError):
                    secured.shutdown(socket.SHUT_WR)
                    while secured.recv(4096):
                        pass
                return
            super().finish_request(secured, client_address)


def _server(port: int, options: argparse.Namespace) -> ThreadingHTTPServer:
    if options.certificate is None:
        return ThreadingHTTPServer(("127.0.0.1", port), _RegistryHandler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(options.certificate, options.key)
    if options.authority is not None:
        context.load_verify_locations(options.authority)
        context.verify_mode = ssl.CERT_REQUIRED
    server = _TlsServer(("127.0.0.1", port), _RegistryHandler)
    server.context = context
    return server


def _serve() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("path", type=Path)
    parser.add_argument("--user")
    parser.add_argument("--certificate")
    parser.add_argument("--key")
    parser.add_argument("--authority")
    parser.add_argument("--oauth")
    parser.add_argument("--token-seconds", type=float, default=0.0)
    options = parser.parse_args()
    _RegistryHandler.registry = _Registry(options.path)
    _RegistryHandler.logins = _Logins(options.user, options.oauth, options.token_seconds)
    _server(options.port, options).serve_forever()


if __name__ == "__main__":
    _serve()
