"""The errors for a replication stream that the server refuses, or ends."""

from __future__ import annotations

import struct

from deltaforge_dagster.errors import (
    CorruptLog,
    DeltaforgeError,
    SourceUnavailable,
)
from deltaforge_dagster.sources.findings import one_line
from deltaforge_dagster.sources.postgres.connection import catalog
from deltaforge_dagster.sources.postgres.connection.handshake import RefusedError, error_fields
from deltaforge_dagster.sources.postgres.connection.refusals import translate
from deltaforge_dagster.sources.postgres.connection.server import PostgresSourceServer
from deltaforge_dagster.sources.postgres.source_type import PostgresSourceConfig
from deltaforge_dagster.sources.postgres.stream import publications, slots
from deltaforge_dagster.sources.postgres.stream.replication import ReplicationStream

_STATE_SECONDS = 5.0


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
