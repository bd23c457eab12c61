"""Connections to a PostgreSQL server, for queries and for replication.

Queries go through psycopg, on short-lived connections with a total time limit that
holds whatever the server or the network does. `handshake` opens the replication connection,
with the address, password and TLS that libpq chose for a preceding query connection,
so that both reach the same server in the same way.

Every connection fixes the settings that affect the text form of values. Options in the
start-up packet override those of `ALTER ROLE/DATABASE ... SET`.

A log cannot be read through a connection pooler (PgBouncer, Supavisor, RDS Proxy), which lends one
session of the server to many clients. It refuses or loses the settings with which our sessions
begin; most poolers refuse replication, too. A pooler is recognized by what it refuses or loses,
never by its address; that only helps to tell the user which address to use instead.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import psycopg
from psycopg import conninfo
from psycopg.pq import TransactionStatus

from deltaforge_dagster.config.postgres_dsn import DSN_DEFAULTS, postgres_dsn
from deltaforge_dagster.errors import DeltaforgeError, SourceMisconfigured, SourceUnavailable
from deltaforge_dagster.sources.postgres.connection import handshake
from deltaforge_dagster.sources.postgres.connection.refusals import (
    NOT_PERMITTED,
    NOT_SUPPORTED,
    connection_error,
    may_not_replicate,
    translate,
)
from deltaforge_dagster.sources.postgres.connection.service import recognized
from deltaforge_dagster.sources.postgres.position import parse_lsn
from deltaforge_dagster.sources.stream import SocketTimeLimit

PROTOCOL_VIOLATION = "08P01"
"""The SQLSTATE with which PgBouncer refuses start-up parameters that it does not pass on."""

_SUPABASE = "pooler.supabase.com"
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

With `row_security` off, a SELECT fails if a policy would filter its rows.
"""
NAME_BYTES = 63
"""The server truncates longer application names (NAMEDATALEN - 1)."""
_DIGEST = 12  # hexadecimal digits, 48 bits
_CONNECT_SECONDS = 2  # the least that libpq accepts
_IDLE_SECONDS = 30.0
_SERVICE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class SystemIdentity:
    """What a server says of itself when it is asked for replication (`IDENTIFY_SYSTEM`).

    Attributes:
        system: The cluster's `system_identifier`.
        timeline: The timeline on which the server is.
        flushed_lsn: End of the durable log.
    """

    system: str
    timeline: int
    flushed_lsn: int

    @property
    def log(self) -> str:
        """`system_identifier/timeline`, which identifies the log."""
        return f"{self.system}/{self.timeline}"


