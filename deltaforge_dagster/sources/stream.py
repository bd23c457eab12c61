"""The connection of a log stream: its socket, the decoder's buffer, and limits of its time.

`StreamSocket`: one thread receives into large buffers, any thread sends and closes. The receiver
takes all bytes that have arrived. Reading the moment a byte arrives would cost a system call and a
call of the decoder for every row, and would keep the server busy waking us up. So the receiver
sleeps before it reads on: a millisecond first, and longer as long as each sleep brings much. A
small transaction is delayed by one such millisecond only.

`ReadBuffer` is between the socket and a decoder, which consumes complete events; the rest stays for
its next call. The buffer normally has a fixed size. It grows for a larger row, and shrinks again
afterwards. It is filled a little at first, then more with each call, so that the first changes of a
backlog are decoded, and on their way, before megabytes have been received.

`SocketTimeLimit` limits any whole conversation with a server: drivers limit single steps (a
connect, a read), but many steps together may still take forever.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from deltaforge_dagster.errors import SourceUnavailable

_PAUSE = 0.001
_LONGEST_PAUSE = 0.016
_PAUSE_BYTES = 4 << 10
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
BUFFER_BYTES = 4 << 20
"""The most bytes that one call of a decoder usually gets, so that other threads run in between."""
_LEAST_BUFFER_BYTES = 64 << 10


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
            more = self._drain(buffer[filled:], kept=filled)
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

    def _drain(self, buffer: memoryview, kept: int = 0) -> int:
        """Receive what has arrived, without waiting; `kept` bytes of this buffer came before.

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
                    if filled or kept:
                        break
                    raise self._lost(error) from error
                if not count:
                    if filled or kept:  # return the bytes before the end first
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


class ReadBuffer:
    """Bytes of a log: those that the decoder has not consumed yet, followed by newly received ones.

    Args:
        max_bytes: Desired size of the buffer; at least 64 KiB and at most `BUFFER_BYTES` are used.

    Attributes:
        data: The memory; only the first `length` bytes are valid.
        length: Number of valid bytes.
    """

    def __init__(self, max_bytes: int) -> None:
        self._usual_bytes = min(BUFFER_BYTES, max(max_bytes, _LEAST_BUFFER_BYTES))
        self.data = bytearray(self._usual_bytes)
        self.length = 0
        self._receive_bytes = _LEAST_BUFFER_BYTES

    def fill(self, receive: Callable[[memoryview, float], int], seconds: float) -> bool:
        """Append received bytes, waiting up to `seconds` for the first; return whether any came."""
        if self.length == len(self.data):  # one row larger than the buffer
            self.data = self.data.ljust(2 * self.length, b"\0")
        with memoryview(self.data) as view:
            count = receive(view[self.length : self.length + self._receive_bytes], seconds)
        if count == self._receive_bytes:
            self._receive_bytes *= 2
        self.length += count
        return bool(count)

    def drop(self, consumed: int) -> None:
        """Remove the first `consumed` bytes; the rest moves to the start."""
        kept = self.length - consumed
        if kept < self._usual_bytes < len(self.data):
            self.data = self.data[consumed : self.length].ljust(self._usual_bytes, b"\0")
        elif consumed:
            self.data[:kept] = self.data[consumed : self.length]
        self.length = kept


def notice_loss(descriptor: int) -> None:
    """Enable TCP keepalive, so that a lost server is noticed within two minutes.

    This works even on an idle connection.
    """
    with socket.socket(fileno=os.dup(descriptor)) as same, suppress(OSError):
        same.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6)


class SocketTimeLimit:
    """Shuts a connection's socket down after some seconds, from a separate thread.

    A context manager: the time starts when it is entered, and leaving it cancels the limit.

    Args:
        descriptor: The socket's file descriptor.
        seconds: The limit.
    """

    def __init__(self, descriptor: int, seconds: float) -> None:
        # A duplicate: once the driver has closed its descriptor, the number may be reused.
        self._socket = socket.socket(fileno=os.dup(descriptor))
        self._fired = threading.Event()
        self._timer = threading.Timer(max(seconds, 0), self._shutdown)
        self._timer.daemon = True

    @property
    def fired(self) -> bool:
        """Whether the time has expired; errors of the connection after that are its consequence."""
        return self._fired.is_set()

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        self._timer.join()
        self._socket.close()

    def _shutdown(self) -> None:
        self._fired.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
