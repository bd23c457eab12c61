"""Connections to a MySQL server, for queries and for reading its log.

Queries go through PyMySQL, on short-lived connections with a total time limit that holds
whatever the server or the network does. To read the log, PyMySQL does the handshake and sends the
command; everything after that is read from the connection's socket into large buffers.
PyMySQL reads nothing ahead after it has sent a command, so no byte is missed.

A complete TLS handshake takes most of a short connection's time: 10 ms, instead of 1 ms if it
continues the previous connection's TLS session (`TlsContext`). A server that does not know the
session (it was restarted, is another one, or is too old for sessions) answers with a complete
handshake, in which its certificate is verified.
"""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pymysql
from pymysql.cursors import Cursor, DictCursor

from deltaforge_dagster.errors import DeltaforgeError, SourceMisconfigured, SourceUnavailable
from deltaforge_dagster.folders import unreadable_file
from deltaforge_dagster.sources.mysql.connection.refusals import translate
from deltaforge_dagster.sources.mysql.source_type import MysqlDsn, mysql_dsn
from deltaforge_dagster.sources.stream import SocketTimeLimit

_CONNECT_SECONDS = 2.0
_ACCOUNT_SECONDS = 5.0
_CLIENT_ERRORS = range(2000, 3000)  # CR_...: found by the client, not sent by the server
_TLS_ERROR = 2026  # CR_SSL_CONNECTION_ERROR


class MysqlSession:
    """A connection for a few statements, with autocommit."""

    def __init__(self, connection: pymysql.Connection) -> None:
        self._connection = connection

    @property
    def server_version(self) -> str:
        """The version text of the server's greeting: `8.0.15`, `5.5.5-10.11.6-MariaDB-log`."""
        return str(self._connection.get_server_info())

    @property
    def is_mariadb(self) -> bool:
        """Whether the server is MariaDB."""
        return "mariadb" in self.server_version.lower()

    @property
    def version(self) -> tuple[int, ...]:
        """The server's version as numbers; MariaDB puts `5.5.5-` before its own."""
        match = re.match(r"(?:5\.5\.5-)?(\d+)\.(\d+)\.(\d+)", self.server_version)
        return tuple(map(int, match.groups())) if match else ()

    @property
    def host(self) -> str:
        """The name by which we have reached the server."""
        return str(self._connection.host)

    @property
    def account(self) -> str:
        """The account that the server has taken us for, as its statements name it: `'name'@'host'`.

        Its host is the pattern by which the server chose the account, not the machine from which we
        come.
        """
        ((account,),) = self.texts("SELECT CURRENT_USER()")
        name, _, host = (account or b"").decode().rpartition("@")
        return _account(name, host)

    def rows(self, statement: str, *parameters: object) -> list[dict[str, Any]]:
        """Run a statement and return its rows, with the values by column name."""
        with self._connection.cursor() as cursor:
            cursor.execute(statement, parameters or None)
            return list(cursor.fetchall())

    def texts(self, statement: str) -> list[tuple[bytes | None, ...]]:
        """Run a statement; return its rows, with values unconverted, as the server sends them."""
        connection = self._connection
        saved = connection.decoders, connection.use_unicode
        connection.decoders, connection.use_unicode = {}, False
        try:
            with connection.cursor(Cursor) as cursor:
                cursor.execute(statement)
                return list(cursor.fetchall())
        finally:
            connection.decoders, connection.use_unicode = saved

    def send(self, command: int, body: bytes) -> None:
        """Send a command other than a statement, and read the first packet of its answer.

        Args:
            command: Its number in the protocol.
            body: What follows the number.
        """
        self._connection._execute_command(command, body)  # noqa: SLF001 - PyMySQL has no other way
        self._connection._read_packet()  # noqa: SLF001

    def rows_or_refusal(self, statement: str, *refusals: int) -> list[dict[str, Any]] | None:
        """Run a statement and return its rows; None if the server refuses it.

        Only errors with one of the numbers `refusals` count as a refusal; others are raised.
        """
        try:
            return self.rows(statement)
        except pymysql.MySQLError as error:
            if _number(error) in refusals:
                return None
            raise

    def refusal(self, statement: str) -> int | None:
        """Run a statement; return the error number if the server refuses it, else None."""
        try:
            self.rows(statement)
        except pymysql.MySQLError as error:
            return _number(error)
        return None


