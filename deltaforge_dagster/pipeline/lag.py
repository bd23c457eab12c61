"""How far a sink is behind, in time."""

from __future__ import annotations

from deltaforge_dagster.pipeline.committed import segments_behind
from deltaforge_dagster.state.records import CheckpointRow, PipelineRow
from deltaforge_dagster.state.store import StateStore


def sink_lag_seconds(
    store: StateStore, pipeline: PipelineRow, checkpoint: CheckpointRow, now: float
) -> float:
    """Return how old the oldest change is that the journal holds and a sink still lacks.

    It is 0 when the sink has everything, however long nothing has changed, and for a sink that is
    detached, to which nothing is kept. The age is that of the change in the source, by the clocks of
    both databases; inside a segment that has come in part it may be that of a change that has arrived.
    """
    if not segments_behind(pipeline, checkpoint):
        return 0.0
    first = checkpoint.segment + checkpoint.complete
    lacking = store.segments(pipeline.name, first=first, limit=1)
    return max(0.0, now - lacking[0].first_ts_us / 1e6) if lacking else 0.0
