"""Connections to a PostgreSQL server: where it is, how to ask it something, and what it refused.

Ordinary queries go through psycopg, one short-lived connection each, with an end in time that
holds whatever the server or the network does. The replication connection is made in `handshake`,
with the address, the password and the TLS that libpq arrived at for the query connection
before it, so that both reach the same server in the same way.

Every connection pins the settings that change how values look as text, over whatever the
database or the role sets: options of the start-up packet win over `ALTER ROLE/DATABASE ... SET`.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import conninfo
from psycopg.pq import TransactionStatus

from deltaforge_dagster.errors import DeltaforgeError, SourceUnavailable
from deltaforge_dagster.sources.postgres.config import DSN_DEFAULTS, postgres_dsn
from deltaforge_dagster.sources.postgres.connection import handshake
from deltaforge_dagster.sources.postgres.connection.refusals import (
    NOT_PERMITTED,
    connection_error,
    may_not_replicate,
    translate,
)
from deltaforge_dagster.sources.stream.time_limit import SocketTimeLimit

SETTINGS = {
    "client_encoding": "UTF8",
    "TimeZone": "UTC",
    "DateStyle": "ISO",
    "IntervalStyle": "postgres",
    "bytea_output": "hex",
    "extra_float_digits": "3",
    "lc_monetary": "C",
    "search_path": "pg_catalog",
    "quote_all_identifiers": "off",
    "row_security": "off",
    "default_transaction_read_only": "off",
    "default_transaction_isolation": "read\\ committed",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
}
"""Settings of every session of ours (manual: "Client Connection Defaults").

With `row_security` off a SELECT that a policy would cut short fails instead.
"""

NAME_BYTES = 63
"""Longer application names are cut by the server (NAMEDATALEN - 1)."""

_DIGEST = 12
_CONNECT_SECONDS = 2  # the least that libpq accepts
_IDLE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class PostgresSourceServer:
    """The server, database and role of one pipeline's source.

    Attributes:
        application_name: How our sessions show in `pg_stat_activity`.
    """

    application_name: str
    _parameters: dict[str, Any] = field(repr=False)

    @classmethod
    def from_dsn(cls, dsn: str, application_name: str) -> PostgresSourceServer:
        """Return the server that `dsn` names: a URL or `key=value` pairs.

        Raises:
            SpecError: `dsn` is neither; the message repeats nothing of it.
        """
        given = conninfo.conninfo_to_dict(postgres_dsn(dsn)[0])
        name = _fitting(application_name)
        return cls(name, {**DSN_DEFAULTS, **given, "application_name": name})

    @property
    def where(self) -> str:
        """`PostgreSQL host:port/database`, for messages."""
        given = self._parameters
        return f"PostgreSQL {given['host']}:{given['port']}/{given['dbname']}"

    @property
    def user(self) -> str:
        """The role we log in as."""
        return str(self._parameters["user"])

    @property
    def database(self) -> str:
        """The database's name."""
        return str(self._parameters["dbname"])

    @contextmanager
    def query(self, seconds: float, *, replication: bool = False) -> Generator[psycopg.Connection]:
        """Open a connection for a few statements, each its own transaction.

        A statement may take `seconds` less half a second, everything together `seconds` (but two
        seconds for connecting alone): then the connection is cut, even if the server hangs.
        Errors of psycopg that leave the block are translated to ours.

        Args:
            seconds: In all.
            replication: Whether the connection takes replication commands as well.

        Raises:
            DeltaforgeError: Whatever the server refused, as in `refusals`.
        """
        began = time.monotonic()
        connection = self.connect(seconds, replication=replication)
        with SocketTimeLimit(connection.fileno(), seconds - (time.monotonic() - began)) as cutter:
            try:
                yield connection
            except psycopg.Error as error:
                raise self.problem(error, seconds, cutter) from error
            finally:
                connection.close()

    def problem(
        self, error: psycopg.Error, seconds: float, cutter: SocketTimeLimit
    ) -> DeltaforgeError:
        """Return what an error on a connection means that `time_limit` was to cut after `seconds`."""
        if cutter.fired:
            return SourceUnavailable(f"{self.where}: no answer within {seconds:g} s")
        return translate(error.sqlstate, str(error), self.where, self.user)

    def replicate(
        self, connection: psycopg.Connection, seconds: float, silence: float | None = None
    ) -> socket.socket:
        """Open a replication connection to the server that `connection` has reached.

        Returns its socket, blocking with a timeout of `seconds`, ready for a command. The server
        ends the session after `silence` seconds without a word from us, or as it is configured
        when that is None; `wal_sender_timeout` in the DSN's own options wins.

        `tcp_user_timeout` is left alone: by it Linux would also end a connection that is full
        because capture pauses, whatever status messages we send meanwhile.

        Raises:
            DeltaforgeError: Whatever the server refused.
        """
        info = connection.info
        options = _options(self._parameters)
        if silence is not None:
            options = f"-c wal_sender_timeout={int(silence * 1000)} {options}"
        address = handshake.ConnectionParameters(
            host=info.host,
            port=info.port,
            user=info.user,
            password=info.password,
            database=info.dbname,
            options=options,
            application_name=self.application_name,
            tls=self._tls(used=connection.pgconn.ssl_in_use),
        )
        return self._handshake(address, seconds, replication=True)

    def timeline_history(self, timeline: int, seconds: float) -> str:
        """Return the history file of a timeline (manual: "Streaming Replication Protocol").

        Raises:
            DeltaforgeError: Whatever the server refused.
        """
        with self.query(seconds, replication=True) as connection:
            row = connection.execute(f"TIMELINE_HISTORY {timeline:d}").fetchone()
        assert row is not None
        return row[1] if isinstance(row[1], str) else bytes(row[1]).decode(errors="replace")

    def connect(self, seconds: float, *, replication: bool = False) -> psycopg.Connection:
        """Open a connection with our settings, whose statements may take `seconds` less a half.

        Raises:
            DeltaforgeError: Whatever the server refused.
        """
        statement_ms = max(int((seconds - 0.5) * 1000), 500)
        problem: DeltaforgeError
        try:
            return psycopg.connect(
                **{
                    **self._parameters,
                    **({"replication": "database"} if replication else {}),
                    "connect_timeout": _CONNECT_SECONDS,
                    "options": f"{_options(self._parameters)} -c statement_timeout={statement_ms}",
                },
                autocommit=True,
                prepare_threshold=None,
            )
        except psycopg.errors.ConnectionTimeout:
            problem = SourceUnavailable(
                f"{self.where}: no connection within {_CONNECT_SECONDS} s; is the address right, "
                "and does a firewall stand between?"
            )
        except psycopg.Error as error:
            problem = self._why(str(error))
        raise problem

    def _why(self, text: str) -> DeltaforgeError:
        """Explain why libpq could not connect; it says so only in the server's language.

        A second attempt by pg8000 gets the SQLSTATE. libpq's text decides only when that
        attempt succeeds (certificates, Kerberos: things that pg8000 is not asked to check).
        """
        given = self._parameters
        address = handshake.ConnectionParameters(
            host=str(given["host"]).split(",")[0],
            port=int(str(given["port"]).split(",")[0]),
            user=self.user,
            password=given.get("password") or os.environ.get("PGPASSWORD", ""),
            database=self.database,
            options="",
            application_name=self.application_name,
            tls=self._tls(
                used=given.get("sslmode", "prefer") not in {"disable", "allow", "prefer"}
            ),
        )
        try:
            self._handshake(address, _CONNECT_SECONDS, replication=False).close()
        except DeltaforgeError as error:
            return error
        return connection_error(text, self.where)

    def _handshake(
        self, address: handshake.ConnectionParameters, seconds: float, *, replication: bool
    ) -> socket.socket:
        problem: DeltaforgeError
        try:
            return handshake.connect(address, seconds, replication=replication)
        except handshake.RefusedError as refused:
            if replication and refused.sqlstate == NOT_PERMITTED:
                problem = may_not_replicate(self.where, self.user)
            else:
                problem = translate(refused.sqlstate, refused.message, self.where, self.user)
        except handshake.UnreachableError as unreachable:
            problem = connection_error(str(unreachable), self.where)
        raise problem

    def _tls(self, *, used: bool) -> handshake.Tls | None:
        given = self._parameters
        if not used:
            return None
        return handshake.Tls(
            mode=given.get("sslmode", "prefer"),
            root=given.get("sslrootcert"),
            certificate=given.get("sslcert"),
            key=given.get("sslkey"),
        )


