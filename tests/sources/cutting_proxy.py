"""A TCP proxy that cuts connections after a random number of bytes, in the middle of anything."""

from __future__ import annotations

import contextlib
import random
import selectors
import socket
import struct
import threading
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit, urlunsplit

_ABORT = struct.pack("ii", 1, 0)


class CuttingProxy:
    """Listens on a free port and carries every connection to a server, for a while.

    Args:
        dsn: URL of the server.
        mean_bytes: How many bytes from the server a connection carries on average.
        most_cuts: After so many cuts it is an ordinary proxy.
        seed: Of the random numbers.

    Attributes:
        cuts: Connections cut so far.
    """

    def __init__(self, dsn: str, mean_bytes: int, most_cuts: int, seed: int) -> None:
        parts = urlsplit(dsn)
        assert parts.hostname is not None
        assert parts.port is not None
        self.cuts = 0
        self._most_cuts = most_cuts
        self._target = parts.hostname, parts.port
        self._random = random.Random(seed)
        self._mean = mean_bytes
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        login = parts.netloc.rpartition("@")[0]
        self.dsn = urlunsplit(parts._replace(netloc=f"{login}@127.0.0.1:{port}"))
        self._threads: list[threading.Thread] = []
        self._ended = threading.Event()

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
                server = socket.create_connection(self._target)
                self._start(self._carry, client, server)

    def _carry(self, client: socket.socket, server: socket.socket) -> None:
        left = int(self._random.expovariate(1 / self._mean)) + 1
        with client, server, selectors.DefaultSelector() as ready:
            ready.register(client, selectors.EVENT_READ, server)
            ready.register(server, selectors.EVENT_READ, client)
            while not self._ended.is_set():
                for key, _ in ready.select(0.1):
                    here = key.fileobj
                    assert isinstance(here, socket.socket)
                    try:
                        data = here.recv(1 << 14)
                        if here is server and self.cuts < self._most_cuts:
                            left -= len(data)
                            data = data[: len(data) + min(left, 0)]
                        key.data.sendall(data)
                    except OSError:
                        return
                    if left <= 0:
                        self.cuts += 1
                        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
                        return
                    if not data:
                        return
