"""The stream of one replication slot: bytes in, status messages out.

After `START_REPLICATION` both sides send CopyData messages (manual: "Streaming Replication
Protocol"). Ours are Standby status updates, 39 bytes with header::

    'd' length  'r'  Int64 received  Int64 flushed  Int64 applied  Int64 clock  Byte1 reply-wanted

A separate thread sends one every second, so that the server does not consider us dead while the
reader's consumer is busy. `received` is the position up to which the stream was decoded. `flushed`
is the position up to which the server may discard its log: the last one given to `confirm`, once
the stream has reached it.

`refusal` and `stream_error` return the errors for a stream that the server refuses, or ends.
"""

from __future__ import annotations

import socket
import struct
import threading
import time

import psycopg
from psycopg import sql

from deltaforge_dagster.errors import (
    CorruptLog,
    DeltaforgeError,
    SourceUnavailable,
)
from deltaforge_dagster.positions import format_lsn
from deltaforge_dagster.sources.findings import one_line
from deltaforge_dagster.sources.postgres.connection import catalog
from deltaforge_dagster.sources.postgres.connection.handshake import RefusedError, error_fields
from deltaforge_dagster.sources.postgres.connection.refusals import translate
from deltaforge_dagster.sources.postgres.connection.server import PostgresSourceServer
from deltaforge_dagster.sources.postgres.decode.pgoutput import MESSAGES_VERSION
from deltaforge_dagster.sources.postgres.position import LsnPosition
from deltaforge_dagster.sources.postgres.source_type import PostgresSourceConfig
from deltaforge_dagster.sources.postgres.stream import publications, slots
from deltaforge_dagster.sources.stream import StreamSocket

STATUS_SECONDS = 1.0
SILENCE_SECONDS = 60.0
"""A server that is silent for this long, although asked for a reply half-way, is considered dead.

The server is told to do the same with us (`wal_sender_timeout`).
"""

_STATUS = struct.Struct("!cicqqqqb")
_EPOCH_2000 = 946_684_800  # in seconds since 1970: PostgreSQL's times begin in 2000
_STATE_SECONDS = 5.0


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


def stream_error(
    stream: ReplicationStream,
    message: bytes,
    server: PostgresSourceServer,
    config: PostgresSourceConfig,
) -> DeltaforgeError:
    """Return the error for a message that ends the stream.

    Args:
        stream: The stream, from which the rest of the message is received.
        message: The beginning of the message.
        server: The server.
        config: The source's configuration.
    """
    where = server.where
    if message[:1] in {b"c", b"C", b"Z"}:
        return SourceUnavailable(f"{where}: the server ended the stream; is it shutting down?")
    if message[:1] != b"E":
        return CorruptLog(f"{where}: unexpected message {message[:1]!r} in the stream")
    whole = message
    while len(whole) < 5 or len(whole) < 1 + struct.unpack_from("!i", whole, 1)[0]:
        piece = bytearray(4096)
        whole += bytes(piece[: stream.receive(memoryview(piece), 1.0)])
    fields = error_fields(whole[5:])
    refused = RefusedError(fields.get("C", ""), fields.get("M", ""))
    return refusal(refused, server, config, started=True)


def refusal(
    refused: RefusedError,
    server: PostgresSourceServer,
    config: PostgresSourceConfig,
    *,
    started: bool,
) -> DeltaforgeError:
    """Return our error for an error of the server before the stream or, if `started`, in it.

    ========  ===============================  ====================================================
    SQLSTATE  meaning                          error
    ========  ===============================  ====================================================
    55000     the slot cannot be read now      PositionLost if the slot says that it was invalidated
    58P01     a file was removed               the same; before PostgreSQL 13 slots do not say it
    42704     before the stream: no slot       PositionLost if there is none on a primary
    42704     in the stream: no publication    PositionLost
    42501     no right to replicate            PermissionMissing
    55006     the slot is in use               SourceUnavailable: tried again
    others    as for any session (`refusals`)
    ========  ===============================  ====================================================

    A server gives the first three answers also while it is being promoted; then nothing is lost.
    """
    match refused.sqlstate:
        case "42704" if started:
            return publications.too_young(server, config.publication)
        case "55000" | "58P01" | "42704":
            return _lost_or_unavailable(refused, server, config)
        case "42501":
            return server.may_not_replicate()
        case "55006":
            return slots.in_use(server, config.slot, "another process")
    return translate(refused.sqlstate, refused.message, server.where, server.user)


def _lost_or_unavailable(
    refused: RefusedError, server: PostgresSourceServer, config: PostgresSourceConfig
) -> DeltaforgeError:
    """Return `PositionLost` if the slot proves that, else an error that is retried."""
    unavailable = SourceUnavailable(
        f"{server.where}: replication slot {config.slot!r} cannot be read now: "
        f"{one_line(refused.message)} (SQLSTATE {refused.sqlstate})"
    )
    try:
        with server.query(_STATE_SECONDS) as connection:
            if catalog.settings(connection).standby:
                return unavailable
            slot = slots.check(catalog.slot(connection, config.slot), server, config.slot)
            if refused.sqlstate == "58P01" and not slot.tells_loss:
                return slots.lost(server, config.slot, "no longer has its log")
    except DeltaforgeError as error:
        return error
    return unavailable
