"""Who shares an encoded job, and when its files are deleted."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import pytest

from deltaforge_dagster.errors import JournalDamaged, SparkUnavailable
from deltaforge_dagster.pipeline.committed import PendingSegments
from deltaforge_dagster.pipeline.encode.cache import EncodeCache
from deltaforge_dagster.pipeline.encode.encoder import Encoder
from deltaforge_dagster.sources.postgres.position import LsnPosition
from deltaforge_dagster.state.records import Lease, NewSegment, SegmentRow
from deltaforge_dagster.state.store import StateStore
from tests.pipeline.changes import eventually

SIZE = 100


@dataclass
class Job:
    """What a job made: the segments it covers, and whether its files are gone."""

    first_segment: int
    last_segment: int
    ordinals: range | None = None
    discarded: bool = False

    def discard(self) -> None:
        """Remember it."""
        self.discarded = True


@dataclass
class CountingEncoder:
    """Stands in for Spark, which has nothing to do with sharing: counts jobs, fails on demand.

    `free` says for each job how many before it had no use for their files when it began.
    """

    jobs: list[Job] = field(default_factory=list)
    failures: int = 0
    gate: threading.Event = field(default_factory=threading.Event)
    free: list[int] = field(default_factory=list)

    def parts(self, segment: SegmentRow) -> list[range]:
        """Take a segment in parts of ten rows."""
        return [range(n, min(n + 10, segment.rows)) for n in range(0, segment.rows, 10)]

    def encode(self, segments: Sequence[SegmentRow], ordinals: range | None = None) -> Job:
        """Make a job for these segments, once the gate is open."""
        assert self.gate.wait(60)
        if self.failures:
            self.failures -= 1
            raise SparkUnavailable("gone")
        self.free.append(sum(job.discarded for job in self.jobs))
        self.jobs.append(Job(segments[0].segment, segments[-1].segment, ordinals))
        return self.jobs[-1]

    def recycle(self, job: Job) -> None:
        """Keep no files."""
        job.discard()

    def close(self) -> None:
        """Have none."""

    def covered(self) -> list[tuple[int, int]]:
        """Return the first and last segment of each job."""
        return sorted((job.first_segment, job.last_segment) for job in self.jobs)


@pytest.fixture
def journaled(sqlite_store: StateStore) -> StateStore:
    """A store whose journal has ten segments."""
    sqlite_store.pipelines.register("p", "hash", ["s"])
    sqlite_store.pipelines.set_start("p", LsnPosition(0).to_json())
    lease = sqlite_store.leases.acquire("p", "run", 60)
    assert lease is not None
    with sqlite_store.fenced(lease) as writer:
        number = writer.ranges.open(LsnPosition(0).to_json(), "hash", 1)
        for one in range(1, 11):
            writer.segments.add(_segment(one), number)
    return sqlite_store


def _segment(number: int, rows: int = 1) -> NewSegment:
    start, end = LsnPosition(number - 1).to_json(), LsnPosition(number).to_json()
    name = f"s{number}"
    return NewSegment(number, name, name, "c", "h", rows, SIZE, start, end, {}, {}, 1, 1)


@pytest.fixture
def encoder() -> CountingEncoder:
    """A preparer that works at once."""
    made = CountingEncoder()
    made.gate.set()
    return made


@pytest.fixture
def encode_cache(journaled: StateStore, encoder: CountingEncoder) -> Iterator[EncodeCache]:
    """Jobs of three segments at most."""
    made = EncodeCache(
        cast("Encoder", encoder),
        PendingSegments(journaled, "p", chained=False),
        "p",
        max_bytes=3 * SIZE,
        sinks=2,
    )
    yield made
    encoder.gate.set()
    made.close()


def test_one_job_covers_what_its_bytes_allow_and_the_next_one_begins(
    encode_cache: EncodeCache, encoder: CountingEncoder
) -> None:
    """A deliverer gets three segments, and the following three are encoded while it sends."""
    with encode_cache.covering("a", 1, 0) as encoded:
        assert (encoded.first_segment, encoded.last_segment) == (1, 3)
        eventually(lambda: encoder.covered() == [(1, 3), (4, 6)])


def test_what_is_captured_while_a_sink_sends_is_prepared_at_once(
    journaled: StateStore, encode_cache: EncodeCache, encoder: CountingEncoder
) -> None:
    """A sink that had everything does not wait, when it has sent it, for what came meanwhile."""
    with encode_cache.covering("a", 10, 0):
        encode_cache.segment_added()
        with journaled.fenced(Lease("p", "run", 1, 0)) as writer:
            writer.segments.add(_segment(11), 1)
        assert encoder.covered() == [(10, 10)]
        encode_cache.segment_added()
        eventually(lambda: encoder.covered() == [(10, 10), (11, 11)])


def test_more_is_wanted_before_a_sink_has_sent_everything(
    journaled: StateStore, encode_cache: EncodeCache, encoder: CountingEncoder
) -> None:
    """Only while a sink sends the last rows in the journal."""
    assert not encode_cache.wants_more
    with encode_cache.covering("a", 7, 0):
        eventually(lambda: encoder.covered() == [(7, 9), (10, 10)])
        assert not encode_cache.wants_more
    with encode_cache.covering("a", 10, 0):
        eventually(lambda: encode_cache.wants_more)
        encoder.gate.clear()
        with journaled.fenced(Lease("p", "run", 1, 0)) as writer:
            writer.segments.add(_segment(11), 1)
        encode_cache.segment_added()
        assert not encode_cache.wants_more
        encoder.gate.set()
        eventually(lambda: encoder.covered() == [(7, 9), (10, 10), (11, 11)])
        assert not encode_cache.wants_more
    assert not encode_cache.wants_more


def test_siblings_share_one_job(encode_cache: EncodeCache, encoder: CountingEncoder) -> None:
    """Two deliverers at the same place, or close behind, cause one job."""
    with encode_cache.covering("a", 1, 0) as one, encode_cache.covering("b", 2, 0) as other:
        assert one is other
    with encode_cache.covering("c", 1, 0) as late:
        assert late is one
    eventually(lambda: encoder.covered() == [(1, 3), (4, 6)])


def test_a_sink_far_behind_gets_its_own_job(
    encode_cache: EncodeCache, encoder: CountingEncoder
) -> None:
    """Segments that are not in the cache are encoded for the sink that needs them."""
    with encode_cache.covering("a", 8, 0), encode_cache.covering("b", 1, 0) as behind:
        assert behind.first_segment == 1
    eventually(lambda: (1, 3) in encoder.covered() and (8, 10) in encoder.covered())


def test_a_failed_job_is_recreated(encode_cache: EncodeCache, encoder: CountingEncoder) -> None:
    """The failure reaches who asked; asking again works."""
    encoder.failures = 1
    with pytest.raises(SparkUnavailable), encode_cache.covering("a", 1, 0):
        pass
    with encode_cache.covering("a", 1, 0) as encoded:
        assert encoded.first_segment == 1


def test_files_go_once_nobody_needs_them(
    encode_cache: EncodeCache, encoder: CountingEncoder
) -> None:
    """They wait for a sibling close behind; what all have passed goes at once."""
    with encode_cache.covering("behind", 1, 0):
        pass
    for segment in range(1, 7):
        with encode_cache.covering("ahead", segment, 0):
            pass
    eventually(lambda: encoder.covered() == [(1, 3), (4, 6), (7, 9)])
    assert not any(job.discarded for job in encoder.jobs)

    with encode_cache.covering("behind", 7, 0), encode_cache.covering("ahead", 7, 0):
        eventually(lambda: [job.discarded for job in encoder.jobs[:3]] == [True, True, False])
    eventually(lambda: len(encoder.jobs) == 4)
    encode_cache.close()
    eventually(lambda: all(job.discarded for job in encoder.jobs))


def test_the_files_of_one_job_are_free_for_the_next_but_one(
    encode_cache: EncodeCache, encoder: CountingEncoder
) -> None:
    """What a sink has passed goes before the next job begins, which can write over it."""
    for segment, jobs in ((1, 2), (4, 3), (7, 4)):
        with encode_cache.covering("a", segment, 0):
            eventually(lambda jobs=jobs: len(encoder.jobs) == jobs)  # type: ignore[misc]
    assert encoder.free == [0, 0, 1, 2]


def test_a_sink_that_hangs_keeps_no_more_than_a_few(
    encode_cache: EncodeCache, encoder: CountingEncoder
) -> None:
    """However far its siblings get, one unused job for each and one more are kept."""
    encode_cache._max_bytes = SIZE
    with encode_cache.covering("hangs", 1, 0):
        for segment in range(1, 11):
            with encode_cache.covering("ahead", segment, 0):
                pass
        eventually(lambda: len(encoder.jobs) == 10)
        with encode_cache.covering("ahead", 10, 0):
            pass
        kept = [job.first_segment for job in encoder.jobs if not job.discarded]
    assert kept == [1, 8, 9, 10]


def test_a_large_segment_is_taken_in_parts(
    journaled: StateStore, encode_cache: EncodeCache, encoder: CountingEncoder
) -> None:
    """Each part is a job of its own, the next one begun ahead; the segments after it share one."""
    with journaled.fenced(Lease("p", "run", 1, 0)) as writer:
        writer.segments.add(_segment(11, rows=25), 1)
        writer.segments.add(_segment(12), 1)

    with encode_cache.covering("a", 10, 0) as before:
        assert before.last_segment == 10
    for ordinal, part in ((0, range(10)), (9, range(10)), (10, range(10, 20)), (24, range(20, 25))):
        with encode_cache.covering("a", 11, ordinal) as encoded:
            assert cast("Job", encoded).ordinals == part

    eventually(lambda: len(encoder.jobs) == 5)
    assert [(job.first_segment, job.ordinals) for job in encoder.jobs] == [
        (10, None),
        (11, range(10)),
        (11, range(10, 20)),
        (11, range(20, 25)),
        (12, None),
    ]
    assert [job.discarded for job in encoder.jobs] == [True, True, True, False, False]


def test_closing_waits_for_no_job_and_leaves_none_of_its_files(
    journaled: StateStore, encoder: CountingEncoder
) -> None:
    """A job that is still running when the run ends deletes its files when it is done."""
    encoder.gate.clear()
    made = EncodeCache(
        cast("Encoder", encoder),
        PendingSegments(journaled, "p", chained=False),
        "p",
        max_bytes=SIZE,
        sinks=1,
    )
    asking = threading.Thread(target=_ask, args=(made,), daemon=True)
    asking.start()
    eventually(lambda: made._entries)
    made.close()
    encoder.gate.set()

    eventually(lambda: encoder.jobs and all(job.discarded for job in encoder.jobs))
    asking.join()


def _ask(encode_cache: EncodeCache) -> None:
    with encode_cache.covering("a", 1, 0):
        pass


def test_a_segment_that_is_not_in_the_journal_is_named(encode_cache: EncodeCache) -> None:
    """Asking for a segment without a row is an error that names it."""
    with pytest.raises(JournalDamaged, match="segment 11"), encode_cache.covering("a", 11, 0):
        pass
