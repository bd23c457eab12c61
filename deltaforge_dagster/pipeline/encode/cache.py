"""Encode cache: one Spark job serves all sinks that need the same segments.

A deliverer asks for the row that it needs next and gets an entry that covers it: the segment of the
row and as many following ones as `deliver.max_bytes` allows, or one part of an unusually large
segment (`Encoder.parts`). While the deliverer sends, the next entry is being encoded, at the latest
when its first segment is captured. Sinks at the end of the journal share their entries. An entry is
kept until every deliverer has passed it. A sink that is far behind gets entries of its own, and
keeps the files of others only for a short time.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from deltaforge_dagster.errors import DeltaforgeError, JournalDamaged, SparkUnavailable
from deltaforge_dagster.pipeline.committed import Segments
from deltaforge_dagster.pipeline.encode.encoder import Encoder
from deltaforge_dagster.pipeline.encode.segments import EncodedSegments
from deltaforge_dagster.pipeline.failpoints import failpoint
from deltaforge_dagster.state.records import SegmentRow

_SEGMENTS_PER_JOB = 64  # a larger job would delay the sink and fill the page cache


_RowAddress = tuple[int, int]
"""Address of a row in the journal: segment and ordinal."""


@dataclass(slots=True)
class _CacheEntry:
    """Encoded rows from `begin` (included) to `end` (excluded)."""

    begin: _RowAddress
    end: _RowAddress
    future: Future[EncodedSegments]
    users: int = 0
    used: int = 0


class EncodeCache:
    """The encoded segments of one run.

    Args:
        encoder: Encodes them; called from a thread pool.
        journal: Lists the segments.
        pipeline: Name of the pipeline.
        max_bytes: Bytes of segment files that one Spark job may cover; a single segment may be
            larger.
        sinks: Number of deliverers. At most this many unused entries, and one more, are kept for
            deliverers that have not passed them.
        last: Nothing after this segment is encoded.
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
        self._entries: list[_CacheEntry] = []
        self._reached: dict[str, _RowAddress] = {}
        self._next: dict[str, _RowAddress] = {}
        self._parts: dict[int, list[range]] = {}
        self._clock = 0
        self._closed = False
        self._max_unused = sinks + 1
        self._pool = ThreadPoolExecutor(max(2, sinks), thread_name_prefix=f"encode {pipeline}")

    @contextmanager
    def covering(self, sink: str, segment: int, ordinal: int) -> Iterator[EncodedSegments]:
        """Lend the entry that covers a row, and start encoding the one after it.

        Args:
            sink: The sink that asks; it has passed everything before this row.
            segment: Segment of the row.
            ordinal: Ordinal of the row.

        Raises:
            Retryable: Spark failed; the next call encodes again.
            JournalDamaged: The segment is not in the journal, or its file cannot be read.
        """
        with self._lock:
            self._reached[sink] = (segment, ordinal)
            self._let_go()  # first, so that the job started below can overwrite the dropped files
        cached = self._acquire((segment, ordinal))
        if cached is None:
            raise JournalDamaged(f"{self._pipeline}: segment {segment} is not in the journal")
        try:
            encoded = self._result(cached)
            with self._lock:
                self._next[sink] = cached.end
            self._begin(cached.end)
            yield encoded
        finally:
            with self._lock:
                self._next.pop(sink, None)
            self._release(cached)

    def segment_added(self) -> None:
        """Start encoding what a sending deliverer needs next, if the journal has it only now."""
        with self._lock:
            addresses = set(self._next.values())
        for address in addresses:
            self._begin(address)

    @property
    def wants_more(self) -> bool:
        """Whether a sink is sent the journal's last rows and nothing later is being encoded."""
        with self._lock:
            return any(self._find(address) is None for address in self._next.values())

    def close(self) -> None:
        """Delete all files, without waiting for running jobs.

        The files of running jobs are deleted when the jobs end.
        """
        with self._lock:
            self._closed = True
            self._pool.shutdown(wait=False, cancel_futures=True)
            entries, self._entries = self._entries, []
        for cached in entries:
            cached.future.add_done_callback(_discard)
        self._encoder.close()

    def _begin(self, address: _RowAddress) -> None:
        """Start encoding the entry that covers a row, if the row is in the journal."""
        with contextlib.suppress(DeltaforgeError):  # the deliverer that needs it gets the error
            self._release(self._acquire(address))

    def _result(self, cached: _CacheEntry) -> EncodedSegments:
        try:
            return cached.future.result()
        except CancelledError:
            raise SparkUnavailable(f"{self._pipeline}: the run is ending") from None

    def _acquire(self, address: _RowAddress) -> _CacheEntry | None:
        """Return the entry that covers a row, marked as used; None if there is no such segment."""
        with self._lock:
            if self._closed:
                raise SparkUnavailable(f"{self._pipeline}: the run is ending")
            if (cached := self._find(address)) is not None:
                cached.users += 1
                return cached
            segments = self._batch_from(address[0])
            if not segments:
                return None
            begin, end, ordinals = self._extent(segments, address)
            future = self._pool.submit(self._encode, segments, ordinals)
            cached = _CacheEntry(begin, end, future, users=1)
            self._entries.append(cached)
            return cached

    def _find(self, address: _RowAddress) -> _CacheEntry | None:
        """Return the entry that covers a row and has not failed, or None.

        Call this with the lock held.
        """
        for cached in self._entries:
            if cached.begin <= address < cached.end and not _failed(cached):
                return cached
        return None

    def _batch_from(self, segment: int) -> list[SegmentRow]:
        """Return the segments of one job: as many as its bytes allow, or one encoded in parts."""
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
        self, segments: list[SegmentRow], address: _RowAddress
    ) -> tuple[_RowAddress, _RowAddress, range | None]:
        first, last = segments[0], segments[-1]
        for part in self._parts_of(first):
            if address[1] in part and len(part) < first.rows:
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
        failpoint("segment-encoded")
        return encoded

    def _release(self, cached: _CacheEntry | None) -> None:
        if cached is None:
            return
        with self._lock:
            cached.users -= 1
            self._clock += 1
            cached.used = self._clock
            self._let_go()

    def _let_go(self) -> None:
        """Drop entries that nobody uses or needs any more; call with the lock held."""
        passed = min(self._reached.values(), default=(0, 0))
        idle = sorted(
            (cached for cached in self._entries if not cached.users and cached.future.done()),
            key=lambda cached: cached.used,
        )
        needed = [cached for cached in idle if not _failed(cached) and passed < cached.end]
        kept = needed[-self._max_unused :]
        spare = [cached for cached in idle if cached not in kept]
        self._entries = [cached for cached in self._entries if cached not in spare]
        for cached in spare:
            if not _failed(cached):
                self._encoder.recycle(cached.future.result())


def _failed(cached: _CacheEntry) -> bool:
    return cached.future.done() and not _succeeded(cached.future)


def _succeeded(future: Future[EncodedSegments]) -> bool:
    return not future.cancelled() and future.exception() is None


def _discard(future: Future[EncodedSegments]) -> None:
    """Delete the files of a finished job, if it succeeded."""
    if _succeeded(future):
        future.result().discard()
