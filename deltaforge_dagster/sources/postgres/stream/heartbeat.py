"""Heartbeats: small messages that we write to the log, so that the slot moves in an idle database.

All databases of a server share one log. While others write much and ours writes nothing, the slot
moves only with the server's keepalives, which may come late. A heartbeat is a transaction in our
database that the slot decodes, so its commit can be confirmed as soon as it has arrived.
"""

from __future__ import annotations

import logging
import threading

from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.sources.postgres.connection.server import PostgresSourceServer
from deltaforge_dagster.sources.postgres.decode.pgoutput import HEARTBEAT

logger = logging.getLogger(__name__)

_SECONDS = 5.0


class Heartbeat:
    """Writes a heartbeat every `seconds`, from a separate thread, until it is stopped.

    A failed heartbeat is only logged, because capture works without it.
    """

    def __init__(self, server: PostgresSourceServer, seconds: float) -> None:
        self._server = server
        self._seconds = seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; waits for a heartbeat that is being written."""
        self._ended.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._ended.wait(self._seconds):
            try:
                # Transactional, because a commit flushes the log, which a message alone does not.
                with self._server.query(_SECONDS) as connection:
                    connection.execute("SELECT pg_logical_emit_message(true, %s, '')", (HEARTBEAT,))
            except DeltaforgeError as error:
                logger.warning("a heartbeat failed: %s", error)
