"""ClickHouse's HTTP interface: one query after another on one connection.

ClickHouse's documentation describes it ("HTTP Interface"). A query without data is the body of a
request; otherwise the query is a parameter of the URL, and the data are the body. Settings are
parameters of the URL. `wait_end_of_query` keeps the answer back until the query has ended, so that
its status is that of the whole query.

An answer that reports an error has the number of the exception in the header
`X-ClickHouse-Exception-Code`, and a text that ends with its name: `Code: 60. DB::Exception: ...
(UNKNOWN_TABLE)`. The text may quote values of rows, so messages contain only the number, the name,
and those parts of the text that name an object.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode, urlsplit

import orjson

from deltaforge_dagster.errors import (
    AuthFailed,
    DeltaforgeError,
    PermissionMissing,
    SettingsError,
    SinkUnavailable,
    TableRejected,
)
from deltaforge_dagster.folders import unreadable_file
from deltaforge_dagster.sinks.clickhouse.sink_type import ClickhouseSinkConfig

NO_DATABASE = 81  # UNKNOWN_DATABASE
NO_TABLE = 60  # UNKNOWN_TABLE
NULL = 349  # CANNOT_INSERT_NULL_IN_ORDINARY_COLUMN
_LOGIN = frozenset({192, 193, 194, 516})
"""UNKNOWN_USER, WRONG_PASSWORD, REQUIRED_PASSWORD, AUTHENTICATION_FAILED."""
_DENIED = 497  # ACCESS_DENIED
_TRANSIENT = frozenset(
    {
        159,  # TIMEOUT_EXCEEDED
        160,  # TOO_SLOW
        198,  # DNS_ERROR
        202,  # TOO_MANY_SIMULTANEOUS_QUERIES
        203,  # NO_FREE_CONNECTION
        209,  # SOCKET_TIMEOUT
        210,  # NETWORK_ERROR
        216,  # QUERY_WITH_SAME_ID_IS_ALREADY_RUNNING
        225,  # NO_ZOOKEEPER
        236,  # ABORTED
        241,  # MEMORY_LIMIT_EXCEEDED
        242,  # TABLE_IS_READ_ONLY
        243,  # NOT_ENOUGH_SPACE
        252,  # TOO_MANY_PARTS
        254,  # NO_ACTIVE_REPLICAS
        279,  # ALL_CONNECTION_TRIES_FAILED
        285,  # TOO_FEW_LIVE_REPLICAS
        286,  # UNSATISFIED_QUORUM_FOR_PREVIOUS_WRITE
        319,  # UNKNOWN_STATUS_OF_INSERT
        394,  # QUERY_WAS_CANCELLED
        425,  # SYSTEM_ERROR
        473,  # DEADLOCK_AVOIDED
        499,  # S3_ERROR
        999,  # KEEPER_EXCEPTION
    }
)
"""Exceptions whose cause can disappear by itself, so the query is tried again."""

_NAME = re.compile(r"\(([A-Z][A-Z0-9_]+)\)[^()]*(?:\(version [^()]*\([^()]*\)\))?\s*$")
_GRANT = re.compile(r"necessary to have the grant ([A-Z][A-Z ]*(?:\([^()]*\))? ON [^\s(]+)")
_COLUMN = re.compile(r"(?:column|key) [`'\"]?([A-Za-z0-9_]+)[`'\"]?")

_ALWAYS = {
    "wait_end_of_query": "1",
    "output_format_json_quote_64bit_integers": "1",
    "async_insert": "0",
    "input_format_null_as_default": "0",  # else null would become 0, or an empty text
    "insert_null_as_default": "0",
    "join_use_nulls": "0",
}


@dataclass(slots=True)
class ClickhouseClient:
    """A connection to a server, made when it is needed; used by one thread.

    Args:
        config: The sink.
        timeout: Seconds that the server may go without accepting or sending a byte.
    """

    config: ClickhouseSinkConfig
    timeout: float
    _connection: http.client.HTTPConnection | None = None
    _ended: bool = False

    @property
    def where(self) -> str:
        """The server, for messages."""
        return f"ClickHouse at {urlsplit(self.config.url).netloc}"

    def rows(
        self, subject: str, query: str, settings: Mapping[str, str] | None = None
    ) -> list[dict[str, Any]]:
        """Return the rows of a query; numbers of 64 bits and more are texts.

        Args:
            subject: What errors call the sink, or the table that the query is about.
            query: The query, without a format.
            settings: Settings of the query.

        Raises:
            AuthFailed, PermissionMissing, TableRejected: The server refuses.
            SinkUnavailable: The server cannot be reached, or refuses for now.
        """
        answer = self.execute(subject, query, {"default_format": "JSONEachRow", **(settings or {})})
        return [orjson.loads(line) for line in answer.splitlines()]

    def execute(
        self,
        subject: str,
        query: str,
        settings: Mapping[str, str] | None = None,
        data: bytes | None = None,
    ) -> bytes:
        """Execute a query, and return the answer.

        Args:
            subject: See `rows`.
            query: The query.
            settings: See `rows`.
            data: The data of an INSERT.

        Raises:
            AuthFailed, PermissionMissing, TableRejected, SinkUnavailable: See `rows`.
        """
        parameters = {**_ALWAYS, **(settings or {})}
        if data is not None:
            parameters["query"] = query
        body = query.encode() if data is None else data
        path = f"{urlsplit(self.config.url).path}/?{urlencode(parameters)}"
        try:
            connection = self._connected(subject)
            connection.request("POST", path, body, self._headers())
            answer = connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            self.close()
            if isinstance(error, TimeoutError):
                problem = "did not answer in time"
            else:
                reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
                problem = f"cannot be reached: {reason}"
            raise SinkUnavailable(f"{subject}: {self.where} {problem}") from error
        if answer.will_close:
            self.close()
        code = answer.getheader("X-ClickHouse-Exception-Code")
        if answer.status != http.client.OK or code is not None:
            number = int(code) if code is not None and code.isdecimal() else None
            raise failure(subject, answer.status, number, content.decode(errors="replace"))
        return content

    def end(self) -> None:
        """Refuse all further queries, and abort the one that another thread waits for.

        May be called from any thread.
        """
        self._ended = True
        connection = self._connection
        sock = None if connection is None else connection.sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Disconnect until the next query."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _connected(self, subject: str) -> http.client.HTTPConnection:
        if self._ended:
            raise SinkUnavailable(f"{subject}: closed")
        if self._connection is None:
            url = urlsplit(self.config.url)
            assert url.hostname is not None
            if self.config.secure:
                self._connection = http.client.HTTPSConnection(
                    url.hostname, url.port or 8443, timeout=self.timeout, context=self._trust()
                )
            else:
                self._connection = http.client.HTTPConnection(
                    url.hostname, url.port or 8123, timeout=self.timeout
                )
        return self._connection

    def _trust(self) -> ssl.SSLContext:
        tls = self.config.tls
        unreadable = unreadable_file({"tls.ca_file": None if tls is None else tls.ca_file})
        if unreadable is not None:
            raise SettingsError(f"sink {self.config.id}: {unreadable}")
        try:
            context = ssl.create_default_context(cafile=None if tls is None else tls.ca_file)
        except OSError as error:
            raise SettingsError(
                f"sink {self.config.id}: the file of tls.ca_file cannot be read as certificates in "
                "PEM"
            ) from error
        if tls is not None and tls.insecure_skip_verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context

    def _headers(self) -> dict[str, bytes]:
        headers = {"X-ClickHouse-User": (self.config.user or "default").encode()}
        if self.config.password is not None:
            headers["X-ClickHouse-Key"] = self.config.password.get_secret_value().encode()
        return headers


def quoted(name: str) -> str:
    """Return a name as it is written in queries."""
    escaped = name.replace("\\", "\\\\").replace("`", "\\`")
    return f"`{escaped}`"


def literal(value: str) -> str:
    """Return a text as it is written in queries."""
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def table_name(destination: tuple[str, ...]) -> str:
    """Return the name of a table as it is written in queries."""
    return ".".join(map(quoted, destination))


def failure(subject: str, status: int, code: int | None, text: str) -> DeltaforgeError:
    """Return the `DeltaforgeError` for an answer that is no success.

    Args:
        subject: The sink, or a table of it.
        status: The status of the answer.
        code: The number of the exception, None without one.
        text: Its text.
    """
    if code is None:
        return _unknown(subject, status)
    name = _NAME.search(text)
    exception = f"exception {code}" + (f" ({name[1]})" if name else "")
    if code in _LOGIN:
        return AuthFailed(
            f"{subject}: ClickHouse refuses the user or the password ({exception}); correct `user` "
            "and `password`"
        )
    if code == _DENIED:
        grant = _GRANT.search(text)
        needed = f": it needs the grant {grant[1].rstrip('.')}" if grant else ""
        return PermissionMissing(f"{subject}: the user lacks a privilege{needed} ({exception})")
    if code in _TRANSIENT:
        return SinkUnavailable(f"{subject}: ClickHouse refuses for now with {exception}")
    return TableRejected(f"{subject}: {_refused(code, text)} ({exception})")


def _unknown(subject: str, status: int) -> DeltaforgeError:
    """Return the error for an answer without an exception's number, which may be a proxy's."""
    reply = f"the server answered with status {status}"
    if status in {401, 403}:
        return AuthFailed(f"{subject}: {reply}; check `user` and `password`")
    if status in {408, 429} or status >= 500:
        return SinkUnavailable(f"{subject}: {reply}")
    return TableRejected(f"{subject}: {reply}, which is not an answer of ClickHouse; check `url`")


def _refused(code: int, text: str) -> str:
    """Return what is wrong with a table, and the remedy."""
    if code == NO_DATABASE:
        return "the database does not exist; create it with CREATE DATABASE, or correct `database`"
    if code == NO_TABLE:
        return "the table does not exist"
    if code == NULL:
        column = _COLUMN.search(text)
        where = f" {column[1]}" if column else ""
        return (
            f"a value is null, and the column{where} of the table cannot be; make it Nullable with "
            "ALTER TABLE ... MODIFY COLUMN"
        )
    return "ClickHouse refuses a statement; see the server's log"
