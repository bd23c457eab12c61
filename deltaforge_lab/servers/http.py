"""A small HTTP server that records what it receives, and answers as it is told.

It understands what clients of webhooks send: requests with a `content-length`, one after another on
a connection. Requests are recorded when they have arrived completely, before they are answered, in
the order in which that happened.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_POLL_SECONDS = 0.02
"""How often the server looks whether it is to stop."""


@dataclass(slots=True)
class Received:
    """A request that has arrived.

    Attributes:
        method: Its method.
        target: Path and query.
        headers: Its headers, names in lower case.
        body: Its body.
        connection: Number of the connection, from 0.
        status: Status of its answer; None while it has none, or if it never got one.
        dropped: Whether the connection ended before the answer.
    """

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes
    connection: int
    status: int | None = None
    dropped: bool = False


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """An answer to a request.

    Attributes:
        status: The status.
        headers: Headers beside `content-length`.
        body: The body.
        after: Seconds before it is sent.
        drop: Close the connection instead.
    """

    status: int = 204
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    after: float = 0.0
    drop: bool = False


OK = HttpAnswer()


class HttpServer:
    """A server on 127.0.0.1, in threads of its own: one for each connection.

    Attributes:
        received: Every request, in the order of their arrival.
        answer: Decides the answer to a request; called in the connection's thread, once at a time.
        url: Where it listens.
    """

    def __init__(self, *, context: ssl.SSLContext | None = None) -> None:
        self.received: list[Received] = []
        self.answer: Callable[[Received], HttpAnswer] = lambda _: OK
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._connections = 0
        self._open: dict[int, socket.socket] = {}
        self._listener = _Listener(self, context)
        self.url = f"http{'s' if context else ''}://127.0.0.1:{self._listener.server_port}"

    @classmethod
    @contextlib.contextmanager
    def start(cls, *, context: ssl.SSLContext | None = None) -> Iterator[HttpServer]:
        """Run a server during the block.

        Args:
            context: TLS settings; None for plain HTTP.
        """
        server = cls(context=context)
        thread = threading.Thread(
            target=server._listener.serve_forever, args=[_POLL_SECONDS], name="http"
        )
        thread.start()
        try:
            yield server
        finally:
            server._listener.shutdown()
            thread.join()
            server._stopping.set()
            server.drop_connections()
            server._listener.server_close()  # waits for the threads of the connections

    def bodies(self, target: str | None = None) -> list[bytes]:
        """Return the bodies of a target's requests that were answered with success, in order."""
        return [
            request.body
            for request in self.received
            if request.status is not None
            and request.status < 300
            and target in {None, request.target}
        ]

    def drop_connections(self) -> None:
        """End every connection, as a server does with those that are unused."""
        with self._lock:
            for connection in self._open.values():
                with contextlib.suppress(OSError):  # the client has gone
                    # not the method of a TLS socket, which takes TLS away from the thread that
                    # reads
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def opened(self, connection: socket.socket) -> int:
        """Return the number of a new connection."""
        with self._lock:
            number = self._connections
            self._connections += 1
            self._open[number] = connection
        return number

    def ended(self, number: int) -> None:
        """Forget a connection."""
        with self._lock:
            del self._open[number]

    def receive(self, request: Received) -> HttpAnswer:
        """Record a request; return what it is answered."""
        with self._lock:
            self.received.append(request)
            return self.answer(request)

    def wait(self, seconds: float) -> None:
        """Wait, but not longer than the server runs."""
        self._stopping.wait(seconds)


class _Listener(ThreadingHTTPServer):
    """Accepts connections; their handshakes are left to their threads."""

    daemon_threads = False  # so that `server_close` waits for them

    def __init__(self, recorder: HttpServer, context: ssl.SSLContext | None) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.recorder = recorder
        self._context = context

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection."""
        connection, address = super().get_request()
        if self._context is not None:
            connection = self._context.wrap_socket(
                connection, server_side=True, do_handshake_on_connect=False
            )
        return connection, address


class _Connection(BaseHTTPRequestHandler):
    """One connection: reads a request, answers it, reads the next."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer is one write
    server: _Listener

    def handle(self) -> None:
        """Answer the requests of the connection until it ends."""
        self._number = self.server.recorder.opened(self.request)
        try:
            with contextlib.suppress(OSError):  # the client has gone, or there was no handshake
                super().handle()
        finally:
            self.server.recorder.ended(self._number)

    def handle_one_request(self) -> None:
        """Answer a request."""
        first = self.rfile.peek(1)[:1]  # type: ignore[attr-defined]  # it is a BufferedReader
        if first.isalpha():
            super().handle_one_request()
            return
        self.close_connection = True
        if first:  # TLS, for instance
            self.wfile.write(b"HTTP/1.1 400 -\r\ncontent-length: 0\r\n\r\n")

    def do_POST(self) -> None:
        """Record a request, and answer it."""
        length = int(self.headers.get("content-length", "0"))
        body = self.rfile.read(length)
        if len(body) < length:
            self.close_connection = True
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Received(self.command, self.path, headers, body, self._number)
        answer = self.server.recorder.receive(request)
        self.server.recorder.wait(answer.after)
        if answer.drop or (answer.after and self._client_has_gone()):
            request.dropped = True
            self.close_connection = True
            return
        request.status = answer.status
        self.send_response_only(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if answer.status != 204:
            self.send_header("content-length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Log nothing: the requests are in `HttpServer.received`."""

    def _client_has_gone(self) -> bool:
        """Return whether the connection ended during a wait.

        Clients send nothing before their answer.
        """
        return bool(select.select([self.request], [], [], 0)[0])
