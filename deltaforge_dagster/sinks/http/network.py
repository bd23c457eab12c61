"""Connections to HTTP servers: to checked addresses only, with a deadline, ended by any thread.

Implements httpcore's `NetworkBackend`. An address is checked after the name was resolved, and
exactly that address is connected to, so a name that resolves differently the next time opens no way
around the check.

A connection that is given up, because a call failed or the sink was closed, is reset and not closed
in an orderly way: what the server has not yet been sent then never arrives.
"""

from __future__ import annotations

import contextlib
import ipaddress
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import httpcore

from deltaforge_dagster.errors import AuthFailed, SinkRejected

_RESET = struct.pack("ii", 1, 0)
"""The value of `SO_LINGER` with which closing a socket resets the connection (socket(7))."""


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
