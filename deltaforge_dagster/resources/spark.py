"""The Spark session of a run, which is reused across runs.

A new session costs seconds, and its first Python job more; an existing session costs nothing. So
its id is stored with the lease, and the next run of the pipeline continues it. A session ends with
its server, with `stop`, or after 24 hours without use; then a new one is created and its id stored.

A killed run leaves its tasks behind. Spark continues them, forever if a processor hangs, and they
occupy the task slots that the next run needs. So a run that continues a session interrupts them
first, and ticks do so if no run comes (`left_tasks`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import uuid
from collections.abc import Callable, Mapping
from urllib.parse import quote

from pyspark.errors import PySparkException

from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import SparkUnavailable
from deltaforge_dagster.installation.lake_jars import installed_jars
from deltaforge_dagster.installation.spark_server import SparkServer
from deltaforge_dagster.pipeline.spark_client import SparkConnectGrpcException, SparkSession
from deltaforge_dagster.pipeline.spark_session import spark_condition

SESSION_SETTINGS: Mapping[str, str] = {
    # A job is one scan without a shuffle, so adaptive planning would only cost time.
    "spark.sql.adaptive.enabled": "false",
    # With lz4 this path takes minutes.
    "spark.sql.execution.arrow.compression.codec": "none",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ansi.enabled": "true",
    # Error texts reach logs, where Java stack traces do not help.
    "spark.sql.pyspark.jvmStacktrace.enabled": "false",
}

if "SPARK_CONNECT_LOG_LEVEL" not in os.environ:
    # PySpark disables this logger, but Dagster enables it again: it writes stack traces, and the
    # data that Spark quotes, to standard error.
    logging.getLogger("pyspark.sql.connect.logging").setLevel(logging.CRITICAL + 1)

_ISOLATED = "spark.sql.artifact.isolation.enabled"

_DEAD_SESSION = ("SESSION_CLOSED", "SESSION_CHANGED", "SESSION_NOT_FOUND")
_DEAD_SERVER = {
    "UNAVAILABLE",
    "UNAUTHENTICATED",  # another server now has the port of this one
    "CANCELLED",
    "UNKNOWN",
}
"""gRPC status codes of a dead server, if the error has no Spark error class."""


class SparkSessions:
    """The Spark session of one run; implements `pipeline.spark_session.RunSessions`.

    Args:
        settings: May name a Connect server; otherwise the server of the home directory is used.
        session_id: The session id that an earlier run stored, None to create a new session.
        remember: Stores the id of a newly created session; called before its first use.
        own_workers: Whether no other session may use the Python workers of this one. This is for
            functions of users, which may keep state in memory.
    """

    def __init__(
        self,
        settings: Settings,
        session_id: str | None,
        remember: Callable[[str], None],
        *,
        own_workers: bool = False,
    ) -> None:
        self._settings = settings
        self._own_workers = own_workers
        self._session_id = session_id
        self._remember = remember
        self._lock = threading.Lock()
        self._session: SparkSession | None = None
        self._server: SparkServer | None = None
        # Closing must not wait for `_lock`, which is held while a server starts or hangs.
        self._channels = threading.Lock()
        # Includes lost sessions, which other threads may still use.
        self._connected: list[SparkSession] = []
        self._closed = False

    @property
    def elsewhere(self) -> bool:
        """Whether the settings name an external server.

        It may lack what the installation's own server has.
        """
        return self._settings.spark_remote is not None

    def session(self) -> SparkSession:
        """Return the session; if this process has none, continue the stored one or create one.

        Raises:
            SparkUnavailable: There is no server, or it refuses; a later call tries again, unless
                this provider is closed.
            SettingsError: There is no Java to start the installation's own server with.
        """
        with self._lock:
            if self._closed:
                raise SparkUnavailable("the run is ending")
            if self._session is None:
                self._session = self._find() or self._make()
            return self._session

    def lost(self, error: BaseException) -> bool:
        """Return whether `error` means that the session or its server is gone; if so, drop it.

        The next `session()` then starts the server again, or creates a new session.
        """
        dead = _is_dead_session(error)
        if not dead and not _is_dead_server(error):
            return False
        with self._lock:
            self._session = None
            if dead:
                self._session_id = None
        return True

    def interrupt(self, unless: Callable[[], bool]) -> None:
        """Interrupt everything that runs in the stored session; no server is started for that.

        Args:
            unless: Asked at the last moment; the session is left alone if it returns True.

        Raises:
            SparkUnavailable: The server does not respond.
        """
        if not (self.elsewhere or SparkServer.is_running(self._settings.home)):
            return
        assert self._session_id is not None
        try:
            session = self._connect(self._session_id)
            if not unless():
                session.interruptAll()
        except PySparkException as error:
            if not _is_dead_session(error):
                raise _unavailable(error) from None
        finally:
            self.close()

    def stop(self) -> None:
        """End the session on the server, and close; for sessions that no later run continues."""
        with self._lock:
            session = self._session
        if session is not None:
            with contextlib.suppress(PySparkException):  # it may already be gone
                session.client.release_session()
        self.close()

    def close(self) -> None:
        """Cancel all calls to the server, also those of other threads, and refuse further ones.

        It is safe to call it twice.

        The session continues to exist on the server.
        """
        with self._channels:
            self._closed = True
            connected, self._connected = self._connected, []
        for session in connected:
            session.client.close()
        if (server := self._server) is not None:
            server.release()

    def _find(self) -> SparkSession | None:
        """Return the stored session after interrupting tasks of its last run.

        Return None if the session is dead, or shares workers and must not.
        """
        if self._session_id is None:
            return None
        try:
            session = self._connect(self._session_id)
            session.interruptAll()
            if not (self._own_workers and session.conf.get(_ISOLATED) == "false"):
                return session
            self._release(session)
        except PySparkException as error:
            if not _is_dead_session(error):
                raise _unavailable(error) from None
        self._session_id = None
        return None

    def _make(self) -> SparkSession:
        session_id = str(uuid.uuid4())
        try:
            if not self._own_workers:
                self._create_with_shared_workers(session_id)
            session = self._connect(session_id)
        except PySparkException as error:
            raise _unavailable(error) from None
        self._session_id = session_id
        self._remember(session_id)
        return session

    def _create_with_shared_workers(self, session_id: str) -> None:
        """Create a session whose tasks run in the same Python workers as those of other sessions.

        By default Spark has workers for each session, because files and classes that are sent to
        one must not be seen by another; DeltaForge sends none. Spark decides whether a session is
        isolated at its first request, even if that request changes the setting. So another session
        gets the setting first, and is then cloned.
        """
        template = self._connect(str(uuid.uuid4()))
        template.conf.set(_ISOLATED, "false")
        template.client.clone(session_id).close()
        self._release(template)

    def _connect(self, session_id: str) -> SparkSession:
        # The server identifies a session by user and id, and the user must not depend on who
        # started the run.
        separator = "" if (remote := self._remote()).endswith("/") else ";"
        session = SparkSession(
            f"{remote}{separator}user_id=deltaforge;session_id={quote(session_id)}"
        )
        with self._channels:
            if self._closed:
                session.client.close()
                raise SparkUnavailable("the run is ending")
            self._connected.append(session)
        # By default PySpark waits ten minutes for a server that is gone, and may run a job twice.
        # Here the deliverer retries after a failure, and there is nothing to reattach to.
        session.client.set_retry_policies([])
        session.client.disable_reattachable_execute()
        try:
            for name, value in SESSION_SETTINGS.items():
                session.conf.set(name, value)
        except BaseException:
            self._disconnect(session)
            raise
        return session

    def _release(self, session: SparkSession) -> None:
        """End a session on the server."""
        session.client.release_session()
        self._disconnect(session)

    def _disconnect(self, session: SparkSession) -> None:
        with self._channels:
            self._connected = [other for other in self._connected if other is not session]
        session.client.close()

    def _remote(self) -> str:
        """Return the Connect URL in a form to which parameters can be appended."""
        remote = self._settings.spark_remote
        if remote is not None:
            return remote if "/;" in remote else f"{remote.rstrip('/')}/;user_agent=deltaforge"
        if self._server is not None:
            self._server.release()
        self._server = SparkServer.ensure(
            self._settings.home, jars=installed_jars(self._settings.lake_jars)
        )
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
    return SparkUnavailable(f"the Spark server does not respond ({spark_condition(error)})")
