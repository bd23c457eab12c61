"""The stream of one replication slot: bytes in, status messages out.

After `START_REPLICATION` both sides send CopyData messages (manual: "Streaming Replication
Protocol"). Ours are Standby status updates, 39 bytes with header::

    'd' length  'r'  Int64 received  Int64 flushed  Int64 applied  Int64 clock  Byte1 reply-wanted

They go out every second from a thread of their own, so that the server does not take us for dead
while the reader's consumer is busy, and carry two promises: `received` is what has been decoded,
`flushed` is what the server may forget. `flushed` is only what `confirm` was given, and never
more than was received here.

The reader takes as many bytes as there are. Reading the moment a byte arrives would mean a
system call, and a call of the decoder, for every row, and would keep the server busy waking us; so
it sleeps, for a millisecond first and longer while each sleep brings much. A small transaction
waits for one such millisecond only.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
import threading
import time
from contextlib import suppress

from deltaforge_dagster.errors import SourceUnavailable
from deltaforge_dagster.sources.postgres.handshake import RefusedError, error_fields

STATUS_SECONDS = 1.0
SILENCE_SECONDS = 60.0
"""A server that says nothing for so long, though asked half-way, is taken for dead."""

_STATUS = struct.Struct("!cicqqqqb")
_EPOCH_2000 = 946_684_800
_PAUSE = 0.001
_LONGEST_PAUSE = 0.016
_WORTH_A_PAUSE = 4 << 10
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class ReplicationStream:
    """An open `START_REPLICATION`; one thread receives, any thread may confirm and close.

    Args:
        connected: The socket of a replication connection, after its handshake.
        where: The server, for messages.
        status_seconds: Time between two status messages.
    """

    def __init__(
        self, connected: socket.socket, where: str, status_seconds: float = STATUS_SECONDS
    ) -> None:
        self._socket = connected
        self._where = where
        self._interval = status_seconds
        self._received = 0
        self._confirmed = 0
        self._heard = time.monotonic()
        self._asked = False
        # Guards the socket: OpenSSL allows no two calls on one connection at a time, and a closed
        # descriptor's number may already be somebody else's.
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, command: str) -> None:
        """Send the command and begin to stream.

        Raises:
            RefusedError: The server's answer is an error.
            SourceUnavailable: The connection broke.
        """
        body = command.encode() + b"\0"
        try:
            self._socket.sendall(b"Q" + struct.pack("!i", len(body) + 4) + body)
            while True:
                letter, length = struct.unpack("!ci", self._exactly(5))
                answer = self._exactly(length - 4)
                if letter == b"E":
                    fields = error_fields(answer)
                    raise RefusedError(fields.get("C", ""), fields.get("M", ""))
                if letter == b"W":  # CopyBothResponse: the next byte is log
                    break
        except OSError as error:
            raise self._lost(error) from error
        self._socket.setblocking(False)
        self._thread = threading.Thread(target=self._report, name="standby status", daemon=True)
        self._thread.start()

    def receive(self, buffer: memoryview, seconds: float) -> int:
        """Fill `buffer` with what has arrived; wait for the first byte at most `seconds`.

        Returns:
            The number of bytes, 0 when nothing came.

        Raises:
            SourceUnavailable: The server closed the connection, is silent, or `close` was called.
        """
        deadline = time.monotonic() + seconds
        filled = self._drain(buffer)
        if not filled:
            self._wait(deadline - time.monotonic())
            filled = self._drain(buffer)
        if not filled:
            self._check_silence()
            return 0
        self._heard = time.monotonic()
        self._asked = False
        pause, best = _PAUSE, 0.0
        while filled < len(buffer) and time.monotonic() < deadline:
            time.sleep(pause)
            more = self._drain(buffer[filled:])
            filled += more
            if more < _WORTH_A_PAUSE:
                break
            # As long as the socket has room for what the server sends meanwhile.
            rate = more / pause
            pause = min(2 * pause, _LONGEST_PAUSE) if rate > 0.75 * best else pause / 2
            best = max(best, rate)
        return filled

    def passed(self, lsn: int) -> None:
        """Note that everything up to `lsn` has been handed on."""
        self._received = max(self._received, lsn)

    def confirm(self, lsn: int) -> None:
        """Let the server forget up to `lsn`; told with the next status message."""
        self._confirmed = max(self._confirmed, lsn)

    def send_status(self, *, answer_wanted: bool = False) -> None:
        """Tell the server now how far we are. A broken connection shows when receiving."""
        clock = int((time.time() - _EPOCH_2000) * 1_000_000)
        with self._lock:
            confirmed = self._confirmed if self._confirmed <= self._received else 0  # 0: unknown
            message = _STATUS.pack(
                b"d",
                _STATUS.size - 1,
                b"r",
                self._received,
                confirmed,
                confirmed,
                clock,
                answer_wanted,
            )
            if not self._ended.is_set():
                with suppress(OSError):
                    self._send(message)

    def close(self) -> None:
        """Tell the server the last confirmed position and end; a blocked `receive` returns."""
        if self._thread is not None:
            self.send_status()
        self._ended.set()
        with self._lock:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _report(self) -> None:
        while not self._ended.wait(self._interval):
            self.send_status()

    def _drain(self, buffer: memoryview) -> int:
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
                    raise self._lost(error) from error
                if not count:
                    if filled:  # what came before the end comes first; the next call sees the end
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

    def _check_silence(self) -> None:
        silent = time.monotonic() - self._heard
        if not self._asked and silent > SILENCE_SECONDS / 2:
            self._asked = True
            self._heard = time.monotonic() - SILENCE_SECONDS / 2
            self.send_status(answer_wanted=True)
        elif silent > SILENCE_SECONDS:
            raise SourceUnavailable(
                f"{self._where}: the server has said nothing for {SILENCE_SECONDS:g} s"
            )

    def _send(self, message: bytes) -> None:
        """Send it whole, or not at all when the connection takes nothing now.

        A message half sent must be finished: without room for a second the connection is given up.
        """
        rest = memoryview(message)
        deadline = time.monotonic() + 1
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except _WOULD_BLOCK:
                if len(rest) == len(message):
                    return
                if time.monotonic() > deadline:
                    self._socket.shutdown(socket.SHUT_RDWR)
                    return
                time.sleep(_PAUSE)

    def _exactly(self, count: int) -> bytes:
        received = bytearray()
        while len(received) < count:
            piece = self._socket.recv(count - len(received))
            if not piece:
                raise ConnectionResetError("the server closed the connection")
            received += piece
        return bytes(received)

    def _lost(self, error: OSError) -> SourceUnavailable:
        return SourceUnavailable(
            f"{self._where}: connection lost ({error.strerror or type(error).__name__})"
        )
