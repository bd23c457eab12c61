"""Remove the rows of a snapshot chunk for which the journal already has something newer.

A row of a chunk is left out if a transaction that the read could not see changed it: the journal
has its newer state already, before the place where the chunk is merged. There is one exception. If
all that the journal has of a row are updates with missing columns (unchanged TOAST values, MySQL's
`binlog_row_image`), only the chunk has the other columns. Then these updates are applied to the
chunk's row, in log order, and the result is kept.

Keys are compared as JSON text, which is the same for snapshot rows and log rows. Memory grows with
the number of rows in the chunk, not with the number of changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.frame import CAPTURED
from deltaforge_dagster.processors.messages.expansion import changed_keys
from deltaforge_dagster.sources.rows.images import is_partial, overlay

COLUMNS = ["op", "db", "schema", "table", "before", "after", "key", "file", "pos", "tx_id"]
"""Columns of the change frame that decide what a change does to the rows of a chunk."""


class Deduplication:
    """Applies changes of one table to rows of a chunk.

    Args:
        rows: Rows of a chunk, with the columns of `frame.CAPTURED` and unique values of `key`.
        columns: Names of the table's columns.
    """

    def __init__(self, rows: pa.RecordBatch, columns: Sequence[str]) -> None:
        self._rows = rows
        self._columns = columns
        self._keys = cast("pa.StringArray", rows.column("key"))
        self._alive = np.ones(rows.num_rows, np.bool_)
        self._newer: dict[int, list[str]] = {}
        self._moved: dict[str, int] = {}  # rows by their new key
        self._away: set[int] = set()  # rows whose first key is free or belongs to another row now

    def accept(self, changes: pa.RecordBatch) -> None:
        """Apply changes of the table that the read could not see; call in log order."""
        if _has_op(changes, "t").any():
            self._alive[:] = False
            return
        start: int | None = 0
        while start is not None:
            changes = changes.slice(start)
            start = self._take_until_moved(changes)

    def _take_until_moved(self, changes: pa.RecordBatch) -> int | None:
        """Apply changes up to the first one that gives a kept row a new key.

        Returns:
            The index after that change; None if there is none.
        """
        row = self._find(cast("pa.StringArray", changes.column("key")))
        moves, old_keys = changed_keys(changes)
        before = row.copy()
        before[moves] = self._find(old_keys)
        touching = (row >= 0) | (before >= 0)
        if self._moved:
            touching |= self._are_moved(changes, moves, old_keys)
        return self._deduplicate(changes, np.flatnonzero(touching), before, moves, old_keys)

    def rows(self) -> pa.RecordBatch:
        """Return the remaining rows as they must be delivered."""
        rows = self._rows
        if self._newer:
            rows = self._overlaid(rows)
        return rows.filter(pa.array(self._alive))

    def _deduplicate(
        self,
        changes: pa.RecordBatch,
        touched: np.ndarray[Any, Any],
        before: np.ndarray[Any, Any],
        moves: np.ndarray[Any, Any],
        old_keys: pa.StringArray,
    ) -> int | None:
        chosen = changes.select(["op", "after", "key"]).take(pa.array(touched, pa.int64()))
        old = dict(zip(moves.tolist(), old_keys.to_pylist(), strict=True)) if len(moves) else {}
        for index, change in zip(touched.tolist(), chosen.to_pylist(), strict=True):
            key, old_key = change["key"], old.get(index)
            row = self._moved.pop(old_key or key, -1)
            if row < 0:
                row = int(before[index])
                if row in self._away:
                    continue
            if row < 0 or not self._alive[row]:
                continue
            self._away.discard(row)
            after = change["after"]
            if change["op"] == "u" and is_partial(after, self._columns):
                self._newer.setdefault(row, []).append(after)
                if key != self._keys[row].as_py():
                    self._moved[key] = row
                    self._away.add(row)
                    return int(index) + 1
            else:
                self._alive[row] = False
        return None

    def _find(self, keys: pa.StringArray) -> np.ndarray[Any, Any]:
        """Return which row has each key, -1 for none."""
        indexes = pc.index_in(keys, value_set=self._keys, skip_nulls=True)
        return cast(
            "np.ndarray[Any, Any]", indexes.fill_null(-1).to_numpy(zero_copy_only=False)
        ).copy()

    def _are_moved(
        self, changes: pa.RecordBatch, moves: np.ndarray[Any, Any], old_keys: pa.StringArray
    ) -> np.ndarray[Any, Any]:
        """Return a mask of changes to rows that no longer have the key they were read with."""
        mask = np.zeros(changes.num_rows, np.bool_)
        old = dict(zip(moves.tolist(), old_keys.to_pylist(), strict=True))
        for index, key in enumerate(changes.column("key").to_pylist()):
            mask[index] = old.get(index, key) in self._moved
        return mask

    def _overlaid(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        after: list[Any] = rows.column("after").to_pylist()  # a row that was read has an image
        keys = rows.column("key").to_pylist()
        for row, newer in self._newer.items():
            after[row] = overlay(after[row], newer)
        for key, row in self._moved.items():
            keys[row] = key
        columns = {name: rows.column(name) for name in CAPTURED.names}
        columns |= {"after": pa.array(after, pa.string()), "key": pa.array(keys, pa.string())}
        return pa.RecordBatch.from_arrays(list(columns.values()), schema=CAPTURED)


def deduplicated(
    rows: pa.RecordBatch, columns: Sequence[str], changes: Iterable[pa.RecordBatch]
) -> pa.RecordBatch:
    """Return the rows that remain after all changes were applied; see `Deduplication`."""
    deduplication = Deduplication(rows, columns)
    for batch in changes:
        deduplication.accept(batch)
    return deduplication.rows()


def _has_op(rows: pa.RecordBatch, op: str) -> np.ndarray[Any, Any]:
    mask = pc.equal(rows.column("op"), pa.scalar(op))
    return cast("np.ndarray[Any, Any]", mask.to_numpy(zero_copy_only=False))
