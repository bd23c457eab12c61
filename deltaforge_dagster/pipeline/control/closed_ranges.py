"""Closed ranges: found by number, with which of them a sink has, and published in Dagster.

A publication is the materializations of a closed range that Dagster should have, and does not have
yet. Publishing is tracked separately from closing, because the run that closed a range may be
killed before it publishes. The store says what is pending; a run, or the next sensor tick,
publishes it and then marks it as published. `changes` of a range is due when the range is closed, a
sink's asset when that sink's checkpoint has passed the range's end. The metadata includes the
processors' counts for the range (in `changes` only if it is published after the chain has finished)
and, in `changes`, the findings of sensing at that time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.pipeline.control.specs import RangeVersions
from deltaforge_dagster.sinks.registry import TableSinkType, sink_types
from deltaforge_dagster.state.records import CheckpointRow, Counts, LeaseRow, RangeRow
from deltaforge_dagster.tables import fingerprints

if TYPE_CHECKING:
    from deltaforge_dagster.state.schemas import TableHistory
    from deltaforge_dagster.state.store import StateStore

CHANGES = "changes"
"""The asset of what was captured; every other asset of a range is named by its sink."""

Value = int | float | str


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


@dataclass(frozen=True, slots=True)
class Publication:
    """One materialization to publish: numbers plot in the UI, the rest is text."""

    range: int
    asset: str
    metadata: Mapping[str, Value]
    code_version: str | None
    """Of the spec that the range was captured and delivered with; None if unknown."""
    run_id: str | None = None
    """Of the run that captured the range, or moved the sink past its end; None if unknown."""
    file: str | None = None
    """Path below the journal's root of the range's first segment; None when it is gone."""


def pending(store: StateStore, pipeline: str) -> list[Publication]:
    """Return what is due and not yet published, ranges in order, `changes` before the sinks."""
    due = store.ranges.unpublished(pipeline)
    if not due:
        return []
    numbers = [number for number, _ in due]
    ranges = {
        row.range: row for row in store.ranges.read(pipeline, first=min(numbers), last=max(numbers))
    }
    checkpoints = store.checkpoints.read(pipeline)
    histories = store.schemas.histories(pipeline)
    facts = {
        number: _counted(store, pipeline, ranges[number]) | _numbers(histories, ranges[number])
        for number in set(numbers)
    }
    versions = RangeVersions(store, pipeline)
    now, lease = store.now(), store.leases.get(pipeline)
    files = {number: _file(store, pipeline, row) for number, row in ranges.items()}
    captured = {number: _captured_at(store, pipeline, row) for number, row in ranges.items()}
    sensed = {CHANGES: store.sensing.facts(pipeline)}
    since = store.ranges.first_given(pipeline)
    return [
        Publication(
            number,
            asset,
            _since(since, asset)
            | _metadata(ranges[number], asset, checkpoints, now, captured[number])
            | facts[number]
            | sensed.get(asset, {}),
            versions.of(ranges[number], None if asset == CHANGES else asset),
            _run_id(lease, ranges[number], asset),
            files[number],
        )
        for number, asset in sorted(due, key=lambda pair: (pair[0], pair[1] != CHANGES, pair[1]))
    ]


def publication_of(
    store: StateStore, pipeline: str, number: int, asset: str, *, reprocessed: bool = False
) -> Publication:
    """Return the publication of this range and asset as it is now.

    `reprocessed` says that the sink has the output of the present processors for this range.

    Raises:
        NotAllowed: There is no such range.
    """
    row = store.ranges.get(pipeline, number)
    if row is None:
        raise NotAllowed(f"{pipeline}: there is no range {number}")
    captured_at = _captured_at(store, pipeline, row)
    metadata = _since(store.ranges.first_given(pipeline), asset)
    metadata |= _metadata(row, asset, store.checkpoints.read(pipeline), store.now(), captured_at)
    sink = None if asset == CHANGES else asset
    version = RangeVersions(store, pipeline).of(row, sink, reprocessed=reprocessed)
    file = _file(store, pipeline, row)
    metadata |= _counted(store, pipeline, row) | _numbers(store.schemas.histories(pipeline), row)
    if asset == CHANGES:
        metadata |= store.sensing.facts(pipeline)
    return Publication(number, asset, metadata, version, file=file)


def processor_metrics(processors: Mapping[str, Mapping[str, int]]) -> dict[str, Value]:
    """Return the processors' counts as metadata that Dagster plots.

    The key of a count is for example `processor/mask/events_out`. The name of a counter of the
    processor's own contains the metric and its label: `processor/outbox/outbox_dropped/non_insert`.
    `latency_seconds` is the average of a call.
    """
    metrics: dict[str, Value] = {}
    for name, counts in processors.items():
        for counter, count in sorted(counts.items()):
            if counter not in {"calls", "busy_us"}:
                metrics[f"processor/{name}/{counter.replace(':', '/')}"] = count
        if counts.get("calls"):
            seconds = counts.get("busy_us", 0) / counts["calls"] / 1e6
            metrics[f"processor/{name}/latency_seconds"] = round(seconds, 6)
    return metrics


def facts(row: RangeRow) -> dict[str, Value]:
    """Return what never changes about a closed range; the same for each of its assets.

    Only what is worth a plot is a number: Dagster plots every number, and sorts the plots by name.
    A range's changes are `events`, not `dagster/row_count`: Dagster's headline says of the newest
    one that the asset had so many rows.
    """
    metadata: dict[str, Value] = {
        "events": row.rows,
        "bytes": row.bytes,
        "segments": row.last_segment - row.first_segment + 1,
    }
    for op, count in sorted(_per_op(row.counts).items()):
        metadata[f"operations/{op}"] = count
    for table, ops in sorted(row.counts.items()):
        metadata[f"tables/{table}"] = sum(ops.values())
    metadata |= {
        "first_segment": str(row.first_segment),
        "last_segment": str(row.last_segment),
        "epoch": str(row.epoch),
        "start_position": row.start_position,
        "end_position": row.end_position,
        "content_hash": row.content_hash or "",
        "close_reason": row.close_reason or "",
        "spec_hash": row.spec_hash,
    }
    for table, versions in sorted(row.schema_versions.items()):
        metadata[f"schema/{table}"] = ", ".join(fingerprints(versions))
    return metadata


def _numbers(histories: Iterable[TableHistory], row: RangeRow) -> dict[str, Value]:
    """Return the numbers of the table versions that a range contains, for each table."""
    metadata: dict[str, Value] = {}
    for history in histories:
        by_fingerprint = {
            version.stamp.fingerprint: version.stamp.version for version in history.versions
        }
        contained = fingerprints(row.schema_versions.get(history.name, ()))
        if contained:
            numbers = (str(by_fingerprint.get(fingerprint, "unknown")) for fingerprint in contained)
            metadata[f"schema_version/{history.name}"] = ", ".join(numbers)
    return metadata


def _since(first_given: Mapping[str, int], asset: str) -> dict[str, Value]:
    """Return what a sink that was added later says first: it will never have earlier ranges."""
    if asset not in first_given:
        return {}
    return {"since": f"range {first_given[asset]}; earlier ones are not for this sink"}


def _metadata(
    row: RangeRow,
    asset: str,
    checkpoints: Mapping[str, CheckpointRow],
    now: float,
    captured_at: float,
) -> dict[str, Value]:
    """Return the metadata of a range: first how it went, which differs by asset, then its facts.

    Dagster plots the first hundred numbers in the order of their names: size, rates and lag are
    named so that they come before all others. The lag is the time from the range's last change
    until it was captured, or until the sink had it.
    """
    ended_at = arrived_at = row.closed_at or row.opened_at
    if asset == CHANGES:
        arrived_at = captured_at
    ages = {
        sink: round(max(0.0, now - checkpoint.updated_at), 1)
        for sink, checkpoint in checkpoints.items()
    }
    own: dict[str, Value] = {
        f"sinks/{sink}/checkpoint_age_seconds": age
        for sink, age in ages.items()
        if asset in {CHANGES, sink}
    }
    if asset != CHANGES:
        checkpoint = checkpoints[asset]
        ended_at = arrived_at = checkpoint.updated_at
        own |= {
            "checkpoint_segment": str(checkpoint.segment),
            "checkpoint_ordinal": str(checkpoint.ordinal),
            "checkpoint_position": checkpoint.source_position or "",
        }
    seconds = max(ended_at - row.opened_at, 0.001)
    return {
        "lag_seconds": round(max(0.0, arrived_at - row.last_ts_us / 1e6), 3),
        "events_per_second": round(row.rows / seconds, 1),
        "bytes_per_second": round(row.bytes / seconds),
        "events": row.rows,
        "bytes": row.bytes,
        **own,
        **facts(row),
    }


def _run_id(lease: LeaseRow | None, row: RangeRow, asset: str) -> str | None:
    """Return the run that produced a range's asset; None if the lease does not name it any more."""
    if lease is None or (asset == CHANGES and row.epoch != lease.epoch):
        return None
    return lease.run_id


def _captured_at(store: StateStore, pipeline: str, row: RangeRow) -> float:
    """Return when a range's last segment was captured.

    If that segment is gone, return when the range was closed.
    """
    segment = store.segments.get(pipeline, row.last_segment)
    return row.closed_at or row.opened_at if segment is None else segment.created_at


def _file(store: StateStore, pipeline: str, row: RangeRow) -> str | None:
    segment = store.segments.get(pipeline, row.first_segment)
    return None if segment is None else segment.path


def _counted(store: StateStore, pipeline: str, row: RangeRow) -> dict[str, Value]:
    """Return the processors' counts for a range; empty until its last segment is processed."""
    counts = store.segments.processed_counts(
        pipeline, first=row.first_segment, last=row.last_segment
    )
    return processor_metrics(counts)


def _per_op(counts: Counts) -> dict[str, int]:
    total: dict[str, int] = {}
    for ops in counts.values():
        for op, count in ops.items():
            total[op] = total.get(op, 0) + count
    return total
