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
        place = frame.schema.get_field_index(name)
        frame = frame.set_column(place, frame.schema.field(place), _changed(frame, place, values))
    return frame


def _changed(frame: pa.RecordBatch, place: int, values: Mapping[int, Any]) -> pa.Array[Any]:
    column = frame.column(place)
    mask = np.zeros(len(column), np.bool_)
    mask[list(values)] = True
    kind = column.type
    plain = kind.value_type if isinstance(kind, pa.DictionaryType) else kind
    made: pa.Array[Any] = pa.array([values.get(row) for row in range(len(column))], plain)
    if not mask.all():
        made = pc.if_else(pa.array(mask), made, column.cast(plain))
    return cast("pa.Array[Any]", made.dictionary_encode()) if plain != kind else made