@dataclass(frozen=True, slots=True)
class MysqlSourceServer:
    """The server of one pipeline's source, and the login to it.

    Attributes:
        dsn: Address and login.
        program: `program_name` of our sessions in `performance_schema.session_connect_attrs`.
    """

    dsn: MysqlDsn
    program: str

    @classmethod
    def from_dsn(cls, dsn: str, program: str) -> MysqlSourceServer:
        """Return the server for a MySQL URL.

        Raises:
            SpecError: `dsn` is not a MySQL URL. The message quotes at most the name of an option
                and the `ssl-mode`.
        """
        return cls(mysql_dsn(dsn), program)

    @property
    def where(self) -> str:
        """`MySQL host:port`, for error messages."""
        return f"MySQL {self.dsn.host}:{self.dsn.port}"

    @property
    def user(self) -> str:
        """The user as whom we log in."""
        return self.dsn.user

    def account(self) -> str:
        """Return the account that the server takes us for, as `MysqlSession.account`.

        If the server cannot say, it is the user's account for any host.
        """
        try:
            with self.query(_ACCOUNT_SECONDS) as session:
                return session.account
        except DeltaforgeError:
            return _account(self.user, "%")

    @contextmanager
    def query(self, seconds: float) -> Generator[MysqlSession]:
        """Open a connection for a few statements.

        After `seconds` in total, the connection is shut down, even if the server hangs. Errors of
        PyMySQL that leave the block are translated into ours.

        Raises:
            DeltaforgeError: As `refusals` translates the server's error.
        """
        with self._connected(seconds) as connection:
            yield MysqlSession(connection)

    def dump(
        self,
        settings: Sequence[str],
        command: int,
        body: bytes,
        seconds: float,
        check: Callable[[MysqlSession], None] | None = None,
    ) -> socket.socket:
        """Send a replication command on a new connection; return the socket to read its answer.

        Args:
            settings: Statements to run first, such as `SET @source_binlog_checksum = 'CRC32'`.
            command: Number of the command.
            body: Payload of the command.
            seconds: Time limit for connecting and sending everything.
            check: Raises an error if the connection does not lead to the right server; None if any
                is right.

        Raises:
            DeltaforgeError: As `refusals` translates the server's error.
        """
        with self._connected(seconds) as connection:
            if check is not None:
                check(MysqlSession(connection))
            for statement in settings:
                with connection.cursor() as cursor:
                    cursor.execute(statement)
            connection._execute_command(command, body)  # noqa: SLF001 - PyMySQL has no other way
            sock: socket.socket = connection._sock  # noqa: SLF001
            connection._sock = connection._rfile = None  # noqa: SLF001 - it is ours now
            return sock

    def connect(self, seconds: float) -> pymysql.Connection:
        """Open a connection within `seconds`; once it is open, it has no time limit.

        Raises:
            DeltaforgeError: As `refusals` translates the server's error.
        """
        tls = self._tls()
        sock = self._open(min(seconds, _CONNECT_SECONDS))
        with SocketTimeLimit(sock.fileno(), seconds) as cutter:
            try:
                return self._handshake(sock, tls)
            except pymysql.MySQLError as error:
                sock.close()
                raise self.problem(error, cutter, seconds) from error

    def problem(
        self, error: pymysql.MySQLError, cutter: SocketTimeLimit | None = None, seconds: float = 0
    ) -> DeltaforgeError:
        """Return our error for an error of PyMySQL.

        Args:
            error: The error.
            cutter: The time limit of the connection; if it has fired, it is the cause.
            seconds: How long that limit was.
        """
        if cutter is not None and cutter.fired:
            return SourceUnavailable(f"{self.where}: no answer within {seconds:g} s")
        return self._problem(error)

    @contextmanager
    def _connected(self, seconds: float) -> Generator[pymysql.Connection]:
        tls = self._tls()
        sock = self._open(min(seconds, _CONNECT_SECONDS))
        with SocketTimeLimit(sock.fileno(), seconds) as cutter:
            try:
                connection = self._handshake(sock, tls)
                try:
                    yield connection
                finally:
                    if connection.open:
                        connection.close()
            except pymysql.MySQLError as error:
                raise self.problem(error, cutter, seconds) from error

    def _open(self, seconds: float) -> socket.socket:
        try:
            sock = socket.create_connection((self.dsn.host, self.dsn.port), seconds)
        except TimeoutError:
            raise SourceUnavailable(
                f"{self.where}: no connection within {seconds:g} s; is the address right, and does "
                "a firewall stand between?"
            ) from None
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise SourceUnavailable(f"{self.where}: {reason}") from None
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def _handshake(self, sock: socket.socket, tls: TlsContext | None) -> pymysql.Connection:
        dsn = self.dsn
        connection = pymysql.Connection(
            host=dsn.host,
            port=dsn.port,
            user=dsn.user,
            password=dsn.password.encode(),
            database=dsn.database or None,
            charset="utf8mb4",
            cursorclass=DictCursor,
            autocommit=True,
            program_name=self.program,
            ssl=tls if dsn.ssl_mode != "PREFERRED" else None,
            ssl_disabled=dsn.ssl_mode in {"DISABLED", "PREFERRED"},
            defer_connect=True,
        )
        if dsn.ssl_mode == "PREFERRED":
            # PyMySQL's own code for this mode loads all of the system's certificates and uses none.
            connection.ssl, connection._ssl_required, connection.ctx = (  # noqa: SLF001
                True,
                False,
                tls,
            )
        session = None  # after a failure, the next connection makes a complete handshake
        try:
            connection.connect(sock)
            if isinstance(connection._sock, ssl.SSLSocket):  # noqa: SLF001
                session = connection._sock.session  # noqa: SLF001
        except pymysql.MySQLError:
            raise
        except Exception as error:  # noqa: BLE001 - a bad handshake may make PyMySQL raise anything
            # 2013 is CR_SERVER_LOST.
            raise pymysql.OperationalError(
                2013, f"the handshake failed ({type(error).__name__})"
            ) from None
        finally:
            if tls is not None:
                tls.session = session
        return connection

    def _tls(self) -> TlsContext | None:
        """Return the TLS context of our connections; None without TLS."""
        dsn = self.dsn
        try:
            return tls_context(dsn)
        except OSError as error:  # ssl.SSLError is one, too
            unreadable = unreadable_file(tls_files(dsn))
            if unreadable is not None:
                raise SourceMisconfigured(f"{self.where}: {unreadable}") from None
            reason = error.strerror or type(error).__name__
            raise SourceMisconfigured(
                f"{self.where}: the files of ssl-ca, ssl-cert and ssl-key cannot be used ({reason})"
            ) from None

    def _problem(self, error: pymysql.MySQLError) -> DeltaforgeError:
        cause = getattr(error, "original_exception", None)  # PyMySQL wraps an OSError
        if isinstance(cause, ssl.SSLError):
            return translate(
                _TLS_ERROR, f"no TLS ({cause.reason})", self.where, self.user, self.account
            )
        number = _number(error)
        text = str(error.args[-1]) if error.args else ""
        if number in _CLIENT_ERRORS and number != _TLS_ERROR:
            return SourceUnavailable(f"{self.where}: connection lost (error {number})")
        return translate(number, text, self.where, self.user, self.account)


