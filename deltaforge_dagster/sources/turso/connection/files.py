"""Databases in files, read with Python's `sqlite3` or with Turso's own engine.

A file is never created: a missing file is a `SourceUnavailable`, like a server that does not
answer. SQLite's locks let other connections read and, in WAL mode, write at the same time. Turso
locks a file while it is open, so a session waits until no other process has it open, and no other
process can open it before the session ends.
"""

from __future__ import annotations

import random
import sqlite3
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

import turso

from deltaforge_dagster.errors import (
    CorruptLog,
    DeltaforgeError,
    PermissionMissing,
    SourceMisconfigured,
    SourceUnavailable,
)
from deltaforge_dagster.sources.turso.connection.sessions import Row, TursoSession, Value

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
        """Begin a transaction; see `sessions.TursoDatabase`."""
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
        """Begin a transaction; see `sessions.TursoDatabase`."""
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
