"""Mark the rows that a processor created, and make the ids of its output unique within a call.

Consumers distinguish events by their ids, and synthetic events from those of the source by their mark. So
after each processor:

- a row with an id that was not in the processor's input was created by it: the row is *synthetic* and is
  marked with the processor's id, unless the processor set the mark itself. A row without an id gets one
  that is a function of the nearest input row before it;
- an input row that is returned several times is an event and its copies, which are not marked. The first
  keeps the id; the others get ids that are functions of it.

The same rows from the same processor always get the same ids.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.processors.columns import replaced
from deltaforge_dagster.processors.messages.expansion import copy_id


def identified(name: str, given: pa.RecordBatch, made: pa.RecordBatch) -> pa.RecordBatch:
    """Return a processor's output with unique ids and marks.

    Args:
        name: Id of the processor.
        given: The rows that it got; at least one if it returned any.
        made: The rows that it returned; their `event_id` may repeat, or be null.
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
    """Return new ids, by row, for rows without an id and for those whose id an earlier row has."""
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
