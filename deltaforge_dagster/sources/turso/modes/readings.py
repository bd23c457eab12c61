"""The interfaces of the three modes: a log of changes, and a reading of it, step by step.

`NativeReading`, `TriggerReading` and `PollingReading` keep their position. A step reads everything
that it needs in one session; batches are made afterwards, when the database is unlocked again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from deltaforge_dagster.sources.base import HeldEvent, SourceNotes
from deltaforge_dagster.sources.turso.connection.sessions import TursoSession, identifier
from deltaforge_dagster.sources.turso.decode.changes import TursoChange
from deltaforge_dagster.sources.turso.position import TursoPosition


@dataclass(frozen=True, slots=True)
class Part:
    """Changes in the database's order.

    Attributes:
        changes: The changes.
        end: The position after them, at which a segment may end; None inside a transaction.
        reached: The position of the reading after them.
        held: Events that must be held.
    """

    changes: Sequence[TursoChange]
    end: TursoPosition | None
    reached: TursoPosition
    held: tuple[HeldEvent, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """The result of one poll.

    Attributes:
        parts: The changes.
        more: Whether there may be more changes, so that the next poll should follow at once.
        read_bytes: Approximate number of bytes read.
    """

    parts: list[Part] = field(default_factory=list)
    more: bool = False
    read_bytes: int = 0


class Reading(Protocol):
    """Reads changes from a position on, and keeps its position."""

    def step(self, session: TursoSession, limit: int) -> Step:
        """Read the next changes, at most `limit` (in mode `polling`, of each table).

        Raises:
            PositionLost: Changes after the position no longer exist.
            UnsupportedEvent: A change cannot be decoded; nothing is skipped.
        """
        ...


class ChangeLog(Protocol):
    """A mode of finding changes; stateless."""

    def newest(self, session: TursoSession) -> TursoPosition:
        """Return the newest position."""
        ...

    def start(self, session: TursoSession) -> TursoPosition:
        """Return the position at which a new pipeline begins."""
        ...

    def check(self, session: TursoSession, position: TursoPosition) -> None:
        """Check that all changes after a position still exist, as far as the mode can tell.

        Raises:
            PositionLost: They do not.
        """
        ...

    def has_changes(self, session: TursoSession, after: TursoPosition) -> bool:
        """Return whether a captured table has changes after a position."""
        ...

    def reading(self, start: TursoPosition, notes: SourceNotes) -> Reading:
        """Return a reading of the changes after a position."""
        ...


_SAMPLE = 100


def mean_bytes(session: TursoSession, table: str, number: str, before: str, after: str) -> float:
    """Return the mean size of the images in the newest rows of a change table; 0 if it is empty.

    Args:
        session: A session.
        table: The change table.
        number: The column that numbers its rows.
        before: A column with an image of the row.
        after: The column with the other image.
    """
    sizes = " + ".join(f"coalesce(length({identifier(name)}), 0)" for name in (before, after))
    ((mean,),) = session.query(
        f"SELECT avg(size) FROM (SELECT {sizes} AS size"  # noqa: S608 - names are quoted
        f" FROM {identifier(table)} ORDER BY {identifier(number)} DESC LIMIT {_SAMPLE})"
    )
    return float(mean) if isinstance(mean, int | float) else 0.0
