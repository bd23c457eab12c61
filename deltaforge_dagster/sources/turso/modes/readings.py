"""What the three ways of finding changes have in common: a reading of them, step by step.

`NativeReading`, `TriggerReading` and `PollingReading` each remember how far they have come. A step is
taken in one session, which it leaves with everything that it needs; batches are made afterwards, when the
database is free again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from deltaforge_dagster.sources.base import HeldEvent, SourceNotes
from deltaforge_dagster.sources.turso.connection.sessions import TursoSession
from deltaforge_dagster.sources.turso.decode.changes import TursoChange
from deltaforge_dagster.sources.turso.position import TursoPosition


@dataclass(frozen=True, slots=True)
class Part:
    """Changes in the database's order.

    Attributes:
        changes: They.
        end: Where a segment may end behind them; None inside a transaction.
        reached: How far the reading has come with them.
        held: Events that are to be kept back.
    """

    changes: Sequence[TursoChange]
    end: TursoPosition | None
    reached: TursoPosition
    held: tuple[HeldEvent, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """What one look has found.

    Attributes:
        parts: Changes.
        more: There may be more to read at once.
        read_bytes: How much was read, roughly.
    """

    parts: list[Part] = field(default_factory=list)
    more: bool = False
    read_bytes: int = 0


class Reading(Protocol):
    """A reading from some position on."""

    def step(self, session: TursoSession, limit: int) -> Step:
        """Read the next changes, so many at most.

        Raises:
            PositionLost: What follows the position cannot be read any more.
            UnsupportedEvent: Something is not understood; nothing is passed over.
        """
        ...


class ChangeLog(Protocol):
    """One way of finding changes; remembers nothing."""

    def newest(self, session: TursoSession) -> TursoPosition:
        """Return the newest position now."""
        ...

    def start(self, session: TursoSession) -> TursoPosition:
        """Return where a new pipeline begins."""
        ...

    def check(self, session: TursoSession, position: TursoPosition) -> None:
        """Make sure that everything after a position can be read.

        Raises:
            PositionLost: Not everything.
        """
        ...

    def has_changes(self, session: TursoSession, after: TursoPosition) -> bool:
        """Say whether a captured table changed after a position."""
        ...

    def reading(self, start: TursoPosition, notes: SourceNotes) -> Reading:
        """Begin to read what follows a position."""
        ...
