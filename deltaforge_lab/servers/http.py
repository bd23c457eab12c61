"""A small HTTP server that records what it receives, and answers as it is told.

It understands what clients of webhooks send: requests with a `content-length`, one after another on a connection. Requests are
recorded when they have arrived completely, before they are answered, in the order in which that happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ssl
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class Received:
    """A request that has arrived.

    Attributes:
        method: Its method.
        target: Path and query.
        headers: Its headers, names in lower case.
        body: Its body.
        connection: Number of the connection, from 0.
        status: What it was answered; None while it is not answered, or if it never was.
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
    """A server on 127.0.0.1, in a thread of its own.

    Attributes:
        received: Every request, in the order of their arrival.
        answer: Decides the answer to a request; called in the server's thread.
        url: Where it listens.
    """

    def __init__(self, *, context: ssl.SSLContext | None = None) -> None:
        self.received: list[Received] = []
        self.answer: Callable[[Received], HttpAnswer] = lambda _: OK
        self.url = ""
        self._context = context
        self._connections = 0
        self._open: set[asyncio.Transport] = set()
        self._none_open = asyncio.Event()
        self._loop = asyncio.new_event_loop()

    @classmethod
    @contextlib.contextmanager
    def start(cls, *, context: ssl.SSLContext | None = None) -> Iterator[HttpServer]:
        """Run a server during the block.

        Args:
            context: TLS settings; None for plain HTTP.
        """
        server = cls(context=context)
        started = threading.Event()
        thread = threading.Thread(target=server._run, args=[started], name="http", daemon=True)
        thread.start()
        started.wait()
        try:
            yield server
        finally:
            server._loop.call_soon_threadsafe(server._loop.stop)
            thread.join()

    def bodies(self, target: str | None = None) -> list[bytes]:
        """Return the bodies of the requests to a target that were answered with success, in order."""
        return [
            one.body
            for one in self.received
            if one.status is not None and one.status < 300 and target in {None, one.target}
        ]

    def drop_connections(self) -> None:
        """Close every connection, as a server does with those that are unused."""
        done = threading.Event()

        def drop() -> None:
            for one in list(self._open):
                one.close()
            self._loop.call_soon(done.set)

        self._loop.call_soon_threadsafe(drop)
        done.wait()

    def opened(self, transport: asyncio.Transport) -> int:
        """Return the number of a new connection."""
        self._open.add(transport)
        self._connections += 1
        return self._connections - 1

    def ended(self, transport: asyncio.Transport) -> None:
        """Forget a connection."""
        self._open.discard(transport)
        if not self._open:
            self._none_open.set()

    def _run(self, started: threading.Event) -> None:
        listening = self._loop.create_server(
            lambda: _Connection(self), "127.0.0.1", 0, ssl=self._context
        )
        server = self._loop.run_until_complete(listening)
        port = server.sockets[0].getsockname()[1]
        self.url = f"http{'s' if self._context else ''}://127.0.0.1:{port}"
        started.set()
        try:
            self._loop.run_forever()
        finally:
            server.close()
            self._loop.run_until_complete(self._end(server))
            self._loop.close()
            if (
                self._context is not None
            ):  # asyncio leaves transports whose handshake failed to the collector
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", ResourceWarning)
                    gc.collect()

    async def _end(self, server: asyncio.Server) -> None:
        """End every connection, and wait until its socket is closed."""
        beginning = asyncio.all_tasks() - {asyncio.current_task()}
        if beginning:  # connections that were accepted a moment ago
            await asyncio.wait(beginning, timeout=1)
        self._none_open.clear()
        for one in list(self._open):
            one.abort()
        if self._open:
            await self._none_open.wait()
        await server.wait_closed()
        await asyncio.sleep(0.01)  # connections whose handshake failed close their sockets


class _Connection(asyncio.Protocol):
    """One connection: reads a request, answers it, reads the next."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._number = -1
        self._lost = False
        self._data = bytearray()
        self._head: tuple[str, str, dict[str, str]] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._number = self._server.opened(transport)

    def connection_lost(self, _: Exception | None) -> None:
        assert self._transport is not None
        self._lost = True
        self._server.ended(self._transport)

    def data_received(self, data: bytes) -> None:
        self._data += data
        while self._take():
            pass
        assert self._transport is not None
        if self._head is None and self._data and not self._data[:1].isalpha():  # TLS, for instance
            self._transport.write(b"HTTP/1.1 400 -\r\ncontent-length: 0\r\n\r\n")
            self._transport.close()

    def _take(self) -> bool:
        """Take one request off what has arrived; return whether there was one."""
        if self._head is None:
            end = self._data.find(b"\r\n\r\n")
            if end < 0:
                return False
            first, *lines = self._data[:end].decode("utf-8").split("\r\n")
            method, target, _ = first.split(" ")
            pairs = (line.partition(":") for line in lines)
            self._head = method, target, {name.lower(): value.strip() for name, _, value in pairs}
            del self._data[: end + 4]
        method, target, headers = self._head
        length = int(headers.get("content-length", "0"))
        if len(self._data) < length:
            return False
        body = bytes(self._data[:length])
        del self._data[:length]
        self._head = None
        request = Received(method, target, headers, body, self._number)
        self._server.received.append(request)
        answer = self._server.answer(request)
        if answer.after:
            asyncio.get_running_loop().call_later(answer.after, self._reply, request, answer)
        else:
            self._reply(request, answer)
        return True

    def _reply(self, request: Received, answer: HttpAnswer) -> None:
        assert self._transport is not None
        if answer.drop or self._transport.is_closing():  # or the client did not wait
            request.dropped = True
            if not self._lost:
                self._transport.abort()
            return
        request.status = answer.status
        lines = [f"{name}: {value}\r\n" for name, value in answer.headers.items()]
        if answer.status != 204:
            lines.append(f"content-length: {len(answer.body)}\r\n")
        head = f"HTTP/1.1 {answer.status} -\r\n{''.join(lines)}\r\n"
        self._transport.write(head.encode() + answer.body)
