"""The committed position: how far the source may forget.

Each sink's checkpoint moves alone. The commit policy only rules which of them the source has to
wait for: `required` = the slowest required sink, `all` = the slowest sink, `quorum` N = the N-th
fastest sink.
"""

from __future__ import annotations

from collections.abc import Mapping

from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.positions import Position, parse_position
from deltaforge_dagster.state.records import CheckpointRow, PipelineRow


def counted_sinks(spec: PipelineSpec) -> list[str]:
    """Return the ids of the sinks that the commit policy may wait for."""
    sinks = [sink.config for sink in spec.spec.sinks]
    if spec.spec.commit_policy.mode == "required":
        return [sink.id for sink in sinks if sink.required]
    return [sink.id for sink in sinks]


def committed_position(
    spec: PipelineSpec, pipeline: PipelineRow, checkpoints: Mapping[str, CheckpointRow]
) -> Position | None:
    """Return the position that the source may forget up to, or None when there is none yet.

    With `engine.journal.confirm: captured`, or when no sink counts, that is what the journal
    holds durably.
    """
    counted = counted_sinks(spec)
    if spec.spec.engine.journal.confirm == "captured" or not counted:
        return _parse(pipeline.captured_position)
    reached = [_parse(checkpoints[sink].source_position) for sink in counted]
    known = sorted(position for position in reached if position is not None)
    policy = spec.spec.commit_policy
    needed = policy.quorum if policy.mode == "quorum" and policy.quorum else len(counted)
    return known[-needed] if len(known) >= needed else None


def segments_behind(pipeline: PipelineRow, checkpoint: CheckpointRow) -> int:
    """Return how many segments of the journal a sink does not have whole."""
    return max(0, pipeline.next_segment - 1 - checkpoint.whole_segment)


def _parse(position: str | None) -> Position | None:
    return None if position is None else parse_position(position)
