"""Heartbeats: small messages of ours in the log, so that a slot moves where nothing else happens.

The log is the whole server's. While other databases write much and ours writes nothing, a slot moves
only with what the server says between changes, which it may say late. A heartbeat is a transaction of
ours that the slot decodes, whose commit can be confirmed as soon as it has come back.
"""

from __future__ import annotations

import logging
import threading

from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.sources.postgres.connection.server import PostgresSourceServer
from deltaforge_dagster.sources.postgres.decode.messages import HEARTBEAT

logger = logging.getLogger(__name__)

_SECONDS = 5.0


class Heartbeat:
    """Writes a heartbeat every so many seconds, from a thread of its own, until it is stopped.

    A heartbeat that fails is logged and nothing more: the log is read without it.
    """

    def __init__(self, server: PostgresSourceServer, seconds: float) -> None:
        self._server = server
        self._seconds = seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; takes as long as a heartbeat at most."""
        self._ended.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._ended.wait(self._seconds):
            try:
                # Transactional: its commit flushes the log, which a message alone does not.
                with self._server.query(_SECONDS) as connection:
                    connection.execute("SELECT pg_logical_emit_message(true, %s, '')", (HEARTBEAT,))
            except DeltaforgeError as error:
                logger.warning("a heartbeat failed: %s", error)
