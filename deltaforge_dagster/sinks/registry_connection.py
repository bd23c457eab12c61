"""How a schema registry is reached: over TLS, with a client certificate, a password or a token.

Tokens are those of OAuth's client credentials (RFC 6749, section 4.4). One is kept until four
fifths of its lifetime are over or the registry refuses it. The client that asks the registry asks
for it, too: the same certificates are trusted, the same timeouts apply, and `close` ends both.

Confluent's own client (confluent-kafka 2.16.1) promises less. It asks for tokens with another HTTP
client, which knows no `ca_file` and is not closed; its error for a token that it does not get has
no status; it fails on a token without `expires_in`; and it cannot ask which compatibility applies
to a subject that has none of its own.
"""

from __future__ import annotations

import json
import math
import re
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote_plus

import httpx

from deltaforge_dagster.config.secrets import MASK
from deltaforge_dagster.config.sinks import AvroEncoding
from deltaforge_dagster.errors import (
    AuthFailed,
    DeltaforgeError,
    PermissionMissing,
    SettingsError,
    SinkRejected,
    SinkUnavailable,
)
from deltaforge_dagster.folders import unreadable_file

CONNECT_SECONDS = 5.0
REQUEST_SECONDS = 10.0
_MEDIA_TYPE = "application/vnd.schemaregistry.v1+json"
_MOST_TEXT = 500
_USED_SHARE = 0.8
"""The part of a token's lifetime in which it is used, so that it does not expire on its way."""

_TOKEN = re.compile(r"[A-Za-z0-9\-._~+/]+=*")
"""What a token may consist of (RFC 6750, section 2.1); anything else would break a header."""

_WRONG_CLIENT = {"invalid_client", "unauthorized_client", "access_denied"}
"""Errors of a token endpoint about the client, and not about its request."""


_CERTIFICATE_ALERT = re.compile(r"\[SSL: (\w*ALERT\w*(?:CERTIFICATE|UNKNOWN_CA)\w*)\]")
"""What the module `ssl` says when the server ends a connection because of our certificate."""


class RegistryConnection:
    """The connections to one registry, and to the token URL of its login.

    Args:
        where: The registry in errors: `sink a: the schema registry at https://...`.
        url: Its address, without a slash at the end.
        encoding: How to log in, and whom to trust.
    """

    def __init__(self, where: str, url: str, encoding: AvroEncoding) -> None:
        self._where = where
        self._url = url
        self._encoding = encoding
        self._lock = threading.Lock()
        self._client: httpx.Client | None = None
        self._sockets = _Sockets()
        self._tokens = _Tokens.of(where, encoding)

    def request(self, method: str, path: str, content: bytes | None = None) -> httpx.Response:
        """Make a request, and return its answer, whatever it is.

        Raises:
            SinkUnavailable: The registry or the token URL cannot be reached, or has no token now.
            AuthFailed: The client's certificate, or its OAuth client, is refused.
            PermissionMissing: The client may not have a token.
            SinkRejected: The token URL refuses the request for one, or is none.
            SettingsError: A file with certificates cannot be used.
        """
        client = self._connected()
        if self._tokens is None:
            return self._answer(client, method, path, content)
        token, is_new = self._tokens.current(client)
        answer = self._answer(client, method, path, content, token)
        if answer.status_code == httpx.codes.UNAUTHORIZED and not is_new:  # revoked, or expired
            token = self._tokens.renewed(client)
            answer = self._answer(client, method, path, content, token)
        return answer

    def close(self) -> None:
        """Close the connections, which ends a request that another thread has made.

        The next request opens them again.
        """
        with self._lock:
            client, self._client = self._client, None
            sockets, self._sockets = self._sockets, _Sockets()
        if client is not None:
            sockets.end()
            client.close()

    def _answer(
        self,
        client: httpx.Client,
        method: str,
        path: str,
        content: bytes | None,
        token: str | None = None,
    ) -> httpx.Response:
        headers = {"accept": f"{_MEDIA_TYPE}, application/json", "content-type": _MEDIA_TYPE}
        if token is not None:
            headers |= self._token_headers(token)
        try:
            return client.request(method, f"{self._url}{path}", content=content, headers=headers)
        except (httpx.HTTPError, RuntimeError) as error:  # RuntimeError: closed meanwhile
            raise _unreachable(self._where, error) from error

    def _token_headers(self, token: str) -> dict[str, str]:
        """Return the headers of a token, two of which are Confluent Cloud's."""
        headers = {
            "authorization": f"Bearer {token}",
            "target-sr-cluster": self._encoding.oauth_logical_cluster,
            "confluent-identity-pool-id": self._encoding.oauth_identity_pool,
        }
        return {name: value for name, value in headers.items() if value is not None}

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
                    timeout=httpx.Timeout(REQUEST_SECONDS, connect=CONNECT_SECONDS),
                    verify=self._tls(),
                    follow_redirects=False,
                    event_hooks={"request": [self._sockets.watch]},
                )
            return self._client

    def _tls(self) -> ssl.SSLContext | bool:
        """Return whom to trust, with the client's certificate; False without TLS.

        Raises:
            SettingsError: A file cannot be read or used.
        """
        encoding = self._encoding
        if not encoding.encrypted:
            return False
        unreadable = unreadable_file(
            {
                "encoding.ca_file": encoding.ca_file,
                "encoding.certificate_file": encoding.certificate_file,
                "encoding.key_file": encoding.key_file,
            }
        )
        if unreadable is not None:
            raise SettingsError(f"{self._where}: {unreadable}")
        used = "encoding.ca_file cannot be read as certificates"
        try:
            context = (
                httpx.create_ssl_context()
                if encoding.ca_file is None
                else ssl.create_default_context(cafile=encoding.ca_file)
            )
            if encoding.certificate_file is not None:
                used = (
                    "encoding.certificate_file and encoding.key_file are no certificate with its "
                    "key, or the key is encrypted"
                )
                # With a password nobody is asked for one on the terminal.
                context.load_cert_chain(encoding.certificate_file, encoding.key_file, password="")
        except OSError as error:  # ssl.SSLError is one
            raise SettingsError(f"{self._where}: {used} ({error.strerror or error})") from error
        return context


