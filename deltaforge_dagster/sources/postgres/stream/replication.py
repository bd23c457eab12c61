"""The stream of one replication slot: bytes in, status messages out.

After `START_REPLICATION` both sides send CopyData messages (manual: "Streaming Replication
Protocol"). Ours are Standby status updates, 39 bytes with header::

    'd' length  'r'  Int64 received  Int64 flushed  Int64 applied  Int64 clock  Byte1 reply-wanted

A separate thread sends one every second, so that the server does not consider us dead while the
reader's consumer is busy. `received` is the position up to which the stream was decoded. `flushed`
is the position up to which the server may discard its log: the last one given to `confirm`, once
the stream has reached it.
"""

from __future__ import annotations

import socket
import struct
import threading
import time

import psycopg
from psycopg import sql

from deltaforge_dagster.errors import SourceUnavailable
from deltaforge_dagster.positions import format_lsn
from deltaforge_dagster.sources.postgres.config import PostgresSourceConfig
from deltaforge_dagster.sources.postgres.connection.handshake import RefusedError, error_fields
from deltaforge_dagster.sources.postgres.decode.messages import MESSAGES_VERSION
from deltaforge_dagster.sources.postgres.position import LsnPosition
from deltaforge_dagster.sources.stream import StreamSocket

STATUS_SECONDS = 1.0
SILENCE_SECONDS = 60.0
"""A server that is silent for this long, although asked for a reply half-way, is considered dead.

The server is told to do the same with us (`wal_sender_timeout`).
"""

_STATUS = struct.Struct("!cicqqqqb")
_EPOCH_2000 = 946_684_800


def start_command(
    connection: psycopg.Connection, config: PostgresSourceConfig, start: LsnPosition, version: int
) -> str:
    """Return the `START_REPLICATION` command (manual: "Logical Streaming Replication Parameters").

    Version 1 of the protocol sends each transaction complete at its commit, in commit order, and
    prepared ones at COMMIT PREPARED. Later versions send parts of open transactions, interleaved,
    and prepared ones early. We would have to keep all of that until the commit, which the server
    does as well.
    """
    names = sql.Literal(sql.Identifier(config.publication).as_string(connection))
    messages = ", messages 'true'" if version >= MESSAGES_VERSION else ""
    return (
        f"START_REPLICATION SLOT {sql.Identifier(config.slot).as_string(connection)} "
        f"LOGICAL {format_lsn(start.lsn)} "
        f"(proto_version '1', publication_names {names.as_string(connection)}{messages})"
    )


class ReplicationStream:
    """An open `START_REPLICATION`; one thread receives, any thread may confirm and close.

    Args:
        connected: The socket of a replication connection, after its handshake.
        where: The server's address, for error messages.
        status_seconds: Seconds between two status messages.
    """

    def __init__(
        self, connected: socket.socket, where: str, status_seconds: float = STATUS_SECONDS
    ) -> None:
        self._socket = StreamSocket(connected, where)
        self._where = where
        self._interval = status_seconds
        self._received = 0
        self._confirmed = 0
        self._asked_at: float | None = None
        self._status_lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, command: str) -> None:
        """Send the command and start the stream.

        Raises:
            RefusedError: The server's answer is an error.
            SourceUnavailable: The connection broke.
        """
        body = command.encode() + b"\0"
        self._socket.ask(b"Q" + struct.pack("!i", len(body) + 4) + body)
        while True:
            letter, length = struct.unpack("!ci", self._socket.exactly(5))
            answer = self._socket.exactly(length - 4)
            if letter == b"E":
                fields = error_fields(answer)
                raise RefusedError(fields.get("C", ""), fields.get("M", ""))
            if letter == b"W":  # CopyBothResponse: the stream begins with the next byte
                break
        self._socket.begin()
        self._thread = threading.Thread(target=self._report, name="standby status", daemon=True)
        self._thread.start()

    def receive(self, buffer: memoryview, seconds: float) -> int:
        """Fill `buffer` with what has arrived; wait at most `seconds` for the first byte.

        Returns:
            The number of bytes; 0 if none arrived.

        Raises:
            SourceUnavailable: The server closed the connection, is silent, or `close` was called.
        """
        count = self._socket.receive(buffer, seconds)
        if count:
            self._asked_at = None
        else:
            self._check_silence()
        return count

    def passed(self, lsn: int) -> None:
        """Record that everything up to `lsn` was decoded and passed on to the consumer."""
        self._received = max(self._received, lsn)

    def confirm(self, lsn: int) -> None:
        """Allow the server to discard its log up to `lsn`, with the next status message."""
        self._confirmed = max(self._confirmed, lsn)

    def send_status(self, *, answer_requested: bool = False) -> None:
        """Send a status message now.

        If the connection is broken, only `receive` raises an error.
        """
        clock = int((time.time() - _EPOCH_2000) * 1_000_000)
        with self._status_lock:  # so that status messages are sent in order
            confirmed = self._confirmed if self._confirmed <= self._received else 0  # 0: unknown
            message = _STATUS.pack(
                b"d",
                _STATUS.size - 1,
                b"r",
                self._received,
                confirmed,
                confirmed,
                clock,
                answer_requested,
            )
            self._socket.send(message)

    def close(self) -> None:
        """Send a last status message and end the stream; a blocked `receive` ends."""
        if self._thread is not None:
            self.send_status()
        self._ended.set()
        self._socket.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _report(self) -> None:
        while not self._ended.wait(self._interval):
            self.send_status()

    def _check_silence(self) -> None:
        now = time.monotonic()
        if self._asked_at is None:
            if self._socket.silence > SILENCE_SECONDS / 2:
                self._asked_at = now
                self.send_status(answer_requested=True)
        elif now - self._asked_at > SILENCE_SECONDS / 2:
            raise SourceUnavailable(
                f"{self._where}: the server has said nothing for {SILENCE_SECONDS:g} s"
            )
