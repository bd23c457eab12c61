"""Who made what a processor gives back, and ids for it: no two rows of a call have the same.

Sinks tell events apart by their ids, and a person tells events of the source from those that a
processor made by their mark. So behind each processor:

- a row with an id that was not given to it is one that it made: it is *synthetic*, marked with the
  processor's id unless it says otherwise itself. Without an id it gets one, which is a function of
  the row before it;
- a row that was given and comes back several times is an event and its copies, which are not marked.
  The first keeps the id; the others get ids that are functions of it.

The same rows from the same processor get the same ids, whenever it is done.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.processors.columns import replaced
from deltaforge_dagster.processors.expansion import copy_id


def identified(name: str, given: pa.RecordBatch, made: pa.RecordBatch) -> pa.RecordBatch:
    """Return what a processor made, with ids and marks.

    Args:
        name: Id of the processor.
        given: The rows that it got; at least one if it made any.
        made: The rows that it gave back; their `event_id` may repeat, or be null.
    """
    ids, known = made.column("event_id"), given.column("event_id")
    if ids.equals(known):
        return made
    strange = ~pc.is_in(ids, value_set=known).to_numpy(zero_copy_only=False)
    if not strange.any() and pc.count_distinct(ids).as_py() == len(ids):
        return made
    changes: dict[str, dict[int, Any]] = {
        "event_id": _own_ids(name, known[0].as_py(), ids.to_pylist(), strange.tolist())
    }
    unmarked = strange & made.column("synthetic").is_null().to_numpy(zero_copy_only=False)
    changes["synthetic"] = dict.fromkeys(np.flatnonzero(unmarked).tolist(), name)
    return replaced(made, {column: rows for column, rows in changes.items() if rows})


def _own_ids(name: str, first: str, ids: list[str | None], strange: list[bool]) -> dict[int, str]:
    """Return new ids, by row, for rows without one and for those whose id an earlier row has."""
    own: dict[int, str] = {}
    times: dict[str, int] = {}
    anchor = first
    for row, (one, made) in enumerate(zip(ids, strange, strict=True)):
        if not one:
            own[row] = copy_id(anchor, row + 1, f"{name}/new")
            continue
        if not made:
            anchor = one
        times[one] = times.get(one, 0) + 1
        if times[one] > 1:
            own[row] = copy_id(one, times[one], name)
    return own