class _Sockets:
    """The sockets of one client, to end the requests of other threads.

    A thread that waits for an answer does not notice that another one closes its connection.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._ended = False

    def watch(self, request: httpx.Request) -> None:
        """Notice the sockets that a request opens."""
        request.extensions["trace"] = self._notice

    def end(self) -> None:
        """Let the other side's data end here, on these sockets and on those that are opened yet."""
        with self._lock:
            self._ended = True
            for opened in self._open:
                _end(opened)

    def _notice(self, event: str, details: Mapping[str, Any]) -> None:
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            opened = details["return_value"].get_extra_info("socket")
            with self._lock:
                self._open.add(opened)
                if self._ended:
                    _end(opened)


def _end(opened: socket.socket) -> None:
    with suppress(OSError):  # closed meanwhile
        # Not the method of a TLS socket, which takes TLS away from the thread that reads.
        socket.socket.shutdown(opened, socket.SHUT_RDWR)


@dataclass(slots=True)
class _Tokens:
    """The token of one OAuth client.

    Attributes:
        where: The token URL in errors.
        url: The token URL.
        client_id: The client.
        secret: Its secret.
        scope: The scope of the token; None for the client's own.
    """

    where: str
    url: str
    client_id: str
    secret: str = field(repr=False)
    scope: str | None
    _token: str | None = field(default=None, repr=False)
    _used_until: float = 0.0

    @classmethod
    def of(cls, where: str, encoding: AvroEncoding) -> _Tokens | None:
        """Return those of a registry's login; None if it needs none.

        Args:
            where: The registry in errors.
            encoding: Has the login.
        """
        url, client_id = encoding.oauth_token_url, encoding.oauth_client_id
        secret = encoding.oauth_client_secret
        if url is None or client_id is None or secret is None:
            return None
        return cls(
            f"{where}: its token URL {url}",
            url,
            client_id,
            secret.get_secret_value(),
            encoding.oauth_scope,
        )

    def current(self, client: httpx.Client) -> tuple[str, bool]:
        """Return a token that has not expired, and whether it is new; raises as `renewed` does."""
        if self._token is not None and time.monotonic() < self._used_until:
            return self._token, False
        return self.renewed(client), True

    def renewed(self, client: httpx.Client) -> str:
        """Return a new token.

        Raises:
            SinkUnavailable: The token URL cannot be reached, or has no token now.
            AuthFailed: It refuses the client.
            PermissionMissing: The client may not have a token.
            SinkRejected: It refuses the request, or is no token URL.
        """
        asked = time.monotonic()
        reply = self._reply(client)
        token = reply.get("access_token")
        if not isinstance(token, str) or not _TOKEN.fullmatch(token):
            raise self._refused("its answer has no token")
        self._token, self._used_until = token, asked + _USED_SHARE * _lifetime(reply)
        return token

    def _reply(self, client: httpx.Client) -> dict[str, Any]:
        form = {"grant_type": "client_credentials"}
        if self.scope is not None:
            form["scope"] = self.scope
        try:
            answer = client.post(
                self.url,
                data=form,
                auth=(quote_plus(self.client_id), quote_plus(self.secret)),
                headers={
                    "accept": "application/json",
                    "content-type": "application/x-www-form-urlencoded",
                },
            )
        except (httpx.HTTPError, RuntimeError) as error:  # RuntimeError: closed meanwhile
            raise _unreachable(self.where, error) from error
        reply = content_of(answer)
        reply = reply if isinstance(reply, dict) else {}
        if answer.status_code != httpx.codes.OK:
            raise self._refusal(answer, reply)
        return reply

    def _refusal(self, answer: httpx.Response, reply: dict[str, Any]) -> DeltaforgeError:
        """Return the error of an answer without a token (RFC 6749, section 5.2)."""
        said = [reply.get("error"), reply.get("error_description")]
        reason = ": ".join(text for text in said if isinstance(text, str) and text)
        shown = f" ({reason.replace(self.secret, MASK)[:_MOST_TEXT]})" if reason else ""
        why = f"HTTP {answer.status_code}{shown}"
        text = f"{self.where} gives no token: {why}"
        if answer.status_code == httpx.codes.UNAUTHORIZED or reply.get("error") in _WRONG_CLIENT:
            return AuthFailed(f"{text} (encoding.oauth_client_id, encoding.oauth_client_secret)")
        return temporary_or_forbidden(answer, text) or self._refused(why)

    def _refused(self, why: str) -> SinkRejected:
        return SinkRejected(
            f"{self.where} gives no token: {why}; check encoding.oauth_token_url and "
            "encoding.oauth_scope"
        )


