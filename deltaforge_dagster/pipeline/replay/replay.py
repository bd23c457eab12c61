"""Replay: deliver a closed range to one sink again, on request.

A replay moves no checkpoint and no position, and needs no lease. It works beside a live run, reads
the same journal, marks each message with its run id, and leaves the values byte-identical. A range
that a sink does not have yet cannot be replayed; the sink catches up instead (`catch_up`). If the
pipeline has dead letters enabled, changes that can never be delivered are left out.

A replay sends the range as recorded in the journal or, on request, what today's processors make of
the captured rows (`Reprocessing`); the journal's record does not change. The new output is in
journal files without a row in the state store: they are deleted as soon as their content was
delivered, and those of a killed run are swept like any orphan.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.errors import JournalDamaged, Undeliverable
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.committed import Chosen, PendingSegments
from deltaforge_dagster.pipeline.control.closed_ranges import closed_range
from deltaforge_dagster.pipeline.encode.cache import EncodeCache
from deltaforge_dagster.pipeline.encode.encoder import Encoder
from deltaforge_dagster.pipeline.process.chain_jobs import run_job
from deltaforge_dagster.pipeline.process.chains import chain_of
from deltaforge_dagster.pipeline.process.stages import ProcessingJob, processed_by
from deltaforge_dagster.pipeline.run_context import SessionProvider, first_together
from deltaforge_dagster.sinks.base import Sink
from deltaforge_dagster.state.records import Processed, RangeRow, SegmentRow
from deltaforge_dagster.state.store import StateStore

_SEGMENTS_PER_JOB = 64


@dataclass(frozen=True, slots=True)
class ReplayedRange:
    """What was sent again for one range."""

    range: int
    segments: int
    messages: int


def replay(
    store: StateStore,
    spec: PipelineSpec,
    sink_id: str,
    ranges: Sequence[int],
    *,
    encoder: Encoder,
    build_sink: Callable[[], Sink],
    run_id: str,
    progress: Callable[[ReplayedRange], None],
    reprocessing: Reprocessing | None = None,
) -> None:
    """Deliver closed ranges again, in log order, to a sink that already has them.

    Args:
        store: The state store.
        spec: The pipeline.
        sink_id: Its sink.
        ranges: The ranges.
        encoder: Makes the messages.
        build_sink: Makes the sink.
        run_id: Marks each message.
        progress: Called with each range after it was sent.
        reprocessing: Runs today's processors; None to send what the journal has recorded.

    Raises:
        NotAllowed: A range does not exist or is open.
        JournalDamaged: Files of a range are gone.
        Retryable: Spark or the sink failed; messages that were already sent are not taken back.
    """
    pipeline, set_aside = spec.metadata.name, spec.spec.journal.enabled
    max_bytes = spec.spec.engine.deliver.max_bytes
    rows = [closed_range(store, pipeline, number) for number in sorted(set(ranges))]
    journal = PendingSegments(store, pipeline, chained=bool(spec.spec.processors))
    sink = build_sink()
    try:
        sink.open()
        for row in rows:
            first, last = row.first_segment, row.last_segment
            if reprocessing is None:
                segments = journal.segments(first=first, last=last)
            else:
                segments = store.segments.read(pipeline, first=first, last=last)
            check_contiguous(row, segments)
            messages = 0
            with contextlib.closing(_groups(segments, reprocessing)) as groups:
                for group in groups:
                    encode_cache = EncodeCache(encoder, Chosen(group), pipeline, max_bytes, sinks=1)
                    with contextlib.closing(encode_cache):
                        messages += sum(
                            _send(encode_cache, sink, sink_id, segment, run_id, set_aside=set_aside)
                            for segment in group
                        )
            progress(ReplayedRange(row.range, len(segments), messages))
    finally:
        sink.close()


def _groups(
    segments: list[SegmentRow], reprocessing: Reprocessing | None
) -> Generator[list[SegmentRow]]:
    """Yield the segments of a range as they are to be sent, in one or several groups."""
    if reprocessing is None:
        yield segments
    else:
        yield from reprocessing.groups(segments)


def verify(store: StateStore, journal: Journal, pipeline: str, number: int) -> int:
    """Check a closed range's files, checksums and contiguity; return the number of its events.

    Raises:
        JournalDamaged: A file is missing or differs, or segments do not follow one another.
        NotAllowed: There is no such range, or it is open.
    """
    row = closed_range(store, pipeline, number)
    segments = store.segments.read(pipeline, first=row.first_segment, last=row.last_segment)
    check_contiguous(row, segments)
    for segment in segments:
        journal.verify(segment)
        if segment.processed_path:
            journal.verify(segment.delivered)
    return sum(segment.rows for segment in segments)


def check_contiguous(row: RangeRow, segments: Sequence[SegmentRow]) -> None:
    """Raise `JournalDamaged` unless the segments are exactly those of the range, in order."""
    numbers = [segment.segment for segment in segments]
    if numbers != list(range(row.first_segment, row.last_segment + 1)):
        raise JournalDamaged(
            f"range {row.range}: segments {row.first_segment} to {row.last_segment} expected, "
            f"{len(numbers)} of them found"
        )


class Reprocessing:
    """Processes a pipeline's segments with the processors that its file has now.

    Args:
        spec: The pipeline; without processors its segments stay as captured.
        store: Lists the segments.
        journal: Holds the segments and the output.
        sessions: Provides the Spark session.
        run_id: Id of the run, to which the state of scripts belongs.
    """

    def __init__(
        self,
        spec: PipelineSpec,
        store: StateStore,
        journal: Journal,
        sessions: SessionProvider,
        run_id: str,
    ) -> None:
        self._pipeline = spec.metadata.name
        self._chain = chain_of(spec)
        self._max_bytes = spec.spec.engine.deliver.max_bytes
        self._store = store
        self._journal = journal
        self._sessions = sessions
        self._run_id = run_id

    def groups(self, segments: Sequence[SegmentRow]) -> Generator[list[SegmentRow]]:
        """Yield processed segments in order, in groups as large as one Spark job covers.

        The files of a group exist until the next group is requested, or the generator is closed.

        Raises:
            ProcessorFailed: A processor failed.
            SparkUnavailable: Spark failed.
        """
        while segments:
            group = first_together(segments, _SEGMENTS_PER_JOB, self._max_bytes)
            with self._processed(group) as processed:
                yield processed
            segments = segments[len(group) :]

    @contextmanager
    def _processed(self, rows: Sequence[SegmentRow]) -> Iterator[list[SegmentRow]]:
        if not self._chain.processors:
            yield [replace(row, chain_hash="") for row in rows]
            return
        pipeline, lease = (
            self._store.pipelines.get(self._pipeline),
            self._store.leases.get(self._pipeline),
        )
        assert pipeline is not None
        job = ProcessingJob(
            self._chain,
            self._run_id,
            self._journal.url,
            self._pipeline,
            pipeline.uid,
            0 if lease is None else lease.epoch,
            [(row.segment, row.path) for row in rows],
        )
        subject = f"segments {rows[0].segment} to {rows[-1].segment}"
        outputs = processed_by(run_job(self._sessions, job, len(rows), len(rows), subject))
        try:
            yield [
                _with_output(row, output).delivered
                for row, output in zip(rows, outputs, strict=True)
            ]
        finally:
            for output in outputs:
                if output.path is not None:
                    self._journal.delete(output.path)


def _with_output(row: SegmentRow, processed: Processed) -> SegmentRow:
    return replace(
        row,
        chain_hash=processed.chain_hash,
        processed_path=processed.path,
        processed_checksum=processed.checksum,
        processed_content_hash=processed.content_hash,
        processed_rows=processed.rows,
        processed_bytes=processed.bytes,
    )


def _send(
    encode_cache: EncodeCache,
    sink: Sink,
    sink_id: str,
    segment: SegmentRow,
    run_id: str,
    *,
    set_aside: bool,
) -> int:
    """Send a segment; `set_aside` leaves out undeliverable changes.

    Return the number of messages.
    """
    messages = ordinal = 0
    while ordinal < segment.rows:
        with encode_cache.covering(sink_id, segment.segment, ordinal) as encoded:
            batches = encoded.batches(sink_id, segment.segment, ordinal - 1, set_aside=set_aside)
            try:
                for batch in batches:
                    if batch.messages.num_rows:
                        sink.send(replace(batch, replay=run_id, refused=()), _unguarded)
                        messages += batch.messages.num_rows
                        encoded.sent(sink_id)
                ordinal = encoded.last_ordinal(segment.segment) + 1
            except Undeliverable as error:
                if not set_aside:
                    raise
                ordinal = error.ordinal + 1
    return messages


def _unguarded() -> None:
    """Allow every send: a replay holds no lease."""
