"""Prepared segments, shared: one Spark job serves every sink that needs the same segments.

A deliverer asks for the row it needs next and gets a preparation that covers it: its segment and
as many following ones as `deliver.max_bytes` allows, or one part of a segment that is larger than
segments usually are (`Encoder.parts`). While it sends, the next preparation is already being
made, at the latest when its first segment is captured. Siblings at the tail get the same one. A preparation lives until every deliverer has passed
it; a sink that is far behind gets its own, and holds back nobody's files for long.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from deltaforge_dagster.errors import DeltaforgeError, JournalDamaged, SparkUnavailable
from deltaforge_dagster.pipeline.encoded_segments import EncodedSegments
from deltaforge_dagster.pipeline.encoder import Encoder
from deltaforge_dagster.pipeline.failpoints import failpoint
from deltaforge_dagster.pipeline.pending_segments import Segments
from deltaforge_dagster.state.records import SegmentRow

_SEGMENTS_PER_JOB = 64


_Place = tuple[int, int]
"""A row of the journal: segment and ordinal."""


@dataclass(slots=True)
class _Entry:
    """A preparation of the rows from `begin` up to, and without, `end`."""

    begin: _Place
    end: _Place
    future: Future[EncodedSegments]
    users: int = 0
    used: int = 0


class EncodeCache:
    """The preparations of one run.

    Args:
        encoder: Makes them; called from a thread of ours.
        journal: The segments.
        pipeline: Name of the pipeline.
        max_bytes: Bytes of segment files one Spark job may cover, except a single larger one.
        sinks: How many deliverers ask; at most one unused preparation for each, and one more, is
            kept for those that have not passed it.
        last: Nothing after this segment is prepared.
    """

    def __init__(
        self,
        encoder: Encoder,
        journal: Segments,
        pipeline: str,
        max_bytes: int,
        sinks: int,
        *,
        last: int | None = None,
    ) -> None:
        self._encoder = encoder
        self._journal = journal
        self._pipeline = pipeline
        self._max_bytes = max_bytes
        self._last = last
        self._lock = threading.Lock()
        self._entries: list[_Entry] = []
        self._reached: dict[str, _Place] = {}
        self._next: dict[str, _Place] = {}
        self._parts: dict[int, list[range]] = {}
        self._clock = 0
        self._closed = False
        self._keep = sinks + 1
        self._pool = ThreadPoolExecutor(max(2, sinks), thread_name_prefix=f"prepare {pipeline}")

    @contextmanager
    def covering(self, sink: str, segment: int, ordinal: int) -> Iterator[EncodedSegments]:
        """Lend the preparation that covers a row, and begin the one after it.

        Args:
            sink: Who asks; it has passed everything before that row.
            segment: The row's segment.
            ordinal: The row.

        Raises:
            Retryable: Spark failed; asking again makes a new preparation.
            JournalDamaged: The segment is not in the journal, or its file cannot be read.
        """
        with self._lock:
            self._reached[sink] = (segment, ordinal)
            self._let_go()  # first, so that the job begun below can write over its files
        entry = self._entry((segment, ordinal))
        if entry is None:
            raise JournalDamaged(f"{self._pipeline}: segment {segment} is not in the journal")
        try:
            encoded = self._result(entry)
            with self._lock:
                self._next[sink] = entry.end
            self._begin(entry.end)
            yield encoded
        finally:
            with self._lock:
                self._next.pop(sink, None)
            self._release(entry)

    def segment_added(self) -> None:
        """Begin what somebody who is sending needs next, if the journal had not got there."""
        with self._lock:
            places = set(self._next.values())
        for place in places:
            self._begin(place)

    def close(self) -> None:
        """Delete every file, those of running jobs when they end; does not wait for these."""
        with self._lock:
            self._closed = True
            self._pool.shutdown(wait=False, cancel_futures=True)
            entries, self._entries = self._entries, []
        for entry in entries:
            entry.future.add_done_callback(_discard)
        self._encoder.close()

    def _begin(self, place: _Place) -> None:
        """Have the preparation that covers a row made, if there is such a row yet."""
        with contextlib.suppress(DeltaforgeError):  # whoever needs it will hear of it
            self._release(self._entry(place))

    def _result(self, entry: _Entry) -> EncodedSegments:
        try:
            return entry.future.result()
        except CancelledError:
            raise SparkUnavailable(f"{self._pipeline}: the run is ending") from None

    def _entry(self, place: _Place) -> _Entry | None:
        """Return the entry that covers a row, in use; None when there is no such segment."""
        with self._lock:
            if self._closed:
                raise SparkUnavailable(f"{self._pipeline}: the run is ending")
            for entry in self._entries:
                if entry.begin <= place < entry.end and not _failed(entry):
                    entry.users += 1
                    return entry
            segments = self._batch_from(place[0])
            if not segments:
                return None
            begin, end, ordinals = self._extent(segments, place)
            future = self._pool.submit(self._encode, segments, ordinals)
            entry = _Entry(begin, end, future, users=1)
            self._entries.append(entry)
            return entry

    def _batch_from(self, segment: int) -> list[SegmentRow]:
        """Return what one job covers: segments that fit its bytes, or one taken in parts."""
        rows = self._journal.segments(first=segment, last=self._last, limit=_SEGMENTS_PER_JOB)
        if not rows or rows[0].segment != segment:
            return []
        total = 0
        for count, row in enumerate(rows):
            total += row.bytes
            if count and (total > self._max_bytes or len(self._parts_of(row)) > 1):
                return rows[:count]
            if len(self._parts_of(row)) > 1:
                return [row]
        return rows

    def _extent(
        self, segments: list[SegmentRow], place: _Place
    ) -> tuple[_Place, _Place, range | None]:
        first, last = segments[0], segments[-1]
        for part in self._parts_of(first):
            if place[1] in part and len(part) < first.rows:
                begin, stop = (first.segment, part.start), part.stop
                end = (first.segment, stop) if stop < first.rows else (first.segment + 1, 0)
                return begin, end, part
        return (first.segment, 0), (last.segment + 1, 0), None

    def _parts_of(self, row: SegmentRow) -> list[range]:
        if row.segment not in self._parts:
            if len(self._parts) > 4 * _SEGMENTS_PER_JOB:
                self._parts.clear()
            self._parts[row.segment] = self._encoder.parts(row)
        return self._parts[row.segment]

    def _encode(self, segments: list[SegmentRow], ordinals: range | None) -> EncodedSegments:
        encoded = self._encoder.encode(segments, ordinals)
        failpoint("segment-prepared")
        return encoded

    def _release(self, entry: _Entry | None) -> None:
        if entry is None:
            return
        with self._lock:
            entry.users -= 1
            self._clock += 1
            entry.used = self._clock
            self._let_go()

    def _let_go(self) -> None:
        """Drop what nobody uses or needs any more; called with the lock."""
        passed = min(self._reached.values(), default=(0, 0))
        idle = sorted(
            (one for one in self._entries if not one.users and one.future.done()),
            key=lambda one: one.used,
        )
        needed = [one for one in idle if not _failed(one) and passed < one.end]
        kept = needed[-self._keep :]
        spare = [one for one in idle if one not in kept]
        self._entries = [one for one in self._entries if one not in spare]
        for one in spare:
            if not _failed(one):
                self._encoder.recycle(one.future.result())


def _failed(entry: _Entry) -> bool:
    return entry.future.done() and not _succeeded(entry.future)


def _succeeded(future: Future[EncodedSegments]) -> bool:
    return not future.cancelled() and future.exception() is None


def _discard(future: Future[EncodedSegments]) -> None:
    """Delete the files of a job that is done, if it made any."""
    if _succeeded(future):
        future.result().discard()
