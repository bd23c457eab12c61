"""Sessions with a database: a session is one transaction, on a file or a server.

No file stays open between sessions, because the application uses it, too, and Turso lets only one
process open a file at a time.

**Files** are read with Python's `sqlite3` or with Turso's own engine. A file is never created: a
missing file is a `SourceUnavailable`, like a server that does not answer. SQLite's locks let other
connections read and, in WAL mode, write at the same time. Turso locks a file while it is open, so a
session waits until no other process has it open, and no other process can open it before the
session ends.

**Servers**, libSQL's `sqld` and Turso's cloud, speak Hrana over HTTP. Specification:
github.com/tursodatabase/libsql, "The Hrana protocol specification (version 2)", "Hrana over HTTP".
Statements of one transaction are requests to `POST /v2/pipeline` that carry the *baton* of the
previous answer, and go to the `base_url` in it. Integers are sent as text, blobs as Base64::

    {"baton": null, "requests": [{"type": "execute", "stmt": {"sql": "...", "args": [...]}}, ...]}
    {"baton": "...", "base_url": null, "results": [{"type": "ok", "response": {"result": {"rows":
    ...}}}]}
"""

from __future__ import annotations

import base64
import json
import random
import sqlite3
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TypeAlias
from urllib.parse import quote

import httpx
import turso

from deltaforge_dagster.errors import (
    AuthFailed,
    CorruptLog,
    DeltaforgeError,
    PermissionMissing,
    SourceMisconfigured,
    SourceUnavailable,
)

Value: TypeAlias = int | float | str | bytes | None
"""A value of SQLite: INTEGER, REAL, TEXT (bytes if it is not UTF-8), BLOB or NULL."""

Row: TypeAlias = Sequence[Value]


class TursoSession(Protocol):
    """One transaction, which sees the database as of its first query."""

    def query(self, statement: str, parameters: Sequence[Value] = ()) -> list[Row]:
        """Run a statement and return its rows.

        Raises:
            SourceUnavailable: The database is locked, or the connection broke; try again.
            SourceMisconfigured: The database refuses the statement.
        """
        ...


class TursoDatabase(Protocol):
    """A database with which sessions can be opened; thread-safe."""

    @property
    def where(self) -> str:
        """The file or URL, for error messages; without a secret."""
        ...

    def session(
        self, seconds: float, *, write: bool = False
    ) -> AbstractContextManager[TursoSession]:
        """Begin a transaction; it is committed at the block's end, or rolled back after an error.

        Args:
            seconds: How long to wait if another connection has locked the database.
            write: Whether to take the write lock at once.

        Raises:
            SourceUnavailable: The database is locked or cannot be reached; try again.
            SourceMisconfigured: The file or server is not such a database.
            AuthFailed: The server refused the token.
        """
        ...

    def close(self) -> None:
        """Close connections that are kept between sessions."""
        ...


def identifier(name: str) -> str:
    """Return a name, quoted for a statement."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """Return a text as an SQL string literal."""
    return "'" + text.replace("'", "''") + "'"


FEATURES = "views,custom_types,index_method,generated_columns,without_rowid"
"""Experimental features of Turso that some files need to be opened; none writes anything."""

_RETRY_SECONDS = 0.03

_SQLITE_ERRORS: dict[int, type[DeltaforgeError]] = {
    sqlite3.SQLITE_BUSY: SourceUnavailable,
    sqlite3.SQLITE_LOCKED: SourceUnavailable,
    sqlite3.SQLITE_CANTOPEN: SourceUnavailable,
    sqlite3.SQLITE_IOERR: SourceUnavailable,
    sqlite3.SQLITE_FULL: SourceUnavailable,
    sqlite3.SQLITE_SCHEMA: SourceUnavailable,
    sqlite3.SQLITE_PERM: PermissionMissing,
    sqlite3.SQLITE_READONLY: PermissionMissing,
    sqlite3.SQLITE_CORRUPT: CorruptLog,
}


def written(path: Path) -> list[tuple[int, int] | None]:
    """Return when a database's file and its write-ahead log were written, and their sizes.

    None stands for a missing file. Opens nothing: Turso lets one process open a file at a time.
    """
    states: list[tuple[int, int] | None] = []
    for file in (path, path.with_name(f"{path.name}-wal")):
        try:
            status = file.stat()
        except OSError:
            states.append(None)
        else:
            states.append((status.st_mtime_ns, status.st_size))
    return states


class _DatabaseFile:
    """What `SqliteFile` and `TursoFile` have in common."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def where(self) -> str:
        """The path."""
        return str(self._path)

    def close(self) -> None:
        """Do nothing: no connection is kept between sessions."""


