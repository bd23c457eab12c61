"""Connections to a MySQL server: where it is, how to ask it something, and how to read its log.

Everything goes through PyMySQL, one short-lived connection each, with an end in time that holds
whatever the server or the network does. To read the log, PyMySQL does the handshake and sends the
command; what the server sends from then on is read from the connection's socket into large buffers.
After a command was sent PyMySQL has read nothing ahead, so no byte is missed.
"""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pymysql
from pymysql.cursors import Cursor, DictCursor

from deltaforge_dagster.errors import DeltaforgeError, SourceMisconfigured, SourceUnavailable
from deltaforge_dagster.sources.mysql.config import MysqlDsn, mysql_dsn
from deltaforge_dagster.sources.mysql.connection.refusals import translate
from deltaforge_dagster.sources.stream.time_limit import SocketTimeLimit

_CONNECT_SECONDS = 2.0
_CLIENT_ERRORS = range(2000, 3000)
_TLS_ERROR = 2026


class MysqlSession:
    """A connection for a few statements, each its own transaction."""

    def __init__(self, connection: pymysql.Connection) -> None:
        self._connection = connection

    @property
    def server_version(self) -> str:
        """As the server's greeting says it: `8.0.15`, `5.5.5-10.11.6-MariaDB-log`."""
        return str(self._connection.get_server_info())

    @property
    def is_mariadb(self) -> bool:
        """Whether the server is MariaDB."""
        return "mariadb" in self.server_version.lower()

    @property
    def version(self) -> tuple[int, ...]:
        """The server's version as numbers; MariaDB puts `5.5.5-` before its own."""
        found = re.match(r"(?:5\.5\.5-)?(\d+)\.(\d+)\.(\d+)", self.server_version)
        return tuple(map(int, found.groups())) if found else ()

    def rows(self, statement: str, *parameters: object) -> list[dict[str, Any]]:
        """Return what a statement finds, by the columns' names."""
        with self._connection.cursor() as cursor:
            cursor.execute(statement, parameters or None)
            return list(cursor.fetchall())

    def texts(self, statement: str) -> list[tuple[bytes | None, ...]]:
        """Return what a statement finds as the server sends it, without any conversion."""
        connection = self._connection
        usual = connection.decoders, connection.use_unicode
        connection.decoders, connection.use_unicode = {}, False
        try:
            with connection.cursor(Cursor) as cursor:
                cursor.execute(statement)
                return list(cursor.fetchall())
        finally:
            connection.decoders, connection.use_unicode = usual

    def rows_or_refusal(self, statement: str, refusal: int) -> list[dict[str, Any]] | None:
        """Return what a statement finds; None where the server refuses it with that number."""
        try:
            return self.rows(statement)
        except pymysql.MySQLError as error:
            if _number(error) == refusal:
                return None
            raise

    def refusal(self, statement: str) -> int | None:
        """Return the number with which the server refuses a statement, None where it does not."""
        try:
            self.rows(statement)
        except pymysql.MySQLError as error:
            return _number(error)
        return None


