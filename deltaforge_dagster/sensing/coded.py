"""Dictionary-encoded columns: values that many rows share are processed once."""

from __future__ import annotations

from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.kernels.runtime import Longs
from deltaforge_dagster.sensing.scan import unescaped


def coded(batch: pa.RecordBatch, name: str) -> tuple[Longs, list[str | None]]:
    """Return a column as codes and the list of values that they index; the last value is None."""
    column = batch.column(name)
    if not isinstance(column, pa.DictionaryArray):
        column = column.dictionary_encode()
    values: list[str | None] = [*column.dictionary.to_pylist(), None]
    indices = column.indices.fill_null(len(values) - 1).to_numpy(zero_copy_only=False)
    return indices.astype(np.int64), values


def count_values(texts: pa.StringArray) -> dict[str, int]:
    """Count occurrences of each string; `texts` are JSON strings with escapes, without quotes."""
    counts: dict[str, int] = {}
    pairs = pc.value_counts(texts)
    values = cast("list[str]", pairs.field(0).to_pylist())
    for text, count in zip(values, cast("list[int]", pairs.field(1).to_pylist()), strict=True):
        value = unescaped(text)
        counts[value] = counts.get(value, 0) + count
    return counts
