"""Converts the absent columns of rows: a column of names (`df_absent`), or a mask per column."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import pyarrow as pa

from deltaforge_dagster.kernels.message_text import Mask

NAMES = pa.list_(pa.string())
"""The type of `df_absent`."""


def names_of(masks: Mapping[str, Mask], rows: int) -> pa.Array[Any]:
    """Return for each row the names of the columns that it lacks; null if there are none.

    Args:
        masks: By the name of a column, which rows lack it.
        rows: Number of rows.
    """
    lacking = {name: mask for name, mask in masks.items() if mask.any()}
    if not lacking:
        return pa.nulls(rows, NAMES)
    table = np.column_stack(list(lacking.values()))
    counts = table.sum(axis=1)
    ends = np.zeros(rows + 1, np.int32)
    np.cumsum(counts, out=ends[1:])
    names = pa.array(list(lacking)).take(np.nonzero(table)[1])
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), names, mask=pa.array(counts == 0))


def masks_of(names: pa.Array[Any]) -> dict[str, Mask]:
    """Return a mask of the rows that lack it for each column that some rows lack."""
    if names.null_count == len(names):
        return {}
    assert isinstance(names, pa.ListArray)
    encoded = names.flatten().dictionary_encode()
    codes = encoded.indices.to_numpy()
    rows = np.repeat(np.arange(len(names)), names.value_lengths().fill_null(0).to_numpy())
    masks = {}
    for code, name in enumerate(cast("list[str]", encoded.dictionary.to_pylist())):
        masks[name] = np.zeros(len(names), np.bool_)
        masks[name][rows[codes == code]] = True
    return masks
