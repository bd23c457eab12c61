"""Spark sessions of a run: one that is used again and again, across runs.

A new session costs seconds, and its first Python job more; a session that exists costs nothing.
So its id is stored with the lease, and the next run of the pipeline continues it. A session dies
with its server, with `stop`, or after 24 hours without use; then a new one is made and stored.

A run that is killed leaves its tasks behind: Spark goes on with them, for ever where a processor hangs,
and they hold the places that the next run's tasks need. So a run that continues a session ends them first.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import uuid
from collections.abc import Callable, Mapping
from urllib.parse import quote

# Before grpc is imported: it writes notes about forks and missing proxies to standard error.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from pyspark.errors import PySparkException
from pyspark.errors.exceptions.connect import SparkConnectGrpcException
from pyspark.sql.connect.session import SparkSession

from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import SparkUnavailable
from deltaforge_dagster.pipeline.encoder import spark_condition
from deltaforge_dagster.resources.spark_server import SparkServer

SESSION_SETTINGS: Mapping[str, str] = {
    # A job is one scan without a shuffle: adaptive planning could only cost time.
    "spark.sql.adaptive.enabled": "false",
    # lz4 makes this path minutes slow.
    "spark.sql.execution.arrow.compression.codec": "none",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ansi.enabled": "true",
    # Error texts reach logs; stacks of Java help nobody there.
    "spark.sql.pyspark.jvmStacktrace.enabled": "false",
}

if "SPARK_CONNECT_LOG_LEVEL" not in os.environ:
    # PySpark has it switched off, which Dagster undoes: stacks, and what Spark quotes, on standard error.
    logging.getLogger("pyspark.sql.connect.logging").setLevel(logging.CRITICAL + 1)

_DEAD_SESSION = ("SESSION_CLOSED", "SESSION_CHANGED", "SESSION_NOT_FOUND")
_DEAD_SERVER = {
    "UNAVAILABLE",
    "UNAUTHENTICATED",  # another server has our server's port now
    "CANCELLED",
    "UNKNOWN",
}
"""Codes of gRPC, when Spark itself named no error."""


class SparkSessions:
    """The Spark session of one run; implements `pipeline.encoder.SessionProvider`.

    Args:
        settings: Names the Connect server; without one, our own server below the home directory.
        session_id: Id that an earlier run stored, None to begin with a new session.
        remember: Stores the id of a session made here; called before its first use.
    """

    def __init__(
        self, settings: Settings, session_id: str | None, remember: Callable[[str], None]
    ) -> None:
        self._settings = settings
        self._session_id = session_id
        self._remember = remember
        self._lock = threading.Lock()
        self._session: SparkSession | None = None
        self._server: SparkServer | None = None

    @property
    def elsewhere(self) -> bool:
        """Whether the server was named by the settings, and may lack what our own has."""
        return self._settings.spark_remote is not None

    def session(self) -> SparkSession:
        """Return the session, made or found again if there is none in this process.

        Raises:
            SparkUnavailable: No server, or it refuses; a later call tries again.
            SettingsError: There is no Java to start our own server with.
        """
        with self._lock:
            if self._session is None:
                self._session = self._find() or self._make()
            return self._session

    def lost(self, error: BaseException) -> bool:
        """Say whether `error` means that the session is gone; if so, it is dropped.

        The next `session()` then starts the server again, or makes a new session.
        """
        dead = _is_dead_session(error)
        if not dead and not _is_dead_server(error):
            return False
        with self._lock:
            self._session = None
            if dead:
                self._session_id = None
        return True

    def stop(self) -> None:
        """End the session on the server, for one that no later run shall continue."""
        with self._lock:
            session, self._session, self._session_id = self._session, None, None
            server, self._server = self._server, None
        if session is not None:
            with contextlib.suppress(PySparkException):  # gone already is as good
                session.client.release_session()
            session.client.close()
        if server is not None:
            server.release()

    def _find(self) -> SparkSession | None:
        """Return the remembered session without the tasks that its last run left, None when it is dead."""
        if self._session_id is None:
            return None
        try:
            session = self._connect(self._session_id)
            session.interruptAll()
        except PySparkException as error:
            if not _is_dead_session(error):
                raise _unavailable(error) from None
            self._session_id = None
            return None
        return session

    def _make(self) -> SparkSession:
        session_id = str(uuid.uuid4())
        try:
            session = self._connect(session_id)
        except PySparkException as error:
            raise _unavailable(error) from None
        self._session_id = session_id
        self._remember(session_id)
        return session

    def _connect(self, session_id: str) -> SparkSession:
        # The server knows a session by user and id, and the user must not depend on who started
        # the run.
        separator = "" if (remote := self._remote()).endswith("/") else ";"
        session = SparkSession(
            f"{remote}{separator}user_id=deltaforge;session_id={quote(session_id)}"
        )
        # PySpark waits ten minutes for a server that is gone, and may run a job twice: a failure
        # is for the deliverer to repeat. Nor is there anything to attach to again after one.
        session.client.set_retry_policies([])
        session.client.disable_reattachable_execute()
        for name, value in SESSION_SETTINGS.items():
            session.conf.set(name, value)
        return session

    def _remote(self) -> str:
        """Return the Connect URL, ending where a parameter may follow."""
        remote = self._settings.spark_remote
        if remote is not None:
            return remote if "/;" in remote else f"{remote.rstrip('/')}/;user_agent=deltaforge"
        if self._server is not None:
            self._server.release()
        self._server = SparkServer.ensure(self._settings.home)
        return self._server.remote


def _is_dead_session(error: BaseException) -> bool:
    condition = error.getCondition() if isinstance(error, PySparkException) else None
    return any(name in (condition or str(error)) for name in _DEAD_SESSION)


def _is_dead_server(error: BaseException) -> bool:
    return (
        isinstance(error, SparkConnectGrpcException)
        and error.getCondition() is None
        and error.getGrpcStatusCode().name in _DEAD_SERVER
    )


def _unavailable(error: PySparkException) -> SparkUnavailable:
    return SparkUnavailable(f"the Spark server does not answer ({spark_condition(error)})")
