"""The socket of a log stream: one thread receives into large buffers, any thread sends and closes.

The receiver takes as many bytes as there are. Reading the moment a byte arrives would mean a
system call, and a call of the decoder, for every row, and would keep the server busy waking us; so
it sleeps, for a millisecond first and longer while each sleep brings much. A small transaction
waits for one such millisecond only.
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from contextlib import suppress

from deltaforge_dagster.errors import SourceUnavailable

_PAUSE = 0.001
_LONGEST_PAUSE = 0.016
_WORTH_A_PAUSE = 4 << 10
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class StreamSocket:
    """A connection after its handshake, plain or TLS.

    Until `begin` it blocks, with the timeout that it came with; from then on nothing does.

    Args:
        connected: The socket; this object owns it.
        where: The server, for messages.
    """

    def __init__(self, connected: socket.socket, where: str) -> None:
        self._socket = connected
        self._where = where
        self._heard = time.monotonic()
        # Guards the socket: OpenSSL allows no two calls on one connection at a time, and a closed
        # descriptor's number may already be somebody else's.
        self._lock = threading.Lock()
        self._ended = threading.Event()

    @property
    def silence(self) -> float:
        """Seconds since something came."""
        return time.monotonic() - self._heard

    def ask(self, message: bytes) -> None:
        """Send a command, before `begin`."""
        try:
            self._socket.sendall(message)
        except OSError as error:
            raise self._lost(error) from error

    def exactly(self, count: int) -> bytes:
        """Return the next bytes of an answer, before `begin`."""
        received = bytearray()
        while len(received) < count:
            try:
                piece = self._socket.recv(count - len(received))
            except OSError as error:
                raise self._lost(error) from error
            if not piece:
                raise SourceUnavailable(f"{self._where}: the server closed the connection")
            received += piece
        return bytes(received)

    def begin(self) -> None:
        """Block no longer: what comes now is the stream."""
        self._socket.setblocking(False)
        self._heard = time.monotonic()

    def receive(self, buffer: memoryview, seconds: float) -> int:
        """Fill `buffer` with what has arrived; wait for the first byte at most `seconds`.

        Returns:
            The number of bytes, 0 when nothing came.

        Raises:
            SourceUnavailable: The server closed the connection, or `close` was called.
        """
        deadline = time.monotonic() + seconds
        filled = self._drain(buffer)
        if not filled:
            self._wait(deadline - time.monotonic())
            filled = self._drain(buffer)
        if not filled:
            return 0
        self._heard = time.monotonic()
        pause, best = _PAUSE, 0.0
        while filled < len(buffer) and time.monotonic() < deadline:
            time.sleep(pause)
            more = self._drain(buffer[filled:], held=filled)
            filled += more
            if more < _WORTH_A_PAUSE:
                break
            # As long as the socket has room for what the server sends meanwhile.
            rate = more / pause
            pause = min(2 * pause, _LONGEST_PAUSE) if rate > 0.75 * best else pause / 2
            best = max(best, rate)
        return filled

    def send(self, message: bytes) -> None:
        """Send it whole, or not at all when the connection takes nothing now, or is broken.

        A message half sent must be finished: without room for a second the connection is given up.
        """
        rest = memoryview(message)
        deadline = time.monotonic() + 1
        with self._lock, suppress(OSError):
            while rest and not self._ended.is_set():
                try:
                    rest = rest[self._socket.send(rest) :]
                except _WOULD_BLOCK:
                    if len(rest) == len(message):
                        return
                    if time.monotonic() > deadline:
                        self._socket.shutdown(socket.SHUT_RDWR)
                        return
                    time.sleep(_PAUSE)

    def close(self) -> None:
        """End the connection; a `receive` that waits returns. Safe to call twice."""
        self._ended.set()
        with self._lock:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()

    def _drain(self, buffer: memoryview, held: int = 0) -> int:
        """Receive what is there; `held` bytes of this buffer came before."""
        filled = 0
        with self._lock:
            while filled < len(buffer):
                if self._ended.is_set():
                    raise SourceUnavailable(f"{self._where}: the stream was closed")
                try:
                    count = self._socket.recv_into(buffer[filled:])
                except _WOULD_BLOCK:
                    break
                except OSError as error:
                    if filled or held:
                        break
                    raise self._lost(error) from error
                if not count:
                    if filled or held:  # what came before the end comes first
                        break
                    raise SourceUnavailable(f"{self._where}: the server closed the stream")
                filled += count
        return filled

    def _wait(self, seconds: float) -> None:
        with self._lock:
            if self._ended.is_set():
                return
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
        poll.poll(max(seconds, 0) * 1000)

    def _lost(self, error: OSError) -> SourceUnavailable:
        return SourceUnavailable(
            f"{self._where}: connection lost ({error.strerror or type(error).__name__})"
        )