def temporary_or_forbidden(answer: httpx.Response, text: str) -> DeltaforgeError | None:
    """Return the error of an answer that may be another one later, or that denies an action.

    Args:
        answer: The answer.
        text: What it says.
    """
    status = answer.status_code
    if status == httpx.codes.FORBIDDEN:
        return PermissionMissing(f"{text}; give the user the right to do it")
    if status in {408, 425, 429} or status >= httpx.codes.INTERNAL_SERVER_ERROR:
        return SinkUnavailable(text)
    return None


def content_of(answer: httpx.Response) -> Any:
    """Return the JSON of an answer; None if it has none."""
    with suppress(ValueError):
        return json.loads(answer.content)
    return None


def message_of(answer: httpx.Response) -> str:
    """Return what a registry says about an error, in parentheses; empty if it says nothing."""
    content = content_of(answer)
    message = content.get("message") if isinstance(content, dict) else None
    return f" ({message[:_MOST_TEXT]})" if isinstance(message, str) and message else ""


def _lifetime(reply: dict[str, Any]) -> float:
    """Return the seconds for which a token is valid, endless if the endpoint does not tell."""
    with suppress(TypeError, ValueError):
        return float(reply["expires_in"]) if "expires_in" in reply else math.inf
    return math.inf


def _unreachable(where: str, error: Exception) -> DeltaforgeError:
    """Return the error of a request that got no answer."""
    text = str(error) or type(error).__name__
    if alert := _CERTIFICATE_ALERT.search(text):
        return AuthFailed(
            f"{where} refuses the client's certificate, or wants one: "
            f"{alert[1].lower().replace('_', ' ')} (encoding.certificate_file, encoding.key_file)"
        )
    return SinkUnavailable(f"{where} cannot be reached: {text}")
