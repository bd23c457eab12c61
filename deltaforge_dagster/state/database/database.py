"""The state store's database: connections, transactions, clock, and translated errors.

========== ===========================================================================
SQLite     one file, WAL, `synchronous=FULL`: a commit is on disk when it returns. Writes
           start with `BEGIN IMMEDIATE`, so what a transaction has read is still true when
           it writes (SQLite manual, "Transactions" and "Write-Ahead Logging")
PostgreSQL psycopg; a dead connection is replaced at the next call. The server ends a
           transaction that its client leaves idle, so a stalled process cannot keep a
           lock forever. Statements are never sent in pipeline mode, because a session
           does not count as idle while a pipeline is unfinished
memory     SQLite in memory: one connection for all threads of one process
========== ===========================================================================

Threads of one process take turns (`Turns`) where SQLite admits only one at a time: for writes, and
in memory also for reads.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import (
    URL,
    Connection,
    Double,
    Engine,
    Table,
    create_engine,
    event,
    make_url,
    select,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.exc import IntegrityError as SqlIntegrityError
from sqlalchemy.exc import ProgrammingError as SqlProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.pool import QueuePool, StaticPool
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from deltaforge_dagster.config.secrets import mask
from deltaforge_dagster.errors import (
    AuthFailed,
    DeltaforgeError,
    PermissionMissing,
    SettingsError,
    StoreLost,
    StoreUnavailable,
    Terminal,
)

_Turn = Callable[[], AbstractContextManager[None]]

_BUSY_SECONDS = 10
"""How long a call waits for another writer; well below the duration of a lease."""

_POSTGRES_OPTIONS = {
    "application_name": "deltaforge",
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
}

_POSTGRES_SESSION = (
    f"SET lock_timeout = '{_BUSY_SECONDS}s'; "
    "SET statement_timeout = '60s'; "
    "SET idle_in_transaction_session_timeout = '15s'; "
    # A source discards what is committed here. A server that acknowledges commits before they are
    # on disk could lose them in a crash. Settings stronger than `on` are kept.
    "SELECT set_config('synchronous_commit', 'on', false)"
    " WHERE current_setting('synchronous_commit') = 'off'"
)


class clock(FunctionElement[float]):  # noqa: N801, it reads as the SQL function it stands for
    """The database's current time in seconds since 1970, when it is evaluated, not at `BEGIN`."""

    type = Double()
    inherit_cache = True


@compiles(clock, "sqlite")
def _sqlite_clock(_element: clock, _compiler: SQLCompiler, **_: Any) -> str:
    # 2440587.5 is the Julian day on which 1970 began.
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(clock, "postgresql")
def _postgresql_clock(_element: clock, _compiler: SQLCompiler, **_: Any) -> str:
    return "CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS DOUBLE PRECISION)"


def upsert(connection: Connection, table: Table) -> sqlite.Insert | postgresql.Insert:
    """Return an `INSERT` that supports `on_conflict_do_nothing` and `on_conflict_do_update`."""
    if connection.dialect.name == "postgresql":
        return postgresql.insert(table)
    return sqlite.insert(table)