class SqliteFile(_DatabaseFile):
    """A database file that is read with SQLite.

    Args:
        path: The file.
    """

    @contextmanager
    def session(self, seconds: float, *, write: bool = False) -> Generator[TursoSession]:
        """Begin a transaction; see `TursoDatabase`."""
        uri = f"file:{quote(str(self._path.absolute()))}?mode=rw"
        try:
            connection = sqlite3.connect(uri, uri=True, timeout=seconds, isolation_level=None)
        except sqlite3.Error as error:
            raise _sqlite_problem(self.where, error) from error
        try:
            connection.text_factory = _text
            session = _SqliteSession(connection, self.where)
            if not write:
                session.query("PRAGMA query_only = 1")
            session.query("BEGIN IMMEDIATE" if write else "BEGIN")
            yield session
            session.query("COMMIT")
        finally:
            connection.close()


class _SqliteSession:
    def __init__(self, connection: sqlite3.Connection, where: str) -> None:
        self._connection = connection
        self._where = where

    def query(self, statement: str, parameters: Sequence[Value] = ()) -> list[Row]:
        try:
            return self._connection.execute(statement, parameters).fetchall()
        except sqlite3.Error as error:
            raise _sqlite_problem(self._where, error) from error


def _text(data: bytes) -> str | bytes:
    """Decode a TEXT value; return the bytes if it is not UTF-8, which SQLite does not check."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _sqlite_problem(where: str, error: sqlite3.Error) -> DeltaforgeError:
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    return _SQLITE_ERRORS.get(code, SourceMisconfigured)(f"{where}: {error}")


class TursoFile(_DatabaseFile):
    """A database file that is read with Turso's engine.

    Args:
        path: The file.
    """

    @contextmanager
    def session(self, seconds: float, *, write: bool = False) -> Generator[TursoSession]:
        """Begin a transaction; see `TursoDatabase`."""
        connection = self._open(seconds)
        try:
            session = _TursoSession(connection, self.where)
            ((journal,),) = session.query("PRAGMA journal_mode")
            if journal != "wal":
                raise SourceMisconfigured(
                    f"{self.where}: journal mode {journal!s}: with concurrent writers changes do"
                    " not become visible in the order of their numbers, so that some would be"
                    " passed over"
                )
            session.query("BEGIN IMMEDIATE" if write else "BEGIN")
            yield session
            session.query("COMMIT")
        finally:
            with suppress(turso.Error):
                connection.close()

    def _open(self, seconds: float) -> turso.Connection:
        deadline = time.monotonic() + seconds
        while True:
            if not self._path.is_file():
                raise SourceUnavailable(f"{self.where}: there is no such file")
            try:
                return turso.connect(
                    str(self._path), isolation_level=None, experimental_features=FEATURES
                )
            except turso.Error as error:
                problem = _turso_problem(self.where, error)
                if not isinstance(problem, SourceUnavailable) or time.monotonic() >= deadline:
                    raise problem from error
            time.sleep(random.uniform(0.5, 1.5) * _RETRY_SECONDS)  # noqa: S311 - only a wait


class _TursoSession:
    def __init__(self, connection: turso.Connection, where: str) -> None:
        self._connection = connection
        self._where = where

    def query(self, statement: str, parameters: Sequence[Value] = ()) -> list[Row]:
        try:
            return self._connection.execute(statement, tuple(parameters)).fetchall()
        except turso.Error as error:
            raise _turso_problem(self._where, error) from error


def _turso_problem(where: str, error: Exception) -> DeltaforgeError:
    """Return our error for an error of Turso's engine, by its text: it has no error codes."""
    text = str(error)
    lowered = text.lower()
    if "lock" in lowered or "busy" in lowered:
        return SourceUnavailable(f"{where}: {text}")
    if "i/o error" in lowered or "no such file" in lowered:
        return SourceUnavailable(f"{where}: {text}")
    if "corrupt" in lowered:
        return CorruptLog(f"{where}: {text}")
    return SourceMisconfigured(f"{where}: {text}")


_REQUEST_SECONDS = 30.0
_TOO_LARGE = "RESPONSE_TOO_LARGE"
_TRANSIENT = ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_IOERR", "TRANSACTION", "STREAM", "BATON")
_NOT_ALLOWED = ("SQLITE_READONLY", "SQLITE_AUTH", "SQLITE_PERM", "BLOCKED", "AUTH")


class ResponseTooLarge(SourceMisconfigured):
    """The server refuses an answer of that size: request fewer rows."""


