"""Keys that are held: later changes of a row wait behind a dead letter of that row.

A key is a table and the row's key as JSON text. Some changes touch more than one: an update that
changes the key is one of the old and of the new key; a TRUNCATE is one of every key of its table. A
change waits as soon as one of its keys is held, and then its other keys are held, too, since what
follows must not overtake it. A change of a table without keys is not known to be one of any row, so it
waits for nothing but a TRUNCATE.

A key is held from the place of its first entry in the queue on: after a sink was set back, changes
from before that place pass.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from deltaforge_dagster.state.records import DeadLetterRow

Place = tuple[int, int]
"""Segment and ordinal."""


@dataclass(frozen=True, slots=True)
class Keys:
    """What a change is one of.

    Attributes:
        table: Full name of its table.
        row: The row's key, None where there is none.
        old: The key that the row had before, where an update changed it.
        whole: It is one of every row of the table.
    """

    table: str
    row: str | None
    old: str | None
    whole: bool

    @classmethod
    def of_entry(cls, entry: DeadLetterRow) -> Keys:
        """Return the keys of an entry that holds them."""
        return cls(entry.table_name, entry.row_key, entry.old_key, entry.row_key is None)

    @property
    def some(self) -> bool:
        """Whether it is known to be one of any row."""
        return self.whole or self.row is not None

    @property
    def keys(self) -> list[str]:
        """Its keys."""
        return [key for key in (self.row, self.old) if key is not None]


class HeldKeys:
    """The keys that entries of a queue hold."""

    def __init__(self, entries: Iterable[DeadLetterRow] = ()) -> None:
        self._keys: dict[str, dict[str, Place]] = {}
        self._tables: dict[str, Place] = {}
        for entry in entries:
            if entry.holds:
                self.hold((entry.segment, entry.ordinal), Keys.of_entry(entry))

    def __bool__(self) -> bool:
        """Whether any is held."""
        return bool(self._keys)

    @property
    def tables(self) -> Mapping[str, Collection[str] | None]:
        """The keys that are held of each table; None where its whole is."""
        return {
            table: None if table in self._tables else keys.keys()
            for table, keys in self._keys.items()
        }

    def hold(self, place: Place, keys: Keys) -> bool:
        """Hold what a change at a place is one of; say whether any of it was not held yet."""
        held = self._keys.setdefault(keys.table, {})
        known = len(held) + len(self._tables)
        for key in keys.keys:
            held[key] = min(place, held.get(key, place))
        if keys.whole:
            self._tables[keys.table] = min(place, self._tables.get(keys.table, place))
        return len(held) + len(self._tables) > known

    def holds(self, place: Place, keys: Keys) -> bool:
        """Say whether a change at a place must wait."""
        held = self._keys.get(keys.table, {})
        places = [held[key] for key in (held if keys.whole else keys.keys) if key in held]
        if keys.table in self._tables:
            places.append(self._tables[keys.table])
        return any(one < place for one in places)


def due_entries(entries: Iterable[DeadLetterRow], reached: Place) -> list[DeadLetterRow]:
    """Return the entries of a sink that may be delivered now, in order.

    Args:
        entries: All of the sink's, in the order of the journal.
        reached: The sink's checkpoint.
    """
    found = []
    blocked = HeldKeys()
    for entry in entries:
        place, keys = (entry.segment, entry.ordinal), Keys.of_entry(entry)
        if place > reached:
            break
        if entry.state != "dead" and not (entry.holds and blocked.holds(place, keys)):
            found.append(entry)
        elif entry.holds:
            blocked.hold(place, keys)
    return found
