"""The state of a pipeline as `deltaforge status` shows it, read from its file and the state store.

No other server is queried. The display (`status`) and the JSON output show the same values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.pipeline.committed import segments_behind, sink_lag_seconds
from deltaforge_dagster.pipeline.control.catalog import AnyPipeline
from deltaforge_dagster.pipeline.control.work import sensing_behind
from deltaforge_dagster.pipeline.health.health import Health, health, health_without_file
from deltaforge_dagster.state.reconciliations import TableProof
from deltaforge_dagster.state.records import (
    CheckpointRow,
    DeadLetterDepth,
    HoldRow,
    LeaseRow,
    PipelineRow,
    RangeRow,
)
from deltaforge_dagster.state.snapshot_records import SnapshotProgress, SnapshotRow
from deltaforge_dagster.state.store import StateStore


@dataclass(frozen=True, slots=True)
class SinkView:
    """The state of one sink.

    Attributes:
        checkpoint: Its checkpoint.
        segments: How many segments it lacks, in whole or in part.
        rows: How many changes it lacks.
        lag_seconds: Age of the oldest change that it lacks; 0 if there is none.
    """

    checkpoint: CheckpointRow
    segments: int
    rows: int
    lag_seconds: float


@dataclass(frozen=True, slots=True)
class Overview:
    """The state of one pipeline.

    Attributes:
        pipeline: Its row in the state store.
        sinks: Its sinks.
        newest: Its newest range, None if there is none.
        lease: Its lease, None if no run ever held one.
        journal_bytes: Size of its journal.
        holds: Its holds.
        dead_letters: Figures of its dead letters.
        snapshot: The newest snapshot with the progress of each table, None if there is none.
        unsensed: How many segments of the journal have not been sensed; None without sensing.
        proofs: What was last proven about each table of a sink.
        health: Whether it works, and its problems.
        now: The state store's current time.
    """

    pipeline: PipelineRow
    sinks: Sequence[SinkView]
    newest: RangeRow | None
    lease: LeaseRow | None
    journal_bytes: int
    holds: Sequence[HoldRow]
    dead_letters: DeadLetterDepth
    snapshot: tuple[SnapshotRow, Mapping[str, SnapshotProgress]] | None
    unsensed: int | None
    proofs: Sequence[TableProof]
    health: Health
    now: float

    @property
    def lag_seconds(self) -> float:
        """The lag, in seconds, of the sink that is furthest behind."""
        return max((sink.lag_seconds for sink in self.sinks), default=0.0)

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON values; times are seconds since 1970."""
        row, newest, lease = self.pipeline, self.newest, self.lease
        active = lease is not None and lease.active_at(self.now)
        return {
            "name": row.name,
            **_health_json(self.health),
            "lag_seconds": round(self.lag_seconds, 3),
            "captured_position": _fields(row.captured_position or row.start_position),
            "committed_position": _fields(row.confirmed_position),
            "captured_segments": row.next_segment - 1,
            "capture_pause": row.capture_pause,
            "source_log": None if self.health.log is None else asdict(self.health.log),
            "confirmed_early": None if self.health.early is None else asdict(self.health.early),
            "journal_bytes": self.journal_bytes,
            "range": newest
            and {
                "range": newest.range,
                "state": newest.state,
                "rows": newest.rows,
                "opened_at": newest.opened_at,
                "closed_at": newest.closed_at,
            },
            "run_id": lease.run_id if lease is not None and active else None,
            "sinks": [self._sink(sink) for sink in self.sinks],
            "unsensed_segments": self.unsensed,
            "verified": [proof.to_json() for proof in self.proofs],
            "holds": [hold.to_json() for hold in self.holds],
            "dead_letters": asdict(self.dead_letters),
            "snapshot": self.snapshot
            and {
                **self.snapshot[0].to_json(),
                "progress": {name: counts.to_json() for name, counts in self.snapshot[1].items()},
            },
        }

    def _sink(self, view: SinkView) -> dict[str, Any]:
        checkpoint = view.checkpoint
        return {
            "sink": checkpoint.sink,
            "state": checkpoint.state,
            "segment": checkpoint.segment,
            "ordinal": checkpoint.ordinal,
            "complete": checkpoint.complete,
            "source_position": _fields(checkpoint.source_position),
            "segments_behind": view.segments,
            "rows_behind": view.rows,
            "lag_seconds": round(view.lag_seconds, 3),
            "checkpoint_age_seconds": round(max(0.0, self.now - checkpoint.updated_at), 3),
            "failures": checkpoint.failures,
            "next_attempt_at": checkpoint.next_attempt_at if checkpoint.failures else None,
            "last_error": checkpoint.error_line,
            "notice": checkpoint.notice,
            "began": checkpoint.began,
        }


@dataclass(frozen=True, slots=True)
class NotBegun:
    """A pipeline that has a file but no row in the state store yet."""

    name: str
    health: Health
    now: float

    def to_json(self) -> dict[str, Any]:
        """Return its name and health as JSON values."""
        return {"name": self.name, **_health_json(self.health)}


def _health_json(health: Health) -> dict[str, Any]:
    return {
        "status": health.status,
        "problem": health.error,
        "well": health.well,
        "problems": [problem.to_json() for problem in health.problems],
        "seen_at": health.seen_at,
    }


def overview(store: StateStore, row: PipelineRow, file: AnyPipeline | None) -> Overview:
    """Return the state of a pipeline.

    Args:
        store: The state store.
        row: The pipeline.
        file: Its loaded or broken file, None if the installation has no file of it.
    """
    now = store.now()
    newest = store.ranges.read(row.name, newest_first=True, limit=1)
    snapshots = store.snapshots.read(row.name, newest=1)
    return Overview(
        pipeline=row,
        sinks=[
            _view(store, row, checkpoint, now)
            for checkpoint in store.checkpoints.read(row.name).values()
        ],
        newest=newest[0] if newest else None,
        lease=store.leases.get(row.name),
        journal_bytes=store.segments.total_bytes(row.name),
        holds=store.holds.read(row.name),
        dead_letters=store.dead_letters.depth(row.name),
        snapshot=(snapshots[0], store.snapshots.progress(row.name, snapshots[0].snapshot))
        if snapshots
        else None,
        unsensed=_unsensed(store, file),
        proofs=store.reconciliations.proofs(row.name),
        health=health_without_file(store, row) if file is None else health(store, file),
        now=now,
    )


def _unsensed(store: StateStore, file: AnyPipeline | None) -> int | None:
    sensing = file.spec.spec.schema_sensing if isinstance(file, LoadedPipeline) else None
    if not isinstance(file, LoadedPipeline) or sensing is None or not sensing.enabled:
        return None
    return sensing_behind(store, file)


def _view(store: StateStore, row: PipelineRow, checkpoint: CheckpointRow, now: float) -> SinkView:
    behind = segments_behind(row, checkpoint)
    rows = 0
    if behind:
        waiting = store.segments.read(row.name, first=checkpoint.segment + checkpoint.complete)
        rows = sum(segment.delivered.rows for segment in waiting)
        if waiting and not checkpoint.complete and waiting[0].segment == checkpoint.segment:
            rows -= checkpoint.ordinal + 1
    return SinkView(checkpoint, behind, rows, sink_lag_seconds(store, row, checkpoint, now))


def _fields(text: str | None) -> Any:
    return None if text is None else json.loads(text)
