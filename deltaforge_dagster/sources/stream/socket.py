"""The socket of a log stream: one thread receives into large buffers, any thread sends and closes.

The receiver takes all bytes that have arrived. Reading the moment a byte arrives would cost a
system call and a call of the decoder for every row, and would keep the server busy waking us up. So
the receiver sleeps before it reads on: a millisecond first, and longer as long as each sleep brings
much. A small transaction is delayed by one such millisecond only.
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
_PAUSE_BYTES = 4 << 10
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class StreamSocket:
    """A connection after its handshake, plain or TLS.

    Until `begin` is called, the socket blocks, with the timeout that it was given; afterwards it
    does not.

    Args:
        connected: The socket; this object owns it.
        where: The server's address, for error messages.
    """

    def __init__(self, connected: socket.socket, where: str) -> None:
        self._socket = connected
        self._where = where
        self._received_at = time.monotonic()
        # Guards the socket: OpenSSL does not allow two simultaneous calls on one connection, and
        # the number of a closed descriptor may already belong to another file.
        self._lock = threading.Lock()
        self._ended = threading.Event()

    @property
    def silence(self) -> float:
        """Seconds since bytes last arrived."""
        return time.monotonic() - self._received_at

    def ask(self, message: bytes) -> None:
        """Send a command; only before `begin`."""
        try:
            self._socket.sendall(message)
        except OSError as error:
            raise self._lost(error) from error

    def exactly(self, count: int) -> bytes:
        """Return the next `count` bytes of an answer; only before `begin`."""
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
        """Make the socket non-blocking: from now on it receives the stream."""
        self._socket.setblocking(False)
        self._received_at = time.monotonic()

    def receive(self, buffer: memoryview, seconds: float) -> int:
        """Fill `buffer` with what has arrived; wait at most `seconds` for the first byte.

        Returns:
            The number of bytes; 0 if none arrived.

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
        self._received_at = time.monotonic()
        pause, best = _PAUSE, 0.0
        while filled < len(buffer) and time.monotonic() < deadline:
            time.sleep(pause)
            more = self._drain(buffer[filled:], held=filled)
            filled += more
            if more < _PAUSE_BYTES:
                break
            # Sleep longer only while the rate does not fall: if it falls, the socket's buffer was
            # full.
            rate = more / pause
            pause = min(2 * pause, _LONGEST_PAUSE) if rate > 0.75 * best else pause / 2
            best = max(best, rate)
        return filled

    def send(self, message: bytes) -> None:
        """Send the whole message, or nothing if the connection accepts nothing now or is broken.

        A partly sent message must be completed; if that takes over a second, the connection is shut
        down.
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
        """End the connection; a waiting `receive` ends. Safe to call twice."""
        self._ended.set()
        with self._lock:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()

    def _drain(self, buffer: memoryview, held: int = 0) -> int:
        """Receive what has arrived, without waiting; `held` bytes of this buffer came before.

        If the connection has ended, its error is raised only once all bytes before it were
        returned.
        """
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
                    if filled or held:  # return the bytes before the end first
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
