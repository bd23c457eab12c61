"""The interface to databases: a session is one transaction on a file or a server.

No file stays open between sessions, because the application uses it, too, and Turso lets
only one process open a file at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeAlias

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