@dataclass(frozen=True, slots=True)
class MysqlSourceServer:
    """The server and user of one pipeline's source.

    Attributes:
        program: How our sessions show in `performance_schema.session_connect_attrs`.
    """

    dsn: MysqlDsn
    program: str

    @classmethod
    def from_dsn(cls, dsn: str, program: str) -> MysqlSourceServer:
        """Return the server that `dsn` names.

        Raises:
            SpecError: `dsn` is no MySQL URL; the message repeats nothing of it.
        """
        return cls(mysql_dsn(dsn), program)

    @property
    def where(self) -> str:
        """`MySQL host:port`, for messages."""
        return f"MySQL {self.dsn.host}:{self.dsn.port}"

    @property
    def user(self) -> str:
        """The user we log in as."""
        return self.dsn.user

    @contextmanager
    def query(self, seconds: float) -> Generator[MysqlSession]:
        """Open a connection for a few statements.

        Everything together may take `seconds`: then the connection is cut, even if the server
        hangs. Errors of PyMySQL that leave the block are translated to ours.

        Raises:
            DeltaforgeError: Whatever the server refused, as in `refusals`.
        """
        with self._connected(seconds) as connection:
            yield MysqlSession(connection)

    def dump(
        self, settings: Sequence[str], command: int, body: bytes, seconds: float
    ) -> socket.socket:
        """Send a replication command on a new connection and return the socket from which to read its answer.

        Args:
            settings: Statements to run first, such as `SET @source_binlog_checksum = 'CRC32'`.
            command: Number of the command.
            body: Payload of the command.
            seconds: Timeout for all of this.

        Raises:
            DeltaforgeError: Whatever the server refused.
        """
        with self._connected(seconds) as connection:
            for statement in settings:
                with connection.cursor() as cursor:
                    cursor.execute(statement)
            connection._execute_command(command, body)  # noqa: SLF001 - PyMySQL has no other way
            connected: socket.socket = connection._sock  # noqa: SLF001
            connection._sock = connection._rfile = None  # noqa: SLF001 - it is ours now
            return connected

    def connect(self, seconds: float) -> pymysql.Connection:
        """Open a connection within some seconds, which then lasts.

        Raises:
            DeltaforgeError: Whatever the server refused.
        """
        tls = self._tls()
        opened = self._open(min(seconds, _CONNECT_SECONDS))
        with SocketTimeLimit(opened.fileno(), seconds) as cutter:
            try:
                return self._handshake(opened, tls)
            except pymysql.MySQLError as error:
                opened.close()
                raise self.problem(error, cutter, seconds) from error

    def problem(
        self, error: pymysql.MySQLError, cutter: SocketTimeLimit | None = None, seconds: float = 0
    ) -> DeltaforgeError:
        """Return what an error means on a connection that `time_limit` was to cut after `seconds`."""
        if cutter is not None and cutter.fired:
            return SourceUnavailable(f"{self.where}: no answer within {seconds:g} s")
        return self._problem(error)

    @contextmanager
    def _connected(self, seconds: float) -> Generator[pymysql.Connection]:
        tls = self._tls()
        opened = self._open(min(seconds, _CONNECT_SECONDS))
        with SocketTimeLimit(opened.fileno(), seconds) as cutter:
            try:
                connection = self._handshake(opened, tls)
                try:
                    yield connection
                finally:
                    if connection.open:
                        connection.close()
            except pymysql.MySQLError as error:
                raise self.problem(error, cutter, seconds) from error

    def _open(self, seconds: float) -> socket.socket:
        try:
            opened = socket.create_connection((self.dsn.host, self.dsn.port), seconds)
        except TimeoutError:
            raise SourceUnavailable(
                f"{self.where}: no connection within {seconds:g} s; is the address right, and does "
                "a firewall stand between?"
            ) from None
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise SourceUnavailable(f"{self.where}: {reason}") from None
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return opened

    def _handshake(self, opened: socket.socket, tls: ssl.SSLContext | None) -> pymysql.Connection:
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
            # PyMySQL's own way to this mode reads every certificate of the system, and uses none.
            connection.ssl, connection._ssl_required, connection.ctx = True, False, tls  # noqa: SLF001
        try:
            connection.connect(opened)
        except pymysql.MySQLError:
            raise
        except Exception as error:  # noqa: BLE001 - a foreign handshake; whatever it is, nobody is there
            raise pymysql.OperationalError(
                2013, f"the handshake failed ({type(error).__name__})"
            ) from None
        return connection

    def _tls(self) -> ssl.SSLContext | None:
        """Return a context that checks as much of the server as the DSN asks for."""
        dsn = self.dsn
        if dsn.ssl_mode == "DISABLED":
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = dsn.ssl_mode == "VERIFY_IDENTITY"
        try:
            if dsn.ssl_mode in {"VERIFY_CA", "VERIFY_IDENTITY"}:
                context.load_verify_locations(dsn.ssl_ca)
            else:
                context.verify_mode = ssl.CERT_NONE
            if dsn.ssl_cert:
                context.load_cert_chain(dsn.ssl_cert, dsn.ssl_key)
        except OSError as error:  # ssl.SSLError is one, too
            reason = error.strerror or type(error).__name__
            raise SourceMisconfigured(
                f"{self.where}: the files of ssl-ca, ssl-cert and ssl-key cannot be used ({reason})"
            ) from None
        return context

    def _problem(self, error: pymysql.MySQLError) -> DeltaforgeError:
        cause = getattr(error, "original_exception", None)  # of an OSError in the handshake
        if isinstance(cause, ssl.SSLError):
            return translate(_TLS_ERROR, f"no TLS ({cause.reason})", self.where, self.user)
        number = _number(error)
        text = str(error.args[-1]) if error.args else ""
        if number in _CLIENT_ERRORS and number != _TLS_ERROR:
            return SourceUnavailable(f"{self.where}: connection lost (error {number})")
        return translate(number, text, self.where, self.user)


def _number(error: pymysql.MySQLError) -> int:
    number = error.args[0] if error.args else 0
    return number if isinstance(number, int) else 0
