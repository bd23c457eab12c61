"""The seam to the databases: a session is one transaction over a file or a server.

Nothing stays open between two sessions: SQLite's files are shared with the application, and Turso lets
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
    """One transaction, which sees the database as it is at its first query."""

    def query(self, statement: str, parameters: Sequence[Value] = ()) -> list[Row]:
        """Run a statement and return its rows.

        Raises:
            SourceUnavailable: The database is locked, or the connection broke: try again.
            SourceMisconfigured: The database refuses the statement.
        """
        ...


class TursoDatabase(Protocol):
    """Where sessions begin; any thread may ask for one."""

    @property
    def where(self) -> str:
        """The file or URL, for messages; without a secret."""
        ...

    def session(
        self, seconds: float, *, write: bool = False
    ) -> AbstractContextManager[TursoSession]:
        """Begin a transaction; it is committed at the block's end, and rolled back by an error.

        Args:
            seconds: How long to wait for others that have the database locked.
            write: Take the lock for writing at once.

        Raises:
            SourceUnavailable: It is locked or cannot be reached: try again.
            SourceMisconfigured: It is no such database.
            AuthFailed: The server refused the token.
        """
        ...

    def close(self) -> None:
        """Release what is kept between sessions."""
        ...


def identifier(name: str) -> str:
    """Return a name as it stands in a statement."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """Return a text as it stands in a statement."""
    return "'" + text.replace("'", "''") + "'"