@dataclass(frozen=True, slots=True)
class PostgresSourceServer:
    """The server, database and role of one pipeline's source.

    Attributes:
        application_name: `application_name` of our sessions in `pg_stat_activity`.
    """

    application_name: str
    _parameters: dict[str, Any] = field(repr=False)

    @classmethod
    def from_dsn(cls, dsn: str, application_name: str) -> PostgresSourceServer:
        """Return the server for a connection string: a URL or `key=value` pairs.

        Raises:
            SpecError: `dsn` is neither. The message does not quote it.
        """
        parameters = conninfo.conninfo_to_dict(postgres_dsn(dsn)[0])
        name = _fitting_name(application_name)
        return cls(name, {**DSN_DEFAULTS, **parameters, "application_name": name})

    @property
    def where(self) -> str:
        """`PostgreSQL host:port/database`, for error messages."""
        parameters = self._parameters
        return f"PostgreSQL {parameters['host']}:{parameters['port']}/{parameters['dbname']}"

    @property
    def user(self) -> str:
        """The role as which we log in."""
        return str(self._parameters["user"])

    @property
    def database(self) -> str:
        """The database's name."""
        return str(self._parameters["dbname"])

    @contextmanager
    def query(self, seconds: float, *, replication: bool = False) -> Generator[psycopg.Connection]:
        """Open a connection for a few statements, with autocommit.

        After `seconds` in total, the connection is shut down, even if the server hangs. Connecting
        may always take two seconds; a statement may take half a second less than `seconds`. Errors
        of psycopg that leave the block are translated into ours.

        Args:
            seconds: The total time limit.
            replication: Whether the connection also accepts replication commands.

        Raises:
            DeltaforgeError: As `refusals` translates the server's error.
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
        """Return our error for an error of psycopg.

        Args:
            error: The error.
            seconds: How long the connection's time limit was.
            cutter: The time limit; if it has fired, it is the cause.
        """
        if cutter.fired:
            return SourceUnavailable(f"{self.where}: no answer within {seconds:g} s")
        return translate(error.sqlstate, str(error), self.where, self.user)

    def replicate(
        self, connection: psycopg.Connection, seconds: float, silence: float | None = None
    ) -> socket.socket:
        """Open a replication connection to the server that `connection` has reached.

        Returns its socket, blocking with a timeout of `seconds`, ready for a command.
        `tcp_user_timeout` is not set: with it, Linux would also end a connection whose buffers are
        full because capture is paused, although we send status messages.

        Args:
            connection: An open query connection.
            seconds: Time limit for each step of the handshake.
            silence: `wal_sender_timeout` of the session, in seconds; None for the server's setting.
                The option in the DSN has precedence.

        Raises:
            DeltaforgeError: As `refusals` translates the server's error.
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

    def identify(self, seconds: float) -> SystemIdentity:
        """Return who the server is; on every service, it answers only a role that may replicate.

        Raises:
            PermissionMissing: The role may not replicate; the error says what the service does
                about that.
            DeltaforgeError: As `refusals` translates the server's error.
        """
        with self.query(seconds, replication=True) as connection:
            try:
                return identified(connection)
            except psycopg.errors.SyntaxError:
                # A pooler has dropped the parameter `replication`, so the command is no valid SQL.
                raise self._pooler_error() from None

    def timeline_history(self, timeline: int, seconds: float) -> str:
        """Return the history file of a timeline (manual: "Streaming Replication Protocol").

        Raises:
            DeltaforgeError: As `refusals` translates the server's error.
        """
        with self.query(seconds, replication=True) as connection:
            row = connection.execute(f"TIMELINE_HISTORY {timeline:d}").fetchone()
        assert row is not None
        return row[1] if isinstance(row[1], str) else bytes(row[1]).decode(errors="replace")

    def may_not_replicate(self) -> DeltaforgeError:
        """Return the error for a role that may not replicate, with what its service does then."""
        with self.query(_SERVICE_SECONDS) as connection:
            return may_not_replicate(self.where, self.user, recognized(connection))

    def connect(self, seconds: float, *, replication: bool = False) -> psycopg.Connection:
        """Open a connection with our settings; statements may take `seconds` less half a second.

        Raises:
            DeltaforgeError: As `refusals` translates the server's error.
        """
        # Earlier than `SocketTimeLimit` cuts the connection, so that the server says why.
        statement_ms = max(int((seconds - 0.5) * 1000), 500)
        problem: DeltaforgeError
        try:
            connection = psycopg.connect(
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
            reason = (
                f"no connection within {_CONNECT_SECONDS} s; "
                "is the address right, and does a firewall stand between?"
            )
            if handshake.is_only_ipv6(str(self._parameters["host"]), TimeoutError()):
                reason = handshake.ONLY_IPV6
            problem = SourceUnavailable(f"{self.where}: {reason}")
        except psycopg.Error as error:
            problem = self._connect_error(str(error), replication=replication)
        else:
            return self._with_settings(connection, seconds)
        raise problem

    def _with_settings(self, connection: psycopg.Connection, seconds: float) -> psycopg.Connection:
        """Return a new connection after checking that it has our settings, which poolers lose.

        Raises:
            DeltaforgeError: It does not have them, or does not answer.
        """
        with SocketTimeLimit(connection.fileno(), seconds) as cutter:
            try:
                row = connection.execute("SELECT current_setting('search_path')").fetchone()
            except psycopg.Error as error:
                connection.close()
                raise self.problem(error, seconds, cutter) from error
        assert row is not None
        if row[0] != SETTINGS["search_path"]:
            connection.close()
            raise self._pooler_error()
        return connection

    def _connect_error(self, text: str, *, replication: bool) -> DeltaforgeError:
        """Return the error for a failed connection attempt of libpq.

        libpq provides only a text, in the server's language. So a second attempt, by pg8000, gets
        the SQLSTATE. If that attempt succeeds, libpq's text decides: the cause is something that
        pg8000 does not check, such as certificates or Kerberos.
        """
        parameters = self._parameters
        address = handshake.ConnectionParameters(
            host=str(parameters["host"]).split(",")[0],
            port=int(str(parameters["port"]).split(",")[0]),
            user=self.user,
            password=parameters.get("password") or os.environ.get("PGPASSWORD", ""),
            database=self.database,
            options="",
            application_name=self.application_name,
            tls=self._tls(
                used=parameters.get("sslmode", "prefer") not in {"disable", "allow", "prefer"}
            ),
        )
        try:
            self._handshake(address, _CONNECT_SECONDS, replication=replication).close()
        except DeltaforgeError as error:
            return error
        try:
            full = replace(address, options=_options(parameters))
            handshake.connect(full, _CONNECT_SECONDS, replication=replication).close()
        except (handshake.RefusedError, handshake.UnreachableError) as error:
            if isinstance(error, handshake.RefusedError) and error.sqlstate == PROTOCOL_VIOLATION:
                return self._pooler_error()
        return connection_error(text, self.where)

    def _handshake(
        self, address: handshake.ConnectionParameters, seconds: float, *, replication: bool
    ) -> socket.socket:
        problem: DeltaforgeError
        try:
            return handshake.connect(address, seconds, replication=replication)
        except handshake.RefusedError as refused:
            if replication and refused.sqlstate == NOT_PERMITTED:
                problem = self.may_not_replicate()
            elif refused.sqlstate == PROTOCOL_VIOLATION or (
                replication and refused.sqlstate == NOT_SUPPORTED
            ):
                problem = self._pooler_error()
            else:
                problem = translate(refused.sqlstate, refused.message, self.where, self.user)
        except handshake.UnreachableError as unreachable:
            problem = connection_error(str(unreachable), self.where)
        raise problem

    def _pooler_error(self) -> DeltaforgeError:
        parameters = self._parameters
        return pooled(self.where, str(parameters["host"]), str(parameters["port"]), self.user)

    def _tls(self, *, used: bool) -> handshake.Tls | None:
        parameters = self._parameters
        if not used:
            return None
        return handshake.Tls(
            mode=parameters.get("sslmode", "prefer"),
            root=parameters.get("sslrootcert"),
            certificate=parameters.get("sslcert"),
            key=parameters.get("sslkey"),
        )


def identified(connection: psycopg.Connection) -> SystemIdentity:
    """Return who the server of a replication connection is.

    Manual: "Streaming Replication Protocol".
    """
    row = connection.execute("IDENTIFY_SYSTEM").fetchone()
    assert row is not None
    return SystemIdentity(str(row[0]), int(row[1]), parse_lsn(row[2]))


class KeptConnection:
    """A connection that is reused for many questions.

    It is opened for the first question, and closed after any error. Each question is a read-only
    transaction. A connection that was not used for half a minute is reopened, since the server or a
    firewall may have ended it. Not thread-safe.

    Args:
        server: The server.
        seconds: Time limit for one question, as in `PostgresSourceServer.query`.
    """

    def __init__(self, server: PostgresSourceServer, seconds: float) -> None:
        self._server = server
        self._seconds = seconds
        self._connection: psycopg.Connection | None = None
        self._used_at = 0.0

    @contextmanager
    def question(self) -> Generator[psycopg.Connection]:
        """Provide the connection, in a transaction that ends with the block.

        Raises:
            DeltaforgeError: As `refusals` translates the server's error.
        """
        server, began = self._server, time.monotonic()
        if began - self._used_at > _IDLE_SECONDS:
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
                    self.close()  # a COPY is unfinished, because the caller read only part of it
                else:
                    connection.execute("ROLLBACK")
            except BaseException as error:
                self.close()
                if isinstance(error, psycopg.Error):
                    raise server.problem(error, self._seconds, cutter) from error
                raise
        self._used_at = time.monotonic()

    def close(self) -> None:
        """Close the connection; the next question opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _fitting_name(application_name: str) -> str:
    """Return a name that the server does not truncate.

    If the given name is too long, its end is replaced by a hash. The name must be unique: it
    decides which readers of the slot may be ended (`slots.claim`).
    """
    name = application_name.encode()
    if len(name) <= NAME_BYTES:
        return application_name
    digest = hashlib.sha256(name).hexdigest()[:_DIGEST]
    return f"{name[: NAME_BYTES - _DIGEST - 1].decode(errors='ignore')}-{digest}"


def _options(parameters: dict[str, Any]) -> str:
    """Return the start-up options: those of the DSN, then ours, which override them."""
    ours = " ".join(f"-c {name}={value}" for name, value in SETTINGS.items())
    return f"{parameters.get('options') or ''} {ours}".strip()


def pooled(where: str, host: str, port: str, user: str) -> SourceMisconfigured:
    """Return the error for a pooler, with the address to use instead.

    Args:
        where: The address, as in `PostgresSourceServer.where`.
        host: Its host.
        port: Its port.
        user: The role, whose name may contain the project.
    """
    return SourceMisconfigured(
        f"{where}: a connection pooler answers here, through which no log can be read; "
        f"in source.config.dsn use {_direct_address(host, port, user)}"
    )


def _direct_address(host: str, port: str, user: str) -> str:
    """Return the address of the server behind a pooler, as far as the pooler's reveals it."""
    role, _, project = user.partition(".")
    if host.endswith(_SUPABASE):
        return f"host db.{project or '<project>'}.supabase.co, port 5432 and role {role}"
    if "-pooler." in host:
        return f"host {host.replace('-pooler.', '.', 1)}"
    if ".proxy-" in host:
        return "the endpoint of the instance or cluster itself, not that of its proxy"
    if port != "5432":
        return (
            f"the server's own port instead of {port}, usually 5432, "
            "and its own host if that is another"
        )
    return "the host and port of the server itself"
