"""Publication: what Dagster should be told about closed ranges, and has not been told yet.

Publishing is a state of its own, after closing: a range may be closed by a run that is killed
before it publishes. The store says what is pending; whoever publishes (a run, or the next sensor
tick) then marks it. `changes` of a range is due when the range is closed, a sink's asset when
that sink's checkpoint has passed the range's end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.state.records import CheckpointRow, Counts, RangeRow
from deltaforge_dagster.state.store import StateStore

CHANGES = "changes"
"""The asset of what was captured; every other asset of a range is named by its sink."""

Value = int | float | str


@dataclass(frozen=True, slots=True)
class Publication:
    """One materialization to publish: numbers plot in the UI, the rest is text."""

    range: int
    asset: str
    metadata: Mapping[str, Value]


def pending(store: StateStore, pipeline: str) -> list[Publication]:
    """Return what is due and not yet published, ranges in order, `changes` before the sinks."""
    due = store.unpublished(pipeline)
    if not due:
        return []
    numbers = [number for number, _ in due]
    ranges = {
        row.range: row for row in store.ranges(pipeline, first=min(numbers), last=max(numbers))
    }
    checkpoints = store.checkpoints(pipeline)
    return [
        Publication(number, asset, _metadata(ranges[number], asset, checkpoints))
        for number, asset in sorted(due, key=lambda one: (one[0], one[1] != CHANGES, one[1]))
    ]


def metadata_of(store: StateStore, pipeline: str, number: int, asset: str) -> Mapping[str, Value]:
    """Return the metadata that a publication of this range and asset carries now.

    Raises:
        NotAllowed: There is no such range.
    """
    row = store.range(pipeline, number)
    if row is None:
        raise NotAllowed(f"{pipeline}: there is no range {number}")
    return _metadata(row, asset, store.checkpoints(pipeline))


def facts(row: RangeRow) -> dict[str, Value]:
    """Return what never changes about a closed range; the same for each of its assets."""
    known: dict[str, Value] = {
        "dagster/row_count": row.rows,
        "events": row.rows,
        "bytes": row.bytes,
        "segments": row.last_segment - row.first_segment + 1,
        "first_segment": row.first_segment,
        "last_segment": row.last_segment,
        "epoch": row.epoch,
        "start_position": row.start_position,
        "end_position": row.end_position,
        "content_hash": row.content_hash or "",
        "close_reason": row.close_reason or "",
        "spec_hash": row.spec_hash,
    }
    for op, count in sorted(_per_op(row.counts).items()):
        known[f"events/{op}"] = count
    for table, ops in sorted(row.counts.items()):
        known[f"events/{table}"] = sum(ops.values())
    for table, version in sorted(row.schema_versions.items()):
        known[f"schema/{table}"] = version
    return known


def _metadata(
    row: RangeRow, asset: str, checkpoints: Mapping[str, CheckpointRow]
) -> Mapping[str, Value]:
    known = facts(row)
    ended_at = row.closed_at or row.opened_at
    if asset != CHANGES:
        checkpoint = checkpoints[asset]
        ended_at = checkpoint.updated_at
        known["checkpoint_segment"] = checkpoint.segment
        known["checkpoint_ordinal"] = checkpoint.ordinal
        known["checkpoint_position"] = checkpoint.source_position or ""
    known["lag_seconds"] = round(max(0.0, ended_at - row.last_ts_us / 1e6), 3)
    known["events_per_second"] = round(row.rows / max(ended_at - row.opened_at, 0.001), 1)
    return known


def _per_op(counts: Counts) -> dict[str, int]:
    total: dict[str, int] = {}
    for ops in counts.values():
        for op, count in ops.items():
            total[op] = total.get(op, 0) + count
    return total
