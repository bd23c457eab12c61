"""Which changes of a segment wait behind dead letters: `held_keys` over change-frame batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.pipeline.held_rows import HeldKeys, Keys
from deltaforge_dagster.processors.messages.expansion import changed_keys

COLUMNS = ["ordinal", "op", "db", "schema", "table", "before", "key"]
"""Columns of the change frame from which a change's keys are derived."""

_Mask = npt.NDArray[np.bool_]


def waiting(held: HeldKeys, segment: int, rows: pa.RecordBatch) -> list[int]:
    """Return the indexes of the rows that wait; all keys that they touch are held from then on.

    Args:
        held: The held keys, to which those of waiting rows are added.
        segment: Segment of the rows.
        rows: Changes in order, with the columns `COLUMNS`.
    """
    indexes: list[int] = []
    start: int | None = 0
    while start is not None:
        start = _wait_from(start, held, segment, rows, indexes)
    return indexes


def _wait_from(
    start: int, held: HeldKeys, segment: int, rows: pa.RecordBatch, indexes: list[int]
) -> int | None:
    """Add the rows that wait to `indexes`, up to the first one that holds further keys.

    Returns:
        The index after that row; None at the end of the rows.
    """
    candidates = start + np.flatnonzero(_candidates(held, rows.slice(start)))
    for index, keys in zip(candidates.tolist(), keys_of(rows, candidates), strict=True):
        offset = (segment, cast("int", rows.column("ordinal")[index].as_py()))
        if held.holds(offset, keys):
            indexes.append(index)
            if held.hold(offset, keys):
                return int(index) + 1
    return None


def _candidates(held: HeldKeys, rows: pa.RecordBatch) -> _Mask:
    """Return a mask of the rows that may have to wait: all that must, and few others."""
    chosen = np.zeros(rows.num_rows, np.bool_)
    names = full_names(rows)
    moved, _ = changed_keys(rows)
    for table, keys in held.tables.items():
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


def _mask(values: Any) -> _Mask:
    return cast("_Mask", values.fill_null(fill_value=False).to_numpy(zero_copy_only=False).copy())
