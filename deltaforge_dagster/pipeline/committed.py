"""How far sinks are: the committed position of the source, and the segments that sinks can get.

The committed position is how far the source may discard its log. Each sink's checkpoint moves
independently. The commit policy only decides for which of them the source has to wait: `required` =
the slowest required sink, `all` = the slowest sink, `quorum` N = the N-th fastest sink. A detached
sink is ignored; a paused one counts like any other. A hold keeps the position before its first
event until the sinks that count have its events.

Without processors every segment of the journal is ready to be delivered to sinks. With processors a
segment is ready once the chain has processed it, in journal order, and sinks get the processed
segment. A segment that some sink had begun to receive before processors were added to the file is
delivered to all sinks as captured.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Protocol

from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.registry import parse_position
from deltaforge_dagster.state.records import (
    Attachment,
    CheckpointRow,
    HoldRow,
    PipelineRow,
    SegmentRow,
)

if TYPE_CHECKING:
    from deltaforge_dagster.state.store import StateStore


def counted_sinks(spec: PipelineSpec) -> list[str]:
    """Return the ids of the sinks that the commit policy may wait for."""
    sinks = [sink.config for sink in spec.spec.sinks]
    if spec.spec.commit_policy.mode == "required":
        return [sink.id for sink in sinks if sink.required]
    return [sink.id for sink in sinks]


def committed_without(spec: PipelineSpec, failing: Collection[str]) -> bool:
    """Return whether the commit policy can be satisfied without the sinks that fail."""
    counted = counted_sinks(spec)
    policy = spec.spec.commit_policy
    needed = policy.quorum if policy.mode == "quorum" and policy.quorum else len(counted)
    return sum(sink not in failing for sink in counted) >= needed


def awaited_sinks(spec: PipelineSpec, checkpoints: Mapping[str, CheckpointRow]) -> Collection[str]:
    """Return the sinks that the commit policy waits for.

    With a quorum there are none while enough sinks work.
    """
    idle = {
        checkpoint.sink
        for checkpoint in checkpoints.values()
        if checkpoint.failures or not checkpoint.attached
    }
    quorum = spec.spec.commit_policy.mode == "quorum"
    return [] if quorum and committed_without(spec, idle) else counted_sinks(spec)


def detachable_sinks(spec: PipelineSpec, checkpoints: Mapping[str, CheckpointRow]) -> list[str]:
    """Return the attached sinks that the commit policy can do without, the slowest first.

    `required`: those that are not required; `all`: none; `quorum` N: all but the N foremost.
    """
    attached = sorted(
        (checkpoint for checkpoint in checkpoints.values() if checkpoint.attached),
        key=lambda checkpoint: (checkpoint.whole_segment, checkpoint.ordinal),
    )
    policy = spec.spec.commit_policy
    if policy.mode == "quorum" and policy.quorum:
        return [checkpoint.sink for checkpoint in attached[: max(0, len(attached) - policy.quorum)]]
    counted = counted_sinks(spec)
    return [checkpoint.sink for checkpoint in attached if checkpoint.sink not in counted]


def go_on_command(pipeline: str, sink: str, state: Attachment) -> str:
    """Return the command that resumes a paused sink or attaches a detached one."""
    word = "attach" if state == "detached" else "resume"
    return f"deltaforge sink {word} {pipeline} {sink}"


def committed_position(
    spec: PipelineSpec,
    pipeline: PipelineRow,
    checkpoints: Mapping[str, CheckpointRow],
    holds: Sequence[HoldRow] = (),
    *,
    undelivered: bool = False,
) -> Position | None:
    """Return the position up to which the source may discard its log, None if there is none yet.

    With `engine.journal.confirm: captured`, or when no attached sink counts, this is the captured
    position.

    Args:
        spec: The pipeline.
        pipeline: Its row.
        checkpoints: Its sinks' checkpoints.
        holds: Its holds.
        undelivered: Whether the source may also discard changes that only the journal has, because
            `confirm: auto` has taken effect.
    """
    captured = _before(_parse(pipeline.captured_position), holds)
    if undelivered or spec.spec.engine.journal.confirm == "captured":
        return captured
    counted = _attached_counted(spec, checkpoints)
    if not counted:
        return captured
    reached = [_reached(checkpoint, holds) for checkpoint in counted]
    positions = sorted(position for position in reached if position is not None)
    needed = _needed(spec, counted)
    return positions[-needed] if len(positions) >= needed else None


def first_awaited_segment(
    spec: PipelineSpec, pipeline: PipelineRow, checkpoints: Mapping[str, CheckpointRow]
) -> int | None:
    """Return the first journaled segment that the commit policy still waits for, or None."""
    counted = _attached_counted(spec, checkpoints)
    if not counted:
        return None
    delivered = sorted(checkpoint.whole_segment for checkpoint in counted)[
        -min(_needed(spec, counted), len(counted))
    ]
    return delivered + 1 if delivered + 1 < pipeline.next_segment else None


def lacking_bytes(store: StateStore, pipeline: str, checkpoints: Collection[CheckpointRow]) -> int:
    """Return the bytes of the journal that at least one of these sinks still lacks."""
    if not checkpoints:
        return 0
    delivered = min(checkpoint.whole_segment for checkpoint in checkpoints)
    return store.segments.total_bytes(pipeline, after=delivered)


def segments_behind(pipeline: PipelineRow, checkpoint: CheckpointRow) -> int:
    """Return how many journaled segments a sink does not have completely; 0 if it is detached."""
    if not checkpoint.attached:
        return 0
    return max(0, pipeline.next_segment - 1 - checkpoint.whole_segment)


def sink_lag_seconds(
    store: StateStore, pipeline: PipelineRow, checkpoint: CheckpointRow, now: float
) -> float:
    """Return the age, in seconds, of the oldest change in the journal that a sink still lacks.

    It is 0 when the sink has everything, however long ago the last change was, and for a detached
    sink. The age counts from the time of the change in the source, by the clocks of both databases.
    It is that of the first change of the segment, even if the sink already has a part of that
    segment.
    """
    if not segments_behind(pipeline, checkpoint):
        return 0.0
    first = checkpoint.segment + checkpoint.complete
    lacking = store.segments.read(pipeline.name, first=first, limit=1)
    return max(0.0, now - lacking[0].first_ts_us / 1e6) if lacking else 0.0


class Segments(Protocol):
    """Provides segments by number."""

    def segments(
        self, *, first: int | None = None, last: int | None = None, limit: int | None = None
    ) -> list[SegmentRow]:
        """Return the segments from `first` to `last`, both included, as they must be sent."""
        ...


@dataclass(frozen=True, slots=True)
class Chosen:
    """A fixed list of segments.

    Attributes:
        rows: The segments as they must be sent, by ascending number.
    """

    rows: Sequence[SegmentRow]

    def segments(
        self, *, first: int | None = None, last: int | None = None, limit: int | None = None
    ) -> list[SegmentRow]:
        """Return the segments from `first` to `last`, both included."""
        rows = (row for row in self.rows if first is None or row.segment >= first)
        return [row for row in rows if last is None or row.segment <= last][:limit]


class PendingSegments:
    """The segments of one pipeline that are ready to be delivered.

    Args:
        store: Lists the segments.
        pipeline: Name of the pipeline.
        chained: Whether the pipeline has processors.
    """

    def __init__(self, store: StateStore, pipeline: str, *, chained: bool) -> None:
        self._store = store
        self._pipeline = pipeline
        self._chained = chained

    def segment(self, number: int) -> SegmentRow | None:
        """Return a segment, None if it does not exist or is not ready."""
        rows = self.segments(first=number, last=number)
        return rows[0] if rows else None

    def segments(
        self, *, first: int | None = None, last: int | None = None, limit: int | None = None
    ) -> list[SegmentRow]:
        """Return the segments from `first` to `last`, both included.

        The list ends before the first segment that is not ready.
        """
        rows = self._store.segments.read(self._pipeline, first=first, last=last, limit=limit)
        if self._chained:
            rows = list(takewhile(lambda row: row.chain_hash is not None, rows))
        return [row.delivered for row in rows]

    def reached(self, captured: str) -> str:
        """Return the position up to which segments are ready.

        This is the captured position, or the start of the first segment that is not ready.
        """
        if self._chained:
            for row in self._store.segments.read(self._pipeline):
                if row.chain_hash is None:
                    return row.start_position
        return captured


def _attached_counted(
    spec: PipelineSpec, checkpoints: Mapping[str, CheckpointRow]
) -> list[CheckpointRow]:
    return [checkpoints[sink] for sink in counted_sinks(spec) if checkpoints[sink].attached]


def _needed(spec: PipelineSpec, counted: Collection[CheckpointRow]) -> int:
    """Return how many of the sinks that count must have a change before it counts as delivered."""
    policy = spec.spec.commit_policy
    return policy.quorum if policy.mode == "quorum" and policy.quorum else len(counted)


def _reached(checkpoint: CheckpointRow, holds: Sequence[HoldRow]) -> Position | None:
    """Return the position up to which a sink has everything, including released holds."""
    lacking = [hold for hold in holds if not hold.passed(checkpoint.whole_segment)]
    position = _parse(checkpoint.source_position)
    return _earliest(position, lacking)


def _before(position: Position | None, holds: Sequence[HoldRow]) -> Position | None:
    """Return the position, but not beyond the first parked event that is not in the journal."""
    return _earliest(position, [hold for hold in holds if hold.state != "journaled"])


def _earliest(position: Position | None, holds: Sequence[HoldRow]) -> Position | None:
    if position is None:
        return None
    begins: list[Position] = [parse_position(hold.since_position) for hold in holds]
    return min([position, *begins])


def _parse(position: str | None) -> Position | None:
    return None if position is None else parse_position(position)
