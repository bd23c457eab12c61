"""Makes one request, to checked addresses only, with a deadline; any thread can end it.

A request has a time limit for everything, connecting included. The client follows no redirects,
uses no proxy, and stores no cookies.

`Network` is httpcore's `NetworkBackend`. An address is checked after the name was resolved, and
exactly that address is connected to, so a name that resolves differently the next time opens no way
around the check. A connection that is given up, because a call failed or the sink was closed, is
reset and not closed in an orderly way: what the server has not yet been sent then never arrives.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import logging
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

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
from deltaforge_dagster.sinks.http.requests import HttpRequest, Refusal, judge, origin_of

_RESET = struct.pack("ii", 1, 0)
"""The value of `SO_LINGER` with which closing a socket resets the connection (socket(7))."""

for _name in ("httpcore", "hpack"):
    logging.getLogger(_name).setLevel(logging.WARNING)  # their log lines contain headers

_IDLE_SECONDS = 4.0
"""How long an unused connection is kept: shorter than servers usually keep it.

So the server does not close it just when the next request is sent.
"""

_MOST_BODY = 64 << 10
"""How much of a response is read; the connection of a longer one is not used again."""


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


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """How servers are verified; see `sink_type.HttpTls`."""

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


def is_public(address: str) -> bool:
    """Return whether an IP address is one of the public internet; a zone (`%eth0`) is ignored."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        parsed = parsed.ipv4_mapped
    return parsed.is_global and not parsed.is_multicast


class Network(httpcore.NetworkBackend):
    """Connects, and remembers open connections to end them.

    Args:
        sink_id: Name of the sink in messages.
        allow_private: Whether addresses may be private, loopback or link-local.
    """

    def __init__(self, sink_id: str, *, allow_private: bool) -> None:
        self._sink_id = sink_id
        self._allow_private = allow_private
        self._thread_local = threading.local()
        self._lock = threading.Lock()
        self._streams: set[_HttpStream] = set()
        self._interrupted = False

    @contextlib.contextmanager
    def limited(self, seconds: float) -> Iterator[None]:
        """Give everything that this thread does in the block this much time in all."""
        self._thread_local.deadline = time.monotonic() + seconds
        try:
            yield
        finally:
            del self._thread_local.deadline

    def left(self, timeout: float | None) -> float | None:
        """Return the timeout of this thread's next call.

        Raises:
            TimeoutError: The deadline has passed.
        """
        deadline: float | None = getattr(self._thread_local, "deadline", None)
        if deadline is None:
            return timeout
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError
        return seconds if timeout is None else min(timeout, seconds)

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,  # noqa: ARG002 - httpcore's signature
        socket_options: Iterable[Any] | None = None,  # noqa: ARG002
    ) -> httpcore.NetworkStream:
        """Connect to the first address of a host that answers.

        Raises:
            SinkRejected: None of its addresses is allowed.
            httpcore.ConnectTimeout: The time is over.
            httpcore.ConnectError: None answers, or there is no such host.
        """
        failure: OSError | None = None
        for family, kind, protocol, _, address in self._allowed(host, port):
            sock = socket.socket(family, kind, protocol)
            try:
                sock.settimeout(self.left(timeout))
                connect(sock, address)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError as error:
                sock.close()
                failure = error
                continue
            return self.opened(sock)
        if isinstance(failure, TimeoutError):
            raise httpcore.ConnectTimeout("the server did not answer in time") from failure
        raise httpcore.ConnectError(failure.strerror if failure is not None else "") from failure

    def opened(self, sock: socket.socket) -> _HttpStream:
        """Return the stream of a connected socket, which `interrupt` ends."""
        stream = _HttpStream(self, sock)
        with self._lock:
            self._streams.add(stream)
            if self._interrupted:  # while it connected
                stream.interrupt()
        return stream

    def closed(self, stream: _HttpStream) -> None:
        """Forget a stream."""
        with self._lock:
            self._streams.discard(stream)

    def interrupt(self) -> None:
        """Reset every connection, and new ones until `begin`; waiting threads get an error."""
        with self._lock:
            self._interrupted = True
            for stream in self._streams:
                stream.interrupt()

    def begin(self) -> None:
        """Allow connections again."""
        with self._lock:
            self._interrupted = False

    def _allowed(self, host: str, port: int) -> list[Any]:
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise httpcore.ConnectError(f"its address is not known: {error.strerror}") from error
        if self._allow_private:
            return infos
        allowed = [info for info in infos if is_public(str(info[4][0]))]
        if not allowed:
            raise SinkRejected(
                f"sink {self._sink_id}: {host} has a private, loopback or link-local address; set "
                "allow_private: true if the sink may call it (a pipeline created by the REST API "
                "may not by default)"
            )
        return allowed


def connect(sock: socket.socket, address: Any) -> None:
    """Connect a socket to an address that was checked."""
    sock.connect(address)


class _HttpStream(httpcore.NetworkStream):
    """One connection."""

    def __init__(self, network: Network, sock: socket.socket) -> None:
        self._network = network
        self._socket = sock
        self._broken = False

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Return the next bytes, none at the end."""
        with self._call(httpcore.ReadTimeout, httpcore.ReadError):
            self._socket.settimeout(self._network.left(timeout))
            return self._socket.recv(max_bytes)

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Send bytes."""
        if not buffer:
            return
        with self._call(httpcore.WriteTimeout, httpcore.WriteError):
            self._socket.settimeout(self._network.left(timeout))
            self._socket.sendall(buffer)

    def close(self) -> None:
        """Close the connection; reset it if a call has failed."""
        self._network.closed(self)
        if self._broken:
            self._will_reset()
        self._socket.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        """Return the connection with TLS.

        Raises:
            SinkRejected: The certificate is not trusted, or the server speaks no TLS.
            AuthFailed: The server refused the client's certificate, or wants one.
        """
        try:
            with self._call(httpcore.ConnectTimeout, httpcore.ConnectError):
                self._socket.settimeout(self._network.left(timeout))
                secured = ssl_context.wrap_socket(self._socket, server_hostname=server_hostname)
        except BaseException:
            self.close()
            raise
        self._network.closed(self)
        return self._network.opened(secured)

    def get_extra_info(self, info: str) -> Any:
        """Return what httpcore asks.

        `is_readable` is whether an idle connection has something to read, which is its end.
        """
        if info == "is_readable":
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            return bool(poll.poll(0))
        if info == "ssl_object":
            return self._socket if isinstance(self._socket, ssl.SSLSocket) else None
        return None

    def interrupt(self) -> None:
        """Reset the connection under the thread that uses it."""
        self._broken = True
        self._will_reset()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _will_reset(self) -> None:
        with contextlib.suppress(OSError):  # it is closed
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)

    @contextlib.contextmanager
    def _call(self, timeout: type[Exception], failure: type[Exception]) -> Iterator[None]:
        """Translate the errors of a call."""
        try:
            yield
        except TimeoutError as error:
            self._broken = True
            raise timeout("the server did not answer in time") from error
        except ssl.SSLCertVerificationError as error:
            self._broken = True
            raise SinkRejected(
                f"its certificate is not trusted: {error.verify_message}; see the sink's `tls`"
            ) from error
        except ssl.SSLError as error:
            self._broken = True
            reason = (error.reason or "").lower().replace("_", " ")
            if "alert" in reason and "certificate" in reason:
                raise AuthFailed(f"it refused the client's certificate: {reason}") from error
            if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
                raise failure("the connection was closed") from error
            raise SinkRejected(f"no TLS connection is possible: {reason}") from error
        except OSError as error:
            self._broken = True
            raise failure(error.strerror or "the connection was closed") from error
