"""Makes one request and says what its response means.

A request has a time limit for everything, connecting included. The client follows no redirects,
uses no proxy, and stores no cookies.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import httpcore
import httpx

from deltaforge_dagster.errors import (
    AuthFailed,
    SettingsError,
    SinkRejected,
    SinkUnavailable,
)
from deltaforge_dagster.folders import unreadable_file
from deltaforge_dagster.sinks.connections import TimedOut
from deltaforge_dagster.sinks.http.client import Network
from deltaforge_dagster.sinks.http.requests import HttpRequest, Refusal, judge, origin_of

for _name in ("httpcore", "hpack"):
    logging.getLogger(_name).setLevel(logging.WARNING)  # their log lines contain headers

_IDLE_SECONDS = 4.0
"""How long an unused connection is kept: shorter than servers usually keep it.

So the server does not close it just when the next request is sent.
"""

_MOST_BODY = 64 << 10
"""How much of a response is read; the connection of a longer one is not used again."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """How servers are verified; see `config.HttpTls`."""

    ca_file: str | None = None
    certificate_file: str | None = None
    key_file: str | None = None
    insecure_skip_verify: bool = False

    def context(self, sink_id: str) -> ssl.SSLContext:
        """Return the settings of TLS connections.

        Raises:
            SettingsError: A file cannot be read.
        """
        unreadable = unreadable_file(
            {
                "tls.ca_file": self.ca_file,
                "tls.certificate_file": self.certificate_file,
                "tls.key_file": self.key_file,
            }
        )
        if unreadable is not None:
            raise SettingsError(f"sink {sink_id}: {unreadable}")
        used = "`tls.ca_file`"
        try:
            if self.ca_file is None:
                context = httpx.create_ssl_context(verify=not self.insecure_skip_verify)
            else:
                context = ssl.create_default_context(cafile=self.ca_file)
                if self.insecure_skip_verify:
                    context.check_hostname = False
                    context.verify_mode = ssl.CERT_NONE
            if self.certificate_file is not None:
                used = "`tls.certificate_file` or `tls.key_file`"
                context.load_cert_chain(self.certificate_file, self.key_file)
        except OSError as error:  # ssl.SSLError is one
            raise SettingsError(
                f"sink {sink_id}: {used} cannot be used: {error.strerror or error}"
            ) from error
        return context


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """How requests are made.

    Attributes:
        method: Their method.
        connect_timeout: Seconds for one attempt to connect.
        timeout: Seconds for a request, from its first byte to its response.
        connections: How many may be open.
        tls: How servers are verified.
        allow_private: Whether servers may have private addresses.
        signature_header: Name of the header with the signature.
        secret: The key of the signature; None to sign nothing.
    """

    method: str = "POST"
    connect_timeout: float = 5.0
    timeout: float = 10.0
    connections: int = 1
    tls: TlsFiles = field(default_factory=TlsFiles)
    allow_private: bool = True
    signature_header: str = "deltaforge-signature"
    secret: str | None = field(default=None, repr=False)


def signature(secret: str, seconds: int, body: bytes) -> str:
    """Return the signature of a body: `t=<seconds>,v1=<hex>`.

    The hex digits are HMAC-SHA256, with the secret as key, of `<seconds>.<body>`. `seconds` is the
    Unix time of the attempt.
    """
    digest = hmac.new(secret.encode(), b"%d.%b" % (seconds, body), hashlib.sha256)
    return f"t={seconds},v1={digest.hexdigest()}"


class HttpClient:
    """Makes requests; several threads may use it.

    Args:
        sink_id: Name of the sink in messages.
        settings: How requests are made.

    Raises:
        SettingsError: A file of `tls` cannot be read.
    """

    def __init__(self, sink_id: str, settings: ClientSettings) -> None:
        self._sink_id = sink_id
        self._settings = settings
        self._network = Network(sink_id, allow_private=settings.allow_private)
        self._context = settings.tls.context(sink_id)
        self._method = settings.method.encode()
        seconds = settings.timeout
        self._timeouts: Mapping[str, float] = {
            "connect": settings.connect_timeout,
            "read": seconds,
            "write": seconds,
            "pool": seconds,
        }
        self._pool = httpcore.ConnectionPool(
            ssl_context=self._context,
            max_connections=settings.connections,
            max_keepalive_connections=settings.connections,
            keepalive_expiry=_IDLE_SECONDS,
            network_backend=self._network,
        )

    def attempt(self, request: HttpRequest) -> Refusal | None:
        """Make a request; return None once its messages are acknowledged, or why they never can be.

        Raises:
            SinkUnavailable: The server cannot be reached, does not answer in time, or cannot accept
                the messages now.
            AuthFailed: It refused the credentials.
            SinkRejected: Its certificate is not trusted, it answers with a redirect, or its address
                is not allowed.
        """
        where = f"sink {self._sink_id}: {origin_of(request.url)}"
        headers = request.headers
        if self._settings.secret is not None:
            signed = signature(self._settings.secret, int(time.time()), request.body)
            name = self._settings.signature_header
            headers = [*headers, (name.encode(), signed.encode())]
        try:
            with self._network.limited(self._settings.timeout):
                status, response_headers, body = self._exchange(request, headers)
        except httpcore.TimeoutException as error:
            raise TimedOut(
                f"{where}: no answer within {self._settings.timeout:g} s (send_timeout_secs, in"
                " batch mode batch_timeout_secs), or no connection within"
                f" {self._settings.connect_timeout:g} s"
            ) from error
        except (httpcore.NetworkError, httpcore.ProtocolError) as error:
            raise SinkUnavailable(f"{where}: {error}") from error
        except (SinkRejected, AuthFailed) as error:
            raise self._with_endpoint(where, error) from error
        return judge(where, status, response_headers, body)

    def reach(self, url: str) -> bool:
        """Connect to the server of a URL; return whether it has proved its identity with TLS.

        Disconnects then.

        Raises:
            SinkUnavailable: It cannot be reached.
            SinkRejected: Its certificate is not trusted, or its address is not allowed.
            AuthFailed: It refused the client's certificate.
        """
        parsed = httpcore.URL(url)
        secure = parsed.scheme == b"https"
        host, port = parsed.host.decode(), parsed.port or (443 if secure else 80)
        where = f"sink {self._sink_id}: {origin_of(url)}"
        try:
            stream = self._network.connect_tcp(host, port, self._settings.connect_timeout)
            if secure:
                stream = stream.start_tls(
                    self._context, host.strip("[]"), self._settings.connect_timeout
                )
            stream.close()
        except (httpcore.NetworkError, httpcore.TimeoutException) as error:
            raise SinkUnavailable(f"{where}: {error}") from error
        except (SinkRejected, AuthFailed) as error:
            raise self._with_endpoint(where, error) from error
        return secure and not self._settings.tls.insecure_skip_verify

    def interrupt(self) -> None:
        """End every request that is under way, and each that begins before the next `begin`.

        A server may still act on a request that it has read.
        """
        self._network.interrupt()

    def begin(self) -> None:
        """Allow requests again."""
        self._network.begin()

    def close(self) -> None:
        """Close the connections."""
        self._pool.close()

    def _exchange(
        self, request: HttpRequest, headers: list[tuple[bytes, bytes]]
    ) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """Return the status, the headers and the beginning of the body of the response."""
        with self._pool.stream(
            self._method,
            request.url,
            headers=headers,
            content=request.body,
            extensions={"timeout": self._timeouts},
        ) as response:
            body = b""
            with contextlib.suppress(
                httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError
            ):  # the status has arrived, and decides
                for part in response.iter_stream():
                    body += part
                    if len(body) > _MOST_BODY:
                        break
            return response.status, response.headers, body

    def _with_endpoint(
        self, where: str, error: SinkRejected | AuthFailed
    ) -> SinkRejected | AuthFailed:
        if str(error).startswith("sink "):
            return error
        return type(error)(f"{where}: {error}")
