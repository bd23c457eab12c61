"""Prepared segments, shared: one Spark job serves every sink that needs the same segments.

A deliverer asks for the segment it needs next and gets a preparation that covers it and as many
following ones as `deliver.max_bytes` allows; while it sends, the next preparation is already
being made. Siblings at the tail get the same one. A preparation lives while a deliverer uses it
and a little longer, so that a sibling close behind finds it; a sink that is far behind gets its
own, and holds back nobody's files.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from deltaforge_dagster.errors import JournalDamaged, SparkUnavailable
from deltaforge_dagster.pipeline.failpoints import failpoint
from deltaforge_dagster.pipeline.prepare import Prepared, Preparer
from deltaforge_dagster.state.records import SegmentRow
from deltaforge_dagster.state.store import StateStore

_SEGMENTS_PER_JOB = 64


@dataclass(slots=True)
class _Entry:
    first: int
    last: int
    future: Future[Prepared]
    users: int = 0
    used: int = 0


class Preparations:
    """The preparations of one run.

    Args:
        preparer: Makes them; called from a thread of ours.
        store: Where the segments are listed.
        pipeline: Name of the pipeline.
        max_bytes: Bytes of segment files one Spark job may cover, except a single larger one.
        sinks: How many deliverers ask; one unused preparation for each, and one more, is kept.
    """

    def __init__(
        self, preparer: Preparer, store: StateStore, pipeline: str, max_bytes: int, sinks: int
    ) -> None:
        self._preparer = preparer
        self._store = store
        self._pipeline = pipeline
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: list[_Entry] = []
        self._clock = 0
        self._closed = False
        self._keep = sinks + 1
        self._pool = ThreadPoolExecutor(max(2, sinks), thread_name_prefix=f"prepare {pipeline}")

    @contextmanager
    def covering(self, segment: int) -> Iterator[Prepared]:
        """Lend the preparation that covers `segment`, and begin the one after it.

        Raises:
            Retryable: Spark failed; asking again makes a new preparation.
            JournalDamaged: The segment is not in the journal.
        """
        entry = self._entry(segment)
        if entry is None:
            raise JournalDamaged(f"{self._pipeline}: segment {segment} is not in the journal")
        try:
            prepared = self._result(entry)
            with contextlib.suppress(SparkUnavailable):  # closed meanwhile: nothing to begin
                self._release(self._entry(entry.last + 1))
            yield prepared
        finally:
            self._release(entry)

    def close(self) -> None:
        """Delete every file, those of running jobs when they end; does not wait for these."""
        with self._lock:
            self._closed = True
            self._pool.shutdown(wait=False, cancel_futures=True)
            entries, self._entries = self._entries, []
        for entry in entries:
            entry.future.add_done_callback(_discard)

    def _result(self, entry: _Entry) -> Prepared:
        try:
            return entry.future.result()
        except CancelledError:
            raise SparkUnavailable(f"{self._pipeline}: the run is ending") from None

    def _entry(self, segment: int) -> _Entry | None:
        """Return the entry that covers `segment`, in use; None when there is no such segment."""
        with self._lock:
            if self._closed:
                raise SparkUnavailable(f"{self._pipeline}: the run is ending")
            for entry in self._entries:
                if entry.first <= segment <= entry.last and not _failed(entry):
                    entry.users += 1
                    return entry
            segments = self._batch_from(segment)
            if not segments:
                return None
            future = self._pool.submit(self._prepare, segments)
            entry = _Entry(segments[0].segment, segments[-1].segment, future, users=1)
            self._entries.append(entry)
            return entry

    def _batch_from(self, segment: int) -> list[SegmentRow]:
        rows = self._store.segments(self._pipeline, first=segment, limit=_SEGMENTS_PER_JOB)
        if not rows or rows[0].segment != segment:
            return []
        total = 0
        for count, row in enumerate(rows):
            total += row.bytes
            if count and total > self._max_bytes:
                return rows[:count]
        return rows

    def _prepare(self, segments: list[SegmentRow]) -> Prepared:
        prepared = self._preparer.prepare(segments)
        failpoint("segment-prepared")
        return prepared

    def _release(self, entry: _Entry | None) -> None:
        if entry is None:
            return
        with self._lock:
            entry.users -= 1
            self._clock += 1
            entry.used = self._clock
            idle = sorted(
                (one for one in self._entries if not one.users and one.future.done()),
                key=lambda one: (not _failed(one), one.used),
            )
            spare = [one for one in idle if _failed(one)]
            spare += idle[len(spare) : max(len(spare), len(idle) - self._keep)]
            self._entries = [one for one in self._entries if one not in spare]
        for one in spare:
            _discard(one.future)


def _failed(entry: _Entry) -> bool:
    return entry.future.done() and not _succeeded(entry.future)


def _succeeded(future: Future[Prepared]) -> bool:
    return not future.cancelled() and future.exception() is None


def _discard(future: Future[Prepared]) -> None:
    """Delete the files of a job that is done, if it made any."""
    if _succeeded(future):
        future.result().discard()
