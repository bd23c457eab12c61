"""Replace values in columns of the change frame."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


def replaced(frame: pa.RecordBatch, changes: Mapping[str, Mapping[int, Any]]) -> pa.RecordBatch:
    """Return a batch with new values, given by column name and row number."""
    for name, values in changes.items():
        index = frame.schema.get_field_index(name)
        frame = frame.set_column(index, frame.schema.field(index), _changed(frame, index, values))
    return frame


def _changed(frame: pa.RecordBatch, index: int, values: Mapping[int, Any]) -> pa.Array[Any]:
    column = frame.column(index)
    mask = np.zeros(len(column), np.bool_)
    mask[list(values)] = True
    kind = column.type
    plain = kind.value_type if isinstance(kind, pa.DictionaryType) else kind
    changed: pa.Array[Any] = pa.array([values.get(row) for row in range(len(column))], plain)
    if not mask.all():
        changed = pc.if_else(pa.array(mask), changed, column.cast(plain))
    return cast("pa.Array[Any]", changed.dictionary_encode()) if plain != kind else changed