class Database:
    """The engine of one state store. Thread-safe; belongs to the process that opened it.

    Attributes:
        where: Name of the database in messages: its file or URL, without a password.
        url: What it was opened with, without a password.
    """

    def __init__(self, url: str) -> None:
        """Prepare the engine for `url`, without connecting.

        Args:
            url: `memory`, `sqlite:///path` or `postgresql://...`.

        Raises:
            SettingsError: The URL has none of these forms.
            StoreUnavailable: The SQLite file or its directory cannot be created.
        """
        self._password: str | None = None
        self._readers: _Turn = nullcontext
        self._writers: _Turn = nullcontext
        self._file: _File | None = None
        if url == "memory":
            self.where = self.url = "memory"
            self._engine = _sqlite_engine(None)
            self._readers = self._writers = Turns(self.where, _BUSY_SECONDS).turn
            return
        parsed = _parse(url)
        self.url = parsed.render_as_string(hide_password=True)
        if parsed.get_backend_name() == "sqlite":
            path = Path(parsed.database or "").absolute()
            self.where = str(path)
            self._file = _File(path)
            self._engine = _sqlite_engine(path)
            self._writers = Turns(self.where, _BUSY_SECONDS).turn
        else:
            self.where = mask(parsed.render_as_string(hide_password=True))
            self._password = parsed.password
            self._engine = _postgres_engine(parsed)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Yield a connection for reading only.

        Raises:
            StoreLost: The file that was opened no longer exists. `write` raises it as well.
        """
        with self._translated(self._readers), self._engine.connect() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Yield a connection in a transaction: committed at the end, rolled back on any error.

        After `StoreUnavailable` the transaction may or may not have been committed (the answer
        to a COMMIT can get lost), so the block should be safe to repeat. Do not open a second
        transaction of the same database inside the block.
        """
        with self._translated(self._writers), self._engine.connect() as connection:
            connection.execution_options(immediate=True)
            with connection.begin():
                yield connection

    def now(self) -> float:
        """Return the database's time in seconds since 1970."""
        with self.read() as connection:
            return float(connection.execute(select(clock())).scalar_one())

    def close(self) -> None:
        """Close all connections that are not in use; a memory database is lost."""
        self._engine.dispose()

    @contextmanager
    def _translated(self, turn: _Turn) -> Iterator[None]:
        if self._file is not None:
            self._file.check()
        try:
            with turn():
                yield
        except DBAPIError as error:
            raise self._translate(error) from error
        except PoolTimeoutError as error:
            raise StoreUnavailable(f"state store {self.where}: {_reason(error)}") from error

    def _translate(self, error: DBAPIError) -> DeltaforgeError:
        reason = _reason(error.orig or error)
        if self._password:
            reason = reason.replace(self._password, "***")
        kind, remedy = _diagnosis(error, reason)
        return kind(f"state store {self.where}: {mask(reason)}{remedy}")


