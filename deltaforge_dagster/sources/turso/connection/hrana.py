"""Databases on servers: Hrana over HTTP, which libSQL's server (`sqld`) and Turso's cloud speak.

Specification: github.com/tursodatabase/libsql, "The Hrana protocol specification (version 2)",
"Hrana over HTTP". Statements of one transaction are requests to `POST /v2/pipeline` that carry the
*baton* of the previous answer, and go to the `base_url` in it. Integers are sent as text, blobs as
Base64::

    {"baton": null, "requests": [{"type": "execute", "stmt": {"sql": "...", "args": [...]}}, ...]}
    {"baton": "...", "base_url": null, "results": [{"type": "ok", "response": {"result": {"rows":
    ...}}}]}
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import httpx

from deltaforge_dagster.errors import (
    AuthFailed,
    DeltaforgeError,
    PermissionMissing,
    SourceMisconfigured,
    SourceUnavailable,
)
from deltaforge_dagster.sources.turso.connection.sessions import Row, TursoSession, Value

_REQUEST_SECONDS = 30.0
_TOO_LARGE = "RESPONSE_TOO_LARGE"
_TRANSIENT = ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_IOERR", "TRANSACTION", "STREAM", "BATON")
_NOT_ALLOWED = ("SQLITE_READONLY", "SQLITE_AUTH", "SQLITE_PERM", "BLOCKED", "AUTH")


class ResponseTooLarge(SourceMisconfigured):
    """The server refuses an answer of that size: request fewer rows."""


class HranaDatabase:
    """A database on a server.

    Args:
        url: `https://host:port/path`, without a trailing slash.
        token: The authentication token; None for a server without authentication.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        self._url = url
        self._headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self._lock = threading.Lock()
        self._client: httpx.Client | None = None

    @property
    def where(self) -> str:
        """The URL."""
        return self._url

    @contextmanager
    def session(self, seconds: float, *, write: bool = False) -> Generator[TursoSession]:
        """Begin a transaction; see `sessions.TursoDatabase`."""
        session = _HranaSession(self, min(max(seconds, 1.0), _REQUEST_SECONDS))
        try:
            session.query("BEGIN IMMEDIATE" if write else "BEGIN")
            yield session
            session.query("COMMIT")
        finally:
            session.close()

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def post(
        self, base: str, requests: list[dict[str, Any]], baton: str | None, seconds: float
    ) -> Any:
        """Send requests of one stream, and return the answer's JSON.

        Raises:
            DeltaforgeError: The server cannot be reached, or refuses the HTTP request.
        """
        try:
            answer = self._connected().post(
                f"{base}/v2/pipeline",
                json={"baton": baton, "requests": requests},
                headers=self._headers,
                timeout=seconds,
            )
        except (httpx.HTTPError, RuntimeError) as error:  # RuntimeError: closed meanwhile
            raise SourceUnavailable(f"{self.where}: {type(error).__name__}: {error}") from error
        if answer.status_code != httpx.codes.OK:
            raise self._refusal(answer)
        try:
            return json.loads(answer.content)
        except ValueError as error:
            raise SourceMisconfigured(f"{self.where}: the answer is not Hrana's") from error

    def _connected(self) -> httpx.Client:
        with self._lock:
            if self._client is None:
                self._client = httpx.Client(follow_redirects=False)
            return self._client

    def _refusal(self, answer: httpx.Response) -> DeltaforgeError:
        text = f"{self.where}: HTTP {answer.status_code} {answer.reason_phrase}"
        with suppress(ValueError, AttributeError):
            details = json.loads(answer.content)
            text += f": {details.get('message') or details.get('error') or ''}".rstrip(": ")
        if answer.status_code in {401, 403}:
            return AuthFailed(f"{text} (source.config.auth_token)")
        if answer.status_code in {408, 429} or answer.status_code >= 500:
            return SourceUnavailable(text)
        # 400 may mean that the baton has expired: the transaction is lost, but a new one may
        # succeed.
        return (
            SourceUnavailable(text)
            if answer.status_code == httpx.codes.BAD_REQUEST
            else SourceMisconfigured(text)
        )


class _HranaSession:
    def __init__(self, database: HranaDatabase, seconds: float) -> None:
        self._database = database
        self._seconds = seconds
        self._base = database.where
        self._baton: str | None = None

    def query(self, statement: str, parameters: Sequence[Value] = ()) -> list[Row]:
        arguments = [_argument(parameter) for parameter in parameters]
        request = {"type": "execute", "stmt": {"sql": statement, "args": arguments}}
        answer = self._database.post(self._base, [request], self._baton, self._seconds)
        try:
            self._baton = answer["baton"]
            self._base = (answer.get("base_url") or self._base).rstrip("/")
            (result,) = answer["results"]
            if result["type"] == "error":
                raise self._problem(result["error"])
            return [[_value(cell) for cell in row] for row in result["response"]["result"]["rows"]]
        except (KeyError, TypeError, ValueError) as error:
            where = self._database.where
            raise SourceMisconfigured(f"{where}: the answer is not Hrana's") from error

    def close(self) -> None:
        """Close the stream on the server, which rolls back an open transaction."""
        if self._baton is not None:
            with suppress(DeltaforgeError):
                self._database.post(self._base, [{"type": "close"}], self._baton, self._seconds)
            self._baton = None

    def _problem(self, error: dict[str, Any]) -> DeltaforgeError:
        code = str(error.get("code") or "")
        text = f"{self._database.where}: {error.get('message')}" + (f" ({code})" if code else "")
        if code == _TOO_LARGE or "too large" in text:
            return ResponseTooLarge(text)
        if any(word in code for word in _TRANSIENT):
            return SourceUnavailable(text)
        if any(word in code for word in _NOT_ALLOWED):
            return PermissionMissing(text)
        return SourceMisconfigured(text)


def _argument(value: Value) -> dict[str, Any]:
    match value:
        case None:
            return {"type": "null"}
        case int():
            return {"type": "integer", "value": str(value)}
        case float():
            return {"type": "float", "value": value}
        case str():
            return {"type": "text", "value": value}
        case bytes():
            return {"type": "blob", "base64": base64.b64encode(value).decode()}


def _value(cell: dict[str, Any]) -> Value:
    match cell["type"]:
        case "null":
            return None
        case "integer":
            return int(cell["value"])
        case "float":
            return float(cell["value"])
        case "text":
            return str(cell["value"])
        case "blob":
            text = str(cell["base64"])
            return base64.b64decode(text + "=" * (-len(text) % 4))  # it may come without padding
    raise ValueError("a value of an unknown type")
