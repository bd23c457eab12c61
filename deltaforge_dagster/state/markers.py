"""Markers of tables, stored next to the log of their versions (`schemas`).

A marker is a value in the key-value namespace of the registry, under the table's key: the JSON object
`{in_force: [[position, sequence], ...], pending: [sequence, ...]}`. `in_force` lists the positions of
the source's log from which each version applies, `pending` the versions that wait for approval.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import orjson
from sqlalchemy import Connection, select

from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.registry import parse_position
from deltaforge_dagster.state.primitives import get_value, put_value
from deltaforge_dagster.state.tables import kv


@dataclass(frozen=True, slots=True)
class Marker:
    """Where each version of a table was in force, and which versions wait for approval."""

    in_force: tuple[tuple[str, int], ...] = ()
    pending: frozenset[int] = frozenset()

    def reached(self, position: str, sequence: int) -> Marker:
        """Return the marker with a version in force from a position (JSON text) on.

        Entries for later positions are dropped, because the log is being read again from an earlier
        one. Adding the same entry again, after a run died, has no other effect.
        """
        at: Position = parse_position(position)
        notes = [one for one in self.in_force if not at < _position(one)]
        again = (position, sequence)
        if again in notes:
            del notes[notes.index(again) + 1 :]
        elif not notes or notes[-1][1] != sequence:
            notes.append(again)
        return replace(self, in_force=tuple(notes))

    def waiting_for(self, sequence: int) -> Marker:
        """Return the marker with another version that waits for approval."""
        return replace(self, pending=self.pending | {sequence})

    def approved(self) -> Marker:
        """Return the marker with no version waiting."""
        return replace(self, pending=frozenset())


def read(connection: Connection, namespace: str, key: str) -> Marker | None:
    """Return a table's marker, or None if there is none."""
    value = get_value(connection, namespace, key)
    return None if value is None else _parse(value)


def read_all(connection: Connection, namespace: str) -> dict[str, Marker]:
    """Return the markers of all tables by key."""
    query = select(kv.c.key, kv.c.val).where(kv.c.ns == namespace)
    return {key: _parse(value) for key, value in connection.execute(query)}


def write(connection: Connection, namespace: str, key: str, marker: Marker) -> None:
    """Store a table's marker."""
    fields = {"in_force": marker.in_force, "pending": sorted(marker.pending)}
    put_value(connection, namespace, key, orjson.dumps(fields))


def _parse(value: bytes) -> Marker:
    fields = orjson.loads(value)
    notes = tuple((position, sequence) for position, sequence in fields["in_force"])
    return Marker(notes, frozenset(fields["pending"]))


def _position(note: tuple[str, int]) -> Position:
    return parse_position(note[0])