class Turns:
    """A first-come, first-served lock; it is not reentrant.

    Python's lock, like SQLite's, may be acquired by a busy thread again and again while others
    starve. In a run, one thread captures as fast as it can while others deliver.

    Args:
        where: Name of the protected database in messages.
        timeout: Seconds that a thread waits for its turn.
    """

    def __init__(self, where: str, timeout: float) -> None:
        self._where = where
        self._timeout = timeout
        self._mutex = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Lock] = deque()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the lock within the block, after waiting for the threads before this one.

        Raises:
            StoreUnavailable: The wait took too long; this thread has left the queue.
        """
        self._take()
        try:
            yield
        finally:
            self._pass_on()

    def _take(self) -> None:
        with self._mutex:
            if not self._taken:
                self._taken = True
                return
            ticket = threading.Lock()
            ticket.acquire()
            self._waiting.append(ticket)
        if ticket.acquire(timeout=self._timeout):  # released by whoever passes the turn on
            return
        with self._mutex:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
                raise StoreUnavailable(
                    f"state store {self._where}: other threads have used it for {self._timeout} s"
                )
        # The turn was passed to this thread after the timeout, before it got the mutex.

    def _pass_on(self) -> None:
        with self._mutex:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False


def _diagnosis(error: DBAPIError, reason: str) -> tuple[type[DeltaforgeError], str]:
    """Return the error class for a database error, and the remedy to append to its message."""
    # SQLSTATEs: PostgreSQL manual, appendix A. Errors of refused connections carry none.
    if getattr(error.orig, "sqlstate", None) == "42501":
        return (
            PermissionMissing,
            "; the role must own the store's tables, or may CREATE in the schema",
        )
    if isinstance(error, SqlIntegrityError | SqlProgrammingError):
        return Terminal, _FOREIGN_TABLES
    for words, kind, remedy in _DIAGNOSES:
        if words in reason:
            return kind, remedy
    return StoreUnavailable, ""


_FOREIGN_TABLES = "; the tables are not as this release made them"

_FULL = "; free space there: work is suspended until then, and continues by itself afterwards"

# Matched by words: SQLite's error codes are too coarse in Python 3.11, and libpq has none before a
# connection is established.
_DIAGNOSES: tuple[tuple[str, type[DeltaforgeError], str], ...] = (
    ("password authentication failed", AuthFailed, "; check DELTAFORGE_STATE_URL"),
    ("no password supplied", AuthFailed, "; check DELTAFORGE_STATE_URL"),
    ('" does not exist', SettingsError, "; create it, or correct DELTAFORGE_STATE_URL"),
    ("is not a database", SettingsError, "; DELTAFORGE_STATE_URL names another kind of file"),
    ("malformed", Terminal, "; the file is damaged: restore it from a backup"),
    ("no such ", Terminal, _FOREIGN_TABLES),
    ("disk is full", StoreUnavailable, _FULL),
    ("No space left", StoreUnavailable, _FULL),
    ("is locked", StoreUnavailable, f": another process has been writing for {_BUSY_SECONDS} s"),
)


def _parse(url: str) -> URL:
    try:
        parsed = make_url(url.replace("postgres://", "postgresql://", 1))
    except (ArgumentError, ValueError):  # ValueError: the port is not a number
        parsed = None
    if parsed is not None and parsed.get_backend_name() == "postgresql":
        return parsed.set(drivername="postgresql+psycopg")
    if parsed is not None and parsed.drivername == "sqlite":
        if parsed.database and parsed.database != ":memory:":
            return parsed
        raise SettingsError("the state URL names no SQLite file; write `memory` for one in memory")
    # The URL may contain a password, so the message does not repeat it.
    raise SettingsError(
        "the state URL is none of `memory`, `sqlite:///path` and "
        "`postgresql://user:password@host/db`"
    )


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


class _File:
    """The file of a SQLite store, created if missing, and identified by device and inode.

    SQLite continues to use a file that has been removed: later writes are lost when the last
    process closes it. Meanwhile, new connections would create a new, empty file.
    """

    def __init__(self, path: Path) -> None:
        # Some tables hold row values (dead letters), so only the owner may read the file. SQLite
        # gives its -wal and -shm files the mode of the main file.
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            self._identity = self._read_identity()
        except OSError as error:
            raise StoreUnavailable(
                f"state store {path}: {error.strerror}; DELTAFORGE_HOME must be a directory that "
                "this user may write to, or DELTAFORGE_STATE_URL name another place"
            ) from error

    def check(self) -> None:
        """Raise `StoreLost` unless the file is the one that was opened."""
        try:
            identity = self._read_identity()
        except FileNotFoundError:
            identity = None
        except OSError:  # SQLite will report the problem
            return
        if identity != self._identity:
            raise StoreLost(
                f"state store {self._path}: the file was "
                f"{'removed' if identity is None else 'replaced'} while this process worked with "
                "it, so it ends; bring the file back (deltaforge state restore), then start again"
            )

    def _read_identity(self) -> tuple[int, int]:
        stat = self._path.stat()
        return stat.st_dev, stat.st_ino


def _begin(connection: Connection) -> None:
    immediate = connection.get_execution_options().get("immediate", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")


def _configure_sqlite(connection: sqlite3.Connection, _record: object) -> None:
    connection.isolation_level = None  # `_begin` sends BEGIN
    connection.execute(f"PRAGMA busy_timeout = {_BUSY_SECONDS * 1000}")
    connection.execute("PRAGMA synchronous = FULL")
    # busy_timeout does not apply when two processes switch a new file to WAL at the same time.
    deadline = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            return


def _sqlite_engine(path: Path | None) -> Engine:
    engine = create_engine(
        URL.create("sqlite", database=None if path is None else str(path)),
        poolclass=StaticPool if path is None else QueuePool,
        # The pool, or `Turns`, gives it to one thread at a time.
        connect_args={"check_same_thread": False},
        hide_parameters=True,  # errors are logged; parameters may be rows or secrets
    )
    event.listen(engine, "connect", _configure_sqlite)
    event.listen(engine, "begin", _begin)
    return engine


def _configure_postgres(connection: Any, _record: object) -> None:
    connection.execute(_POSTGRES_SESSION)
    connection.commit()


def _execute_one_by_one(
    cursor: Any, statement: str, parameters: Sequence[Any], _context: object
) -> Literal[True]:
    """Execute a statement for each set of parameters; INSERTs come here with many rows in each.

    psycopg's `executemany` would send them in pipeline mode. If the process is frozen amid a
    pipeline, the server waits for the next message without a limit:
    `idle_in_transaction_session_timeout` applies only after a synchronization.
    """
    for values in parameters:
        cursor.execute(statement, values)
    return True


def _postgres_engine(url: URL) -> Engine:
    options = {key: value for key, value in _POSTGRES_OPTIONS.items() if key not in url.query}
    engine = create_engine(
        url,
        pool_pre_ping=True,
        pool_timeout=_BUSY_SECONDS,
        connect_args=options,
        hide_parameters=True,
    )
    engine.dialect.use_insertmanyvalues_wo_returning = True
    event.listen(engine, "connect", _configure_postgres)
    event.listen(engine, "do_executemany", _execute_one_by_one)
    return engine
