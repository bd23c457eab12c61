"""A TCP proxy that does to connections what networks do, after a random number of bytes."""

from __future__ import annotations

import contextlib
import math
import random
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Literal, Self, cast
from urllib.parse import urlsplit, urlunsplit

Fault = Literal["cut", "delay", "half-close"]
"""`cut`: reset towards the client, in the middle of anything. `delay`: nothing passes for a while.
`half-close`: one direction ends, either of them, and the other one goes on."""

_ABORT = struct.pack("ii", 1, 0)
_PIECE = 1 << 14


class FaultyProxy:
    """Listens on a port and carries every connection to a server, for a while.

    Args:
        target: Host and port of the server.
        mean_bytes: How many bytes, both ways, a connection carries on average until a fault.
        most_faults: After so many it is an ordinary proxy.
        seed: Of the random numbers.
        faults: Which there are, one of them each time.
        most_delay: The longest delay, in seconds.
        most_idle: A connection on which nothing passes for so many seconds is cut, which counts as a fault.
        port: To listen on; 0 for a free one.
        answers: Given what a client sends, returns what it gets in place of the server's answer; None to pass it on.

    Attributes:
        address: Host and port to connect to instead.
        faults: How many there were so far.
    """

    def __init__(
        self,
        target: tuple[str, int],
        mean_bytes: int,
        most_faults: int,
        seed: int,
        *,
        faults: Sequence[Fault] = ("cut",),
        most_delay: float = 0.3,
        most_idle: float = math.inf,
        port: int = 0,
        answers: Callable[[bytes], bytes | None] = lambda _: None,
    ) -> None:
        self.faults = 0
        self._kinds = faults
        self._answers = answers
        self._most_faults = most_faults
        self._most_delay = most_delay
        self._most_idle = most_idle
        self._target = target
        self._random = random.Random(seed)
        self._mean = mean_bytes
        self._listener = socket.create_server(("127.0.0.1", port))
        self.address: tuple[str, int] = self._listener.getsockname()
        self._threads: list[threading.Thread] = []
        self._ended = threading.Event()

    @classmethod
    def of(cls, url: str, mean_bytes: int, most_faults: int, seed: int) -> Self:
        """Return one that cuts, before the server of a URL."""
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        return cls((parts.hostname, parts.port), mean_bytes, most_faults, seed)

    @classmethod
    def answering(cls, url: str, answers: Callable[[bytes], bytes | None]) -> Self:
        """Return one without faults that answers in place of the server of a URL."""
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        return cls((parts.hostname, parts.port), 1, 0, 0, answers=answers)

    def through(self, url: str) -> str:
        """Return a URL of the server with the proxy's address in it."""
        parts = urlsplit(url)
        user, at, _ = parts.netloc.rpartition("@")
        host, port = self.address
        return urlunsplit(parts._replace(netloc=f"{user}{at}{host}:{port}"))

    def __enter__(self) -> Self:
        self._listener.settimeout(0.1)
        self._start(self._accept)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _start(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._ended.is_set():
            with contextlib.suppress(TimeoutError):
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(self._target)
                except ConnectionRefusedError:
                    client.close()
                else:
                    self._start(self._carry, client, server)

    def _carry(self, client: socket.socket, server: socket.socket) -> None:
        left = self._budget()
        with client, server, selectors.DefaultSelector() as ready, contextlib.suppress(OSError):
            ready.register(client, selectors.EVENT_READ, server)
            ready.register(server, selectors.EVENT_READ, client)
            passed = time.monotonic()
            while not self._ended.is_set() and ready.get_map():
                usable = ready.select(0.1)
                if usable:
                    passed = time.monotonic()
                elif time.monotonic() > passed + self._most_idle:
                    self.faults += 1
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
                    return
                for key, _ in usable:
                    here, there = cast(
                        "tuple[socket.socket, socket.socket]", (key.fileobj, key.data)
                    )
                    data = here.recv(_PIECE)
                    if here is client and (answer := self._answers(data)) is not None:
                        client.sendall(answer)
                        continue
                    if self.faults >= self._most_faults or (left := left - len(data)) > 0:
                        there.sendall(data)
                        fault = None
                    else:
                        self.faults += 1
                        left = self._budget()
                        fault = self._random.choice(self._kinds)
                    if fault == "cut":
                        there.sendall(data[: self._random.randrange(len(data) + 1)])
                        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
                        return
                    if fault == "delay":
                        self._ended.wait(self._random.random() * self._most_delay)
                        there.sendall(data)
                    if fault == "half-close" or not data:
                        ready.unregister(here)
                        there.shutdown(socket.SHUT_WR)

    def _budget(self) -> int:
        return int(self._random.expovariate(1 / self._mean)) + 1
