"""Keys that are blocked: later changes of a row wait behind a dead letter of that row.

A key is a table and the row's key as JSON text. Some changes touch several keys: an update that
changes the key touches the old and the new one; a TRUNCATE touches every key of its table. A change
waits if one of its keys is blocked, and then its other keys are blocked as well, since later
changes must not overtake it. A change of a table without a primary key cannot be assigned to a row,
so it waits only behind a TRUNCATE.

A key is blocked from the offset of its first entry in the queue: if a sink's checkpoint was moved
back, changes before that offset pass.
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
"""The offset of a change in the journal: segment and ordinal."""


COLUMNS = ["ordinal", "op", "db", "schema", "table", "before", "key"]
"""Columns of the change frame from which a change's keys are derived."""

_Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys that a change touches.

    Attributes:
        table: Full name of its table.
        row: The row's key, None if there is none.
        old: The row's previous key, if an update changed it.
        whole: Whether the change touches every row of the table.
    """

    table: str
    row: str | None
    old: str | None
    whole: bool

    @classmethod
    def of_entry(cls, letter: DeadLetterRow) -> Keys:
        """Return the keys that an entry of the queue touches."""
        return cls(letter.table_name, letter.row_key, letter.old_key, letter.row_key is None)

    @property
    def some(self) -> bool:
        """Whether the rows that the change touches can be identified."""
        return self.whole or self.row is not None

    @property
    def keys(self) -> list[str]:
        """The row's key and its previous one, as far as there are any."""
        return [key for key in (self.row, self.old) if key is not None]


class BlockedKeys:
    """The keys that entries of a dead-letter queue block."""

    def __init__(self, entries: Iterable[DeadLetterRow] = ()) -> None:
        self._keys: dict[str, dict[str, Place]] = {}
        self._tables: dict[str, Place] = {}
        for letter in entries:
            if letter.holds:
                self.hold((letter.segment, letter.ordinal), Keys.of_entry(letter))

    def __bool__(self) -> bool:
        """Whether any key is blocked."""
        return bool(self._keys)

    @property
    def tables(self) -> Mapping[str, Collection[str] | None]:
        """The blocked keys of each table; None if the whole table is blocked."""
        return {
            table: None if table in self._tables else keys.keys()
            for table, keys in self._keys.items()
        }

    def hold(self, offset: Place, keys: Keys) -> bool:
        """Block the keys of a change at an offset; return whether any was not blocked yet."""
        blocked = self._keys.setdefault(keys.table, {})
        before = len(blocked) + len(self._tables)
        for key in keys.keys:
            blocked[key] = min(offset, blocked.get(key, offset))
        if keys.whole:
            self._tables[keys.table] = min(offset, self._tables.get(keys.table, offset))
        return len(blocked) + len(self._tables) > before

    def holds(self, offset: Place, keys: Keys) -> bool:
        """Return whether a change at an offset must wait."""
        blocked = self._keys.get(keys.table, {})
        starts = [blocked[key] for key in (blocked if keys.whole else keys.keys) if key in blocked]
        if keys.table in self._tables:
            starts.append(self._tables[keys.table])
        return any(start < offset for start in starts)


def due_entries(entries: Iterable[DeadLetterRow], reached: Place) -> list[DeadLetterRow]:
    """Return the entries of a sink that may be delivered now, in order.

    Args:
        entries: All entries of the sink, in the order of the journal.
        reached: The sink's checkpoint; entries behind it are not due.
    """
    due = []
    blocked = BlockedKeys()
    for letter in entries:
        offset, keys = (letter.segment, letter.ordinal), Keys.of_entry(letter)
        if offset > reached:
            break
        if letter.state != "dead" and not (letter.holds and blocked.holds(offset, keys)):
            due.append(letter)
        elif letter.holds:
            blocked.hold(offset, keys)
    return due


def waiting(blocked: BlockedKeys, segment: int, rows: pa.RecordBatch) -> list[int]:
    """Return the indexes of the rows that wait; all keys that they touch are blocked then.

    Args:
        blocked: The blocked keys, to which those of waiting rows are added.
        segment: Segment of the rows.
        rows: Changes in order, with the columns `COLUMNS`.
    """
    indexes: list[int] = []
    start: int | None = 0
    while start is not None:
        start = _wait_from(start, blocked, segment, rows, indexes)
    return indexes


def keys_of(rows: pa.RecordBatch, indexes: Sequence[int] | npt.NDArray[np.int64]) -> list[Keys]:
    """Return the keys of the changes at these indexes; `rows` has the columns `COLUMNS`."""
    chosen = rows.take(pa.array(indexes, pa.int64()))
    moved, old = changed_keys(chosen)
    before = dict(zip(moved.tolist(), old.to_pylist(), strict=True))
    tables = cast("list[str]", full_names(chosen).to_pylist())
    ops, keys = chosen.column("op").to_pylist(), chosen.column("key").to_pylist()
    return [
        Keys(table, key, before.get(index), key is None and op == "t")
        for index, (table, op, key) in enumerate(zip(tables, ops, keys, strict=True))
    ]


def full_names(rows: pa.RecordBatch) -> pa.StringArray:
    """Return the full name of each change's table: `schema.table`, `db.table` without schemas."""
    schema, db, table = (rows.column(name).cast(pa.string()) for name in ("schema", "db", "table"))
    dot: Any = "."
    return cast("pa.StringArray", pc.binary_join_element_wise(pc.coalesce(schema, db), table, dot))


def _wait_from(
    start: int, blocked: BlockedKeys, segment: int, rows: pa.RecordBatch, indexes: list[int]
) -> int | None:
    """Add the rows that wait to `indexes`, up to the first one that holds further keys.

    Returns:
        The index after that row; None at the end of the rows.
    """
    candidates = start + np.flatnonzero(_candidates(blocked, rows.slice(start)))
    for index, keys in zip(candidates.tolist(), keys_of(rows, candidates), strict=True):
        offset = (segment, cast("int", rows.column("ordinal")[index].as_py()))
        if blocked.holds(offset, keys):
            indexes.append(index)
            if blocked.hold(offset, keys):
                return int(index) + 1
    return None


def _candidates(blocked: BlockedKeys, rows: pa.RecordBatch) -> _Mask:
    """Return a mask of the rows that may have to wait: all that must, and few others."""
    chosen = np.zeros(rows.num_rows, np.bool_)
    names = full_names(rows)
    moved, _ = changed_keys(rows)
    for table, keys in blocked.tables.items():
        of_table = _mask(pc.equal(names, pa.scalar(table)))
        if keys is not None and of_table.any():
            touched = _mask(
                pc.is_in(rows.column("key"), value_set=pa.array(list(keys), pa.string()))
            )
            touched |= _mask(pc.equal(rows.column("op").cast(pa.string()), pa.scalar("t")))
            touched[moved] = True
            of_table &= touched
        chosen |= of_table
    return chosen


def _mask(values: Any) -> _Mask:
    return cast("_Mask", values.fill_null(fill_value=False).to_numpy(zero_copy_only=False).copy())
