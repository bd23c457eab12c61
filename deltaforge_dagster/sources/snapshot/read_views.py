"""What a read of a table could see, and which captured changes that leaves out.

Each database says it in its own words, so each kind of source has its own class (`sources.registry`). All of
them err on one side: a transaction that may not have been visible counts as not visible, because the stream
delivers its changes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from deltaforge_dagster.errors import CorruptLog
from deltaforge_dagster.sources.registry import source_types
from deltaforge_dagster.sources.snapshot.base import ReadView

Mask = npt.NDArray[np.bool_]


def parse_read_view(text: str) -> ReadView:
    """Return what `to_json` wrote.

    Raises:
        CorruptLog: The text is not a read view.
    """
    try:
        fields = json.loads(text)
        found = (kind.read_view(fields) for kind in reversed(tuple(source_types().values())))
        view: ReadView = next(one for one in found if one is not None)
    except (ValueError, KeyError, TypeError, StopIteration) as error:
        raise CorruptLog("not what a snapshot's read saw") from error
    return view


def by_transaction(
    rows: pa.RecordBatch | pa.Table, not_visible: Callable[[Sequence[str]], Mask]
) -> pa.BooleanArray:
    """Ask of each transaction among the rows once; rows of none are no changes."""
    ids = column_of(rows, "tx_id")
    assert isinstance(ids, pa.DictionaryArray)
    texts = [str(text) for text in ids.dictionary.to_pylist()]
    found = not_visible(texts) if texts else np.zeros(0, np.bool_)
    mask: pa.BooleanArray = pa.array(np.append(found, False)[codes(ids)])
    return mask


def column_of(rows: pa.RecordBatch | pa.Table, name: str) -> pa.Array[Any]:
    """Return a column as one array."""
    column = rows.column(name)
    if isinstance(column, pa.ChunkedArray):
        column = column.unify_dictionaries().combine_chunks()
    return column


def codes(column: pa.DictionaryArray[Any, Any]) -> npt.NDArray[np.int64]:
    """Return each row's place in the dictionary, that behind its end for null."""
    found = column.indices.fill_null(len(column.dictionary))
    return found.to_numpy(zero_copy_only=False).astype(np.int64)
