"""What is kept of a table beside the log of its versions (`schemas`).

A value of the KV namespace of the registry, under the table's key: the JSON object
`{in_force: [[position, sequence], ...], pending: [sequence, ...]}`. `in_force` says from which
position of the log on rows had which version, `pending` which versions wait for approval.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import orjson
from sqlalchemy import Connection, select

from deltaforge_dagster.positions import Position, parse_position
from deltaforge_dagster.state.primitives import get_value, put_value
from deltaforge_dagster.state.tables import kv


@dataclass(frozen=True, slots=True)
class Marker:
    """Which versions of a table were in force where, and which wait for approval."""

    in_force: tuple[tuple[str, int], ...] = ()
    pending: frozenset[int] = frozenset()

    def reached(self, position: str, sequence: int) -> Marker:
        """Return the marker once rows at a position (JSON text) have a version.

        What was noted for later positions is dropped: the log is being read again from before
        them. The same note twice is one, wherever in between a reader died.
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
        """Return the marker with one more version that waits for approval."""
        return replace(self, pending=self.pending | {sequence})

    def approved(self) -> Marker:
        """Return the marker with nothing that waits."""
        return replace(self, pending=frozenset())


def read(connection: Connection, namespace: str, key: str) -> Marker | None:
    """Return a table's marker, None when there is none."""
    value = get_value(connection, namespace, key)
    return None if value is None else _parse(value)


def read_all(connection: Connection, namespace: str) -> dict[str, Marker]:
    """Return the markers of all tables by key."""
    query = select(kv.c.key, kv.c.val).where(kv.c.ns == namespace)
    return {key: _parse(value) for key, value in connection.execute(query)}


def write(connection: Connection, namespace: str, key: str, marker: Marker) -> None:
    """Keep a table's marker."""
    fields = {"in_force": marker.in_force, "pending": sorted(marker.pending)}
    put_value(connection, namespace, key, orjson.dumps(fields))


def _parse(value: bytes) -> Marker:
    fields = orjson.loads(value)
    notes = tuple((position, sequence) for position, sequence in fields["in_force"])
    return Marker(notes, frozenset(fields["pending"]))


def _position(note: tuple[str, int]) -> Position:
    return parse_position(note[0])