class KeptConnection:
    """One connection for many questions: opened for the first, closed by whatever goes wrong.

    For one thread. Each question is a transaction that only reads. A connection that was not used
    for half a minute is reopened, since the server or something between may have ended it.

    Args:
        server: Where.
        seconds: What one question may take, as in `PostgresSourceServer.query`.
    """

    def __init__(self, server: PostgresSourceServer, seconds: float) -> None:
        self._server = server
        self._seconds = seconds
        self._connection: psycopg.Connection | None = None
        self._used = 0.0

    @contextmanager
    def question(self) -> Generator[psycopg.Connection]:
        """Lend the connection; its transaction ends with the block.

        Raises:
            DeltaforgeError: Whatever the server refused, as in `refusals`.
        """
        server, began = self._server, time.monotonic()
        if began - self._used > _IDLE_SECONDS:
            self.close()
        connection = self._connection or server.connect(self._seconds)
        self._connection = connection
        with SocketTimeLimit(
            connection.fileno(), self._seconds - (time.monotonic() - began)
        ) as cutter:
            try:
                connection.execute("BEGIN READ ONLY")
                yield connection
                if connection.info.transaction_status == TransactionStatus.ACTIVE:
                    self.close()  # amid a COPY that was read far enough
                else:
                    connection.execute("ROLLBACK")
            except BaseException as error:
                self.close()
                if isinstance(error, psycopg.Error):
                    raise server.problem(error, self._seconds, cutter) from error
                raise
        self._used = time.monotonic()

    def close(self) -> None:
        """Close it; the next question opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _fitting(application_name: str) -> str:
    """Return a name that the server keeps whole; a long one ends in a hash of what is cut off.

    Who may end whose reader is decided by this name (`slots.claim`).
    """
    name = application_name.encode()
    if len(name) <= NAME_BYTES:
        return application_name
    digest = hashlib.sha256(name).hexdigest()[:_DIGEST]
    return f"{name[: NAME_BYTES - _DIGEST - 1].decode(errors='ignore')}-{digest}"


def _options(parameters: dict[str, Any]) -> str:
    """Return start-up options: those of the DSN, then ours, which win."""
    ours = " ".join(f"-c {name}={value}" for name, value in SETTINGS.items())
    return f"{parameters.get('options') or ''} {ours}".strip()
