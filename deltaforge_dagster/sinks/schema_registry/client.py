"""A client of a schema registry (Confluent Platform, "Schema Registry API Reference").

Schemas are registered with `POST /subjects/<subject>/versions`, which returns the id of a schema
that the subject already has, and so may be repeated. An id belongs to the schema and not to the
subject, and never changes.
"""

from __future__ import annotations

import json
import ssl
import threading
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import httpx

from deltaforge_dagster.config.sinks import AvroEncoding
from deltaforge_dagster.errors import (
    AuthFailed,
    DeltaforgeError,
    PermissionMissing,
    SettingsError,
    SinkRejected,
    SinkUnavailable,
)

CONNECT_SECONDS = 5.0
REQUEST_SECONDS = 10.0
_MEDIA_TYPE = "application/vnd.schemaregistry.v1+json"
_MOST_ID = (1 << 31) - 1
_MOST_TEXT = 500
_INCOMPATIBLE, _INVALID = 409, 422


class SchemaRegistryClient:
    """One registry, as one sink uses it.

    Args:
        sink_id: Name of the sink in errors.
        encoding: The registry, and how to log in.
    """

    def __init__(self, sink_id: str, encoding: AvroEncoding) -> None:
        self._url = encoding.schema_registry_url.rstrip("/")
        self._encoding = encoding
        self._where = f"sink {sink_id}: the schema registry at {self._url}"
        self._lock = threading.Lock()
        self._client: httpx.Client | None = None

    def register(self, subject: str, schema: str) -> int:
        """Register a schema under a subject, unless it is already, and return its id.

        Raises:
            SinkUnavailable: The registry cannot be reached, or cannot answer now.
            SinkRejected: The subject has an incompatible schema, or this is no registry.
            AuthFailed: It rejects the credentials.
            PermissionMissing: The user may not register the schema.
        """
        content = json.dumps({"schema": schema, "schemaType": "AVRO"}).encode()
        answer = self._request("POST", f"/subjects/{quote(subject, safe='')}/versions", content)
        if answer.status_code == _INCOMPATIBLE:
            raise SinkRejected(
                f"{self._where} refuses the new schema of subject {subject!r}, because it is not "
                f"compatible with an earlier one{_message(answer)}; set another compatibility for "
                f"the subject (PUT /config/{subject}), or send to another topic; "
                "nothing is sent until then"
            )
        self._check(answer, f"register a schema under subject {subject!r}")
        reply = self._content(answer)
        number = reply.get("id") if isinstance(reply, dict) else None
        if type(number) is not int or not 0 <= number <= _MOST_ID:
            raise self._no_registry("its answer has no id of a schema")
        return number

    def subjects(self) -> list[str]:
        """Return the names of all subjects that the user may see; raises what `register` raises."""
        answer = self._request("GET", "/subjects")
        self._check(answer, "list subjects")
        reply = self._content(answer)
        if not isinstance(reply, list):
            raise self._no_registry("its answer is no list of subjects")
        return [str(subject) for subject in reply]

    def compatibility(self, subject: str | None) -> str | None:
        """Return the compatibility of a subject, or with None the registry's own.

        Return None if the registry does not tell this user.
        """
        path = (
            "/config"
            if subject is None
            else f"/config/{quote(subject, safe='')}?defaultToGlobal=true"
        )
        answer = self._request("GET", path)
        if answer.status_code != httpx.codes.OK:
            return None
        reply = self._content(answer)
        level = reply.get("compatibilityLevel") if isinstance(reply, dict) else None
        return level if isinstance(level, str) else None

    def close(self) -> None:
        """Close the connections, which ends a request that another thread has made.

        The next request opens them again.
        """
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _request(self, method: str, path: str, content: bytes | None = None) -> httpx.Response:
        try:
            return self._connected().request(method, f"{self._url}{path}", content=content)
        except (httpx.HTTPError, RuntimeError) as error:  # RuntimeError: closed meanwhile
            reason = str(error) or type(error).__name__
            raise SinkUnavailable(f"{self._where} cannot be reached: {reason}") from error

    def _connected(self) -> httpx.Client:
        with self._lock:
            if self._client is None:
                user, password = self._encoding.username, self._encoding.password
                self._client = httpx.Client(
                    auth=(
                        None
                        if user is None or password is None
                        else (user, password.get_secret_value())
                    ),
                    headers={
                        "accept": f"{_MEDIA_TYPE}, application/json",
                        "content-type": _MEDIA_TYPE,
                    },
                    timeout=httpx.Timeout(REQUEST_SECONDS, connect=CONNECT_SECONDS),
                    verify=self._trusted(),
                    follow_redirects=False,
                )
            return self._client

    def _trusted(self) -> ssl.SSLContext | bool:
        if self._encoding.ca_file is None:
            return self._url.startswith("https:")
        try:
            return ssl.create_default_context(cafile=self._encoding.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise SettingsError(
                f"{self._where}: ca_file {self._encoding.ca_file} cannot be read as certificates "
                f"({error})"
            ) from error

    def _check(self, answer: httpx.Response, what: str) -> None:
        status = answer.status_code
        if status == httpx.codes.OK:
            return
        text = f"{self._where} does not {what}: HTTP {status}{_message(answer)}"
        if status == httpx.codes.UNAUTHORIZED:
            raise AuthFailed(f"{text} (encoding.username, encoding.password)")
        if status == httpx.codes.FORBIDDEN:
            raise PermissionMissing(f"{text}; give the user the right to do it")
        if status == _INVALID:
            raise SinkRejected(text)
        if status in {408, 425, 429} or status >= httpx.codes.INTERNAL_SERVER_ERROR:
            raise SinkUnavailable(text)
        raise self._no_registry(f"HTTP {status}{_message(answer)}")

    def _content(self, answer: httpx.Response) -> Any:
        try:
            return json.loads(answer.content)
        except ValueError:
            raise self._no_registry("its answer is not JSON") from None

    def _no_registry(self, why: str) -> DeltaforgeError:
        return SinkRejected(
            f"{self._where} does not answer as a schema registry does: {why}; "
            "check encoding.schema_registry_url"
        )


def _message(answer: httpx.Response) -> str:
    """Return the registry's message."""
    with suppress(ValueError, AttributeError):
        message = json.loads(answer.content).get("message")
        if isinstance(message, str) and message:
            return f" ({message[:_MOST_TEXT]})"
    return ""
