"""Replay: delivering a closed range to one sink again, on purpose.

A replay moves nothing: no checkpoint, no position, no lease. It works beside a live run, reads
the same journal, marks each message with its run id, and leaves the values byte-identical.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from deltaforge_dagster.errors import JournalDamaged, NotAllowed
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.prepare import Preparer
from deltaforge_dagster.sinks.base import Sink
from deltaforge_dagster.state.records import RangeRow, SegmentRow
from deltaforge_dagster.state.store import StateStore


@dataclass(frozen=True, slots=True)
class ReplayedRange:
    """What was sent again for one range."""

    range: int
    segments: int
    messages: int


def replay(
    store: StateStore,
    pipeline: str,
    sink_id: str,
    ranges: Sequence[int],
    *,
    preparer: Preparer,
    build_sink: Callable[[], Sink],
    run_id: str,
    progress: Callable[[ReplayedRange], None],
) -> list[ReplayedRange]:
    """Deliver closed ranges to one sink again, in log order.

    Raises:
        NotAllowed: A range does not exist, is open, or has not been delivered to this sink yet.
        Retryable: Spark or the sink failed; what was sent stays, marked as a replay.
    """
    rows = [replayable(store, pipeline, sink_id, number) for number in sorted(set(ranges))]
    sink = build_sink()
    done = []
    try:
        sink.open()
        for row in rows:
            segments = store.segments(pipeline, first=row.first_segment, last=row.last_segment)
            messages = sum(_send(preparer, sink, sink_id, one, run_id) for one in segments)
            done.append(ReplayedRange(row.range, len(segments), messages))
            progress(done[-1])
    finally:
        sink.close()
    return done


def replayable(store: StateStore, pipeline: str, sink_id: str, number: int) -> RangeRow:
    """Return the range if it is closed and the sink has it.

    Raises:
        NotAllowed: Otherwise; the message says what to do.
    """
    row = closed_range(store, pipeline, number)
    checkpoint = store.checkpoints(pipeline).get(sink_id)
    if checkpoint is None:
        raise NotAllowed(f"{pipeline}: there is no sink {sink_id!r}")
    if checkpoint.whole_segment < row.last_segment:
        raise NotAllowed(
            f"{pipeline}: sink {sink_id} does not have range {number} yet; "
            "the pipeline's next run delivers it, in order"
        )
    return row


def closed_range(store: StateStore, pipeline: str, number: int) -> RangeRow:
    """Return a range that is closed.

    Raises:
        NotAllowed: There is no such range, or it is open.
    """
    row = store.range(pipeline, number)
    if row is None:
        raise NotAllowed(f"{pipeline}: there is no range {number}")
    if row.state == "open":
        raise NotAllowed(f"{pipeline}: range {number} is still open; wait until it is closed")
    return row


def verify(store: StateStore, journal: Journal, pipeline: str, number: int) -> int:
    """Check a closed range's files, checksums and contiguity; return the number of its events.

    Raises:
        JournalDamaged: A file is missing or differs, or segments do not follow one another.
        NotAllowed: There is no such range, or it is open.
    """
    row = closed_range(store, pipeline, number)
    segments = store.segments(pipeline, first=row.first_segment, last=row.last_segment)
    check_contiguous(row, segments)
    for segment in segments:
        journal.verify(segment)
    return sum(segment.rows for segment in segments)


def check_contiguous(row: RangeRow, segments: Sequence[SegmentRow]) -> None:
    """Raise `JournalDamaged` unless the segments are exactly those of the range, in order."""
    numbers = [segment.segment for segment in segments]
    if numbers != list(range(row.first_segment, row.last_segment + 1)):
        raise JournalDamaged(
            f"range {row.range}: segments {row.first_segment} to {row.last_segment} expected, "
            f"{len(numbers)} of them found"
        )


def _send(preparer: Preparer, sink: Sink, sink_id: str, segment: SegmentRow, run_id: str) -> int:
    prepared = preparer.prepare([segment])
    try:
        messages = 0
        for batch in prepared.batches(sink_id, segment.segment, -1):
            sink.send(replace(batch, replay=run_id), _unguarded)
            messages += batch.messages.num_rows
        return messages
    finally:
        prepared.discard()


def _unguarded() -> None:
    """A replay holds no lease: it may always send."""
