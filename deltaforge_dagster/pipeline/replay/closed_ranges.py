"""Look up closed ranges by number, and determine which of them a sink has."""

from __future__ import annotations

from collections.abc import Sequence

from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.sinks.registry import TableSinkType, sink_types
from deltaforge_dagster.state.records import RangeRow
from deltaforge_dagster.state.store import StateStore


def split_by_delivery(
    store: StateStore, pipeline: str, sink_id: str, ranges: Sequence[int]
) -> tuple[list[RangeRow], list[RangeRow]]:
    """Return the ranges that a sink has, and those that it does not have yet, in log order.

    Raises:
        NotAllowed: There is no such sink or range, or a range is open.
    """
    # Ranges first: a pipeline that never ran knows none of its sinks yet.
    rows = [closed_range(store, pipeline, number) for number in sorted(set(ranges))]
    checkpoint = store.checkpoints.read(pipeline).get(sink_id)
    if checkpoint is None:
        raise NotAllowed(f"{pipeline}: there is no sink {sink_id!r}")
    delivered = [row for row in rows if row.last_segment <= checkpoint.whole_segment]
    return delivered, rows[len(delivered) :]


def keeps_what_it_has(spec: PipelineSpec, sink_id: str) -> bool:
    """Return whether a sink writes tables.

    These recognize what they have, so a replay would change nothing.
    """
    kinds = [sink_types()[sink.type] for sink in spec.spec.sinks if sink.config.id == sink_id]
    return any(isinstance(kind, TableSinkType) for kind in kinds)


def closed_range(store: StateStore, pipeline: str, number: int) -> RangeRow:
    """Return a range that is closed.

    Raises:
        NotAllowed: There is no such range, or it is open.
    """
    row = store.ranges.get(pipeline, number)
    if row is None:
        raise NotAllowed(f"{pipeline}: there is no range {number}")
    if row.state == "open":
        raise NotAllowed(f"{pipeline}: range {number} is still open; wait until it is closed")
    return row