def _account(name: str, host: str) -> str:
    return "@".join("'" + part.replace("'", "''") + "'" for part in (name, host))


def _number(error: pymysql.MySQLError) -> int:
    number = error.args[0] if error.args else 0
    return number if isinstance(number, int) else 0


class TlsContext(ssl.SSLContext):
    """A client's TLS context for one server.

    Attributes:
        session: The session that new connections continue; None for a complete handshake.
    """

    session: ssl.SSLSession | None = None

    def wrap_socket(self, sock: socket.socket, *arguments: Any, **options: Any) -> ssl.SSLSocket:
        """Shake hands on a connected socket, as `ssl.SSLContext.wrap_socket` does."""
        options["session"] = self.session
        return super().wrap_socket(sock, *arguments, **options)


_State = tuple[tuple[int, int, int] | None, ...]
"""Inode, size and modification time of each file in use; None for an option without a file."""

_CONTEXTS: dict[MysqlDsn, tuple[_State, TlsContext]] = {}


def tls_context(dsn: MysqlDsn) -> TlsContext | None:
    """Return the context that verifies the server as `ssl-mode` says, None for DISABLED.

    It is the same one for each connection with the same DSN, until one of the DSN's files changes.

    Raises:
        OSError: A file of the DSN cannot be used.
    """
    if dsn.ssl_mode == "DISABLED":
        return None
    state = tuple(_state(path) for path in tls_files(dsn).values())
    cached = _CONTEXTS.get(dsn)
    if cached is None or cached[0] != state:
        cached = _CONTEXTS[dsn] = state, _new_context(dsn)
    return cached[1]


def tls_files(dsn: MysqlDsn) -> dict[str, str | None]:
    """Return the files that are used, by the option of the DSN; None for an option without one."""
    authority = dsn.ssl_ca if _verifies(dsn) else None
    return {"ssl-ca": authority, "ssl-cert": dsn.ssl_cert, "ssl-key": dsn.ssl_key}


def _verifies(dsn: MysqlDsn) -> bool:
    return dsn.ssl_mode in {"VERIFY_CA", "VERIFY_IDENTITY"}


def _state(path: str | None) -> tuple[int, int, int] | None:
    if path is None:
        return None
    status = Path(path).stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _new_context(dsn: MysqlDsn) -> TlsContext:
    context = TlsContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = dsn.ssl_mode == "VERIFY_IDENTITY"
    if _verifies(dsn):
        context.load_verify_locations(dsn.ssl_ca)
    else:
        context.verify_mode = ssl.CERT_NONE
    if dsn.ssl_cert:
        context.load_cert_chain(dsn.ssl_cert, dsn.ssl_key)
    return context