class HranaDatabase:
    """A database on a server.

    Args:
        url: `https://host:port/path`, without a trailing slash.
        token: The authentication token; None for a server without authentication.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        self._url = url
        self._headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self._lock = threading.Lock()
        self._client: httpx.Client | None = None

    @property
    def where(self) -> str:
        """The URL."""
        return self._url

    @contextmanager
    def session(self, seconds: float, *, write: bool = False) -> Generator[TursoSession]:
        """Begin a transaction; see `TursoDatabase`."""
        session = _HranaSession(self, min(max(seconds, 1.0), _REQUEST_SECONDS))
        try:
            session.query("BEGIN IMMEDIATE" if write else "BEGIN")
            yield session
            session.query("COMMIT")
        finally:
            session.close()

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def post(
        self, base: str, requests: list[dict[str, Any]], baton: str | None, seconds: float
    ) -> Any:
        """Send requests of one stream, and return the answer's JSON.

        Raises:
            DeltaforgeError: The server cannot be reached, or refuses the HTTP request.
        """
        try:
            answer = self._connected().post(
                f"{base}/v2/pipeline",
                json={"baton": baton, "requests": requests},
                headers=self._headers,
                timeout=seconds,
            )
        except (httpx.HTTPError, RuntimeError) as error:  # RuntimeError: closed meanwhile
            raise SourceUnavailable(f"{self.where}: {type(error).__name__}: {error}") from error
        if answer.status_code != httpx.codes.OK:
            raise self._refusal(answer)
        try:
            return json.loads(answer.content)
        except ValueError as error:
            raise SourceMisconfigured(f"{self.where}: the answer is not Hrana's") from error

    def _connected(self) -> httpx.Client:
        with self._lock:
            if self._client is None:
                self._client = httpx.Client(follow_redirects=False)
            return self._client

    def _refusal(self, answer: httpx.Response) -> DeltaforgeError:
        text = f"{self.where}: HTTP {answer.status_code} {answer.reason_phrase}"
        with suppress(ValueError, AttributeError):
            details = json.loads(answer.content)
            text += f": {details.get('message') or details.get('error') or ''}".rstrip(": ")
        if answer.status_code in {401, 403}:
            return AuthFailed(f"{text} (source.config.auth_token)")
        if answer.status_code in {408, 429} or answer.status_code >= 500:
            return SourceUnavailable(text)
        # 400 may mean that the baton has expired: the transaction is lost, but a new one may
        # succeed.
        return (
            SourceUnavailable(text)
            if answer.status_code == httpx.codes.BAD_REQUEST
            else SourceMisconfigured(text)
        )


class _HranaSession:
    def __init__(self, database: HranaDatabase, seconds: float) -> None:
        self._database = database
        self._seconds = seconds
        self._base = database.where
        self._baton: str | None = None

    def query(self, statement: str, parameters: Sequence[Value] = ()) -> list[Row]:
        arguments = [_argument(parameter) for parameter in parameters]
        request = {"type": "execute", "stmt": {"sql": statement, "args": arguments}}
        answer = self._database.post(self._base, [request], self._baton, self._seconds)
        try:
            self._baton = answer["baton"]
            self._base = (answer.get("base_url") or self._base).rstrip("/")
            (result,) = answer["results"]
            if result["type"] == "error":
                raise self._problem(result["error"])
            return [[_value(cell) for cell in row] for row in result["response"]["result"]["rows"]]
        except (KeyError, TypeError, ValueError) as error:
            where = self._database.where
            raise SourceMisconfigured(f"{where}: the answer is not Hrana's") from error

    def close(self) -> None:
        """Close the stream on the server, which rolls back an open transaction."""
        if self._baton is not None:
            with suppress(DeltaforgeError):
                self._database.post(self._base, [{"type": "close"}], self._baton, self._seconds)
            self._baton = None

    def _problem(self, error: dict[str, Any]) -> DeltaforgeError:
        code = str(error.get("code") or "")
        text = f"{self._database.where}: {error.get('message')}" + (f" ({code})" if code else "")
        if code == _TOO_LARGE or "too large" in text:
            return ResponseTooLarge(text)
        if any(word in code for word in _TRANSIENT):
            return SourceUnavailable(text)
        if any(word in code for word in _NOT_ALLOWED):
            return PermissionMissing(text)
        return SourceMisconfigured(text)


def _argument(value: Value) -> dict[str, Any]:
    match value:
        case None:
            return {"type": "null"}
        case int():
            return {"type": "integer", "value": str(value)}
        case float():
            return {"type": "float", "value": value}
        case str():
            return {"type": "text", "value": value}
        case bytes():
            return {"type": "blob", "base64": base64.b64encode(value).decode()}


def _value(cell: dict[str, Any]) -> Value:
    match cell["type"]:
        case "null":
            return None
        case "integer":
            return int(cell["value"])
        case "float":
            return float(cell["value"])
        case "text":
            return str(cell["value"])
        case "blob":
            text = str(cell["base64"])
            return base64.b64decode(text + "=" * (-len(text) % 4))  # it may come without padding
    raise ValueError("a value of an unknown type")
