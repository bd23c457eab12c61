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

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.processors.messages.expansion import changed_keys
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


COLUMNS = ["ordinal", "op", "db", "schema", "table", "before", "key"]
"""Columns of the change frame that tell a change's keys."""

_Mask = npt.NDArray[np.bool_]


def waiting(held: HeldKeys, segment: int, rows: pa.RecordBatch) -> list[int]:
    """Return which rows wait, by their index; what else they touch is held from then on.

    Args:
        held: What is held.
        segment: Of the rows.
        rows: Changes in order, with the columns `COLUMNS`.
    """
    found: list[int] = []
    start: int | None = 0
    while start is not None:
        start = _wait_from(start, held, segment, rows, found)
    return found


def _wait_from(
    start: int, held: HeldKeys, segment: int, rows: pa.RecordBatch, found: list[int]
) -> int | None:
    """Find the rows that wait, up to one that holds more; return what comes after it."""
    candidates = start + np.flatnonzero(_candidates(held, rows.slice(start)))
    for index, keys in zip(candidates.tolist(), keys_of(rows, candidates), strict=True):
        place = (segment, cast("int", rows.column("ordinal")[index].as_py()))
        if held.holds(place, keys):
            found.append(index)
            if held.hold(place, keys):
                return int(index) + 1
    return None


def _candidates(held: HeldKeys, rows: pa.RecordBatch) -> _Mask:
    """Return the rows that may have to wait: all that must, and few others."""
    chosen = np.zeros(rows.num_rows, np.bool_)
    names = full_names(rows)
    moved, _ = changed_keys(rows)
    for table, keys in held.tables.items():
        here = _mask(pc.equal(names, pa.scalar(table)))
        if keys is not None and here.any():
            some = _mask(pc.is_in(rows.column("key"), value_set=pa.array(list(keys), pa.string())))
            some |= _mask(pc.equal(rows.column("op").cast(pa.string()), pa.scalar("t")))
            some[moved] = True
            here &= some
        chosen |= here
    return chosen


def keys_of(rows: pa.RecordBatch, some: Sequence[int] | npt.NDArray[np.int64]) -> list[Keys]:
    """Return the keys of some changes, given by their index, with the columns `COLUMNS`."""
    chosen = rows.take(pa.array(some, pa.int64()))
    moved, old = changed_keys(chosen)
    before = dict(zip(moved.tolist(), old.to_pylist(), strict=True))
    tables = cast("list[str]", full_names(chosen).to_pylist())
    ops, keys = chosen.column("op").to_pylist(), chosen.column("key").to_pylist()
    return [
        Keys(table, key, before.get(index), key is None and op == "t")
        for index, (table, op, key) in enumerate(zip(tables, ops, keys, strict=True))
    ]


def full_names(rows: pa.RecordBatch) -> pa.StringArray:
    """Return the full name of each change's table: `schema.table`, or `db.table` without schemas."""
    schema, db, table = (rows.column(name).cast(pa.string()) for name in ("schema", "db", "table"))
    dot: Any = "."
    return cast("pa.StringArray", pc.binary_join_element_wise(pc.coalesce(schema, db), table, dot))


def _mask(values: Any) -> _Mask:
    return cast("_Mask", values.fill_null(fill_value=False).to_numpy(zero_copy_only=False).copy())
