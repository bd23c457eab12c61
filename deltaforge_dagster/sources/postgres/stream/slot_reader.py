"""Read a replication slot: open its stream, decode what the server sends, confirm positions.

The thread that reads opens the stream; other threads confirm and close it at any time, also while
it is being opened.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

import psycopg

from deltaforge_dagster.config.engine import PostgresOptions
from deltaforge_dagster.sources.base import ChangeBatch, ReadLimits
from deltaforge_dagster.sources.postgres.connection import catalog
from deltaforge_dagster.sources.postgres.connection.handshake import RefusedError
from deltaforge_dagster.sources.postgres.connection.server import PostgresSourceServer
from deltaforge_dagster.sources.postgres.decode.decoder import DecodedPgoutput, PostgresDecoder
from deltaforge_dagster.sources.postgres.position import LsnPosition, lsn_of
from deltaforge_dagster.sources.postgres.source_type import PostgresSourceConfig
from deltaforge_dagster.sources.postgres.stream import publications, slots
from deltaforge_dagster.sources.postgres.stream.replication import (
    SILENCE_SECONDS,
    STATUS_SECONDS,
    ReplicationStream,
    refusal,
    start_command,
    stream_error,
)
from deltaforge_dagster.sources.stream import ReadBuffer
from deltaforge_dagster.sources.tables import TablePatterns

logger = logging.getLogger(__name__)

_OPEN_SECONDS = 30.0
_HANDSHAKE_SECONDS = 10.0


class SlotReader:
    """Reads the changes of one replication slot.

    Args:
        server: The server.
        config: `spec.source.config` of the pipeline file, which names slot and publication.
        patterns: The tables of the pipeline.
        options: `spec.engine.postgres`.
        settings: Returns the server's settings, or raises an error if it cannot be captured from.
    """

    def __init__(
        self,
        server: PostgresSourceServer,
        config: PostgresSourceConfig,
        patterns: TablePatterns,
        options: PostgresOptions,
        *,
        settings: Callable[[psycopg.Connection], catalog.ServerSettings],
    ) -> None:
        self._server = server
        self._config = config
        self._patterns = patterns
        self._options = options
        self._settings = settings
        self._lock = threading.Lock()
        self._stream: ReplicationStream | None = None
        self._confirmed = 0
        self._closed = False

    def open(self, start: LsnPosition) -> ReplicationStream:
        """Open the stream of what was committed after `start`.

        Raises:
            PositionLost: The slot does not exist, was invalidated, or is confirmed beyond `start`.
            SourceUnavailable: No connection, or the slot is in use.
            SourceMisconfigured: The publication does not send a table that the pipeline names.
        """
        config, server = self._config, self._server
        with server.query(_OPEN_SECONDS) as connection:
            facts = self._settings(connection)
            slot = slots.check(catalog.slot(connection, config.slot), server, config.slot)
            if slot.unreserved:
                logger.warning(
                    "%s: %s", server.where, slots.short_of_log(connection, config.slot).text
                )
            slots.check_start(slot, server, config.slot, start.lsn, facts.flushed_lsn)
            publications.extend(connection, server, config.publication, self._patterns)
            publications.check(connection, server, config.publication, self._patterns)
            slots.claim(connection, server, config.slot)
            if self._options.failover_slot and not slot.failover:
                slots.check_failover(server, facts.version)
                slots.make_failover(server, config.slot)
            slots.log_running_transactions(connection)
            command = start_command(connection, config, start, facts.version)
            # With a longer timeout, or none, the slot would stay in use by a reader that is frozen.
            silence = min(facts.sender_timeout or SILENCE_SECONDS, SILENCE_SECONDS)
            connected = server.replicate(connection, _HANDSHAKE_SECONDS, silence)
        stream = ReplicationStream(connected, server.where, min(STATUS_SECONDS, silence / 4))
        with self._lock:
            self._stream = stream
            stream.confirm(self._confirmed)  # perhaps while this thread was connecting
            closed = self._closed  # perhaps by another thread meanwhile
        try:
            if closed:
                stream.close()
            stream.passed(start.lsn)
            stream.start(command)
        except RefusedError as refused:
            stream.close()
            raise refusal(refused, server, config, started=False) from None
        except BaseException:
            stream.close()
            raise
        return stream

    def batches(
        self, stream: ReplicationStream, decoder: PostgresDecoder, limits: ReadLimits
    ) -> Iterator[ChangeBatch]:
        """Yield what the stream contains, decoded, until it ends with an error.

        Yields an empty batch whenever nothing came for `limits.max_wait`.
        """
        buffer = ReadBuffer(limits.max_bytes)
        while True:
            if not buffer.fill(stream.receive, limits.max_wait):
                yield ChangeBatch(None, None)
                continue
            decoded = decoder.feed(buffer.data, buffer.length)
            if decoded.reply_requested:
                stream.send_status()
            yield from self._pass_on(stream, decoded, limits)
            if decoded.foreign:
                raise stream_error(
                    stream,
                    bytes(buffer.data[decoded.consumed : buffer.length]),
                    self._server,
                    self._config,
                )
            buffer.drop(decoded.consumed)

    def confirm(self, lsn: int) -> None:
        """Allow the server to discard its log up to `lsn`, with the next status message."""
        with self._lock:
            self._confirmed = max(self._confirmed, lsn)
            if self._stream is not None:
                self._stream.confirm(self._confirmed)

    def close(self) -> None:
        """End the stream, after a last status message; no other one can be opened."""
        with self._lock:
            self._closed = True
            stream = self._stream
        if stream is not None:
            stream.close()

    def _pass_on(
        self, stream: ReplicationStream, decoded: DecodedPgoutput, limits: ReadLimits
    ) -> Iterator[ChangeBatch]:
        for batch in decoded.batches:
            if batch.end is not None:
                stream.passed(lsn_of(batch.end))
            yield from batch.split(limits.max_events)
        if decoded.error is not None:
            raise decoded.error
        if not decoded.batches:
            yield ChangeBatch(None, None)
