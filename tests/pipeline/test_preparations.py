"""Who shares a preparation, and when its files go."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import pytest

from deltaforge_dagster.errors import JournalDamaged, SparkUnavailable
from deltaforge_dagster.pipeline.pending_segments import PendingSegments
from deltaforge_dagster.pipeline.preparations import Preparations
from deltaforge_dagster.pipeline.prepare import Preparer
from deltaforge_dagster.positions import LsnPosition
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
class CountingPreparer:
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

    def prepare(self, segments: Sequence[SegmentRow], ordinals: range | None = None) -> Job:
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
    sqlite_store.register_pipeline("p", "hash", ["s"])
    sqlite_store.set_start("p", LsnPosition(0).to_json())
    lease = sqlite_store.acquire_lease("p", "run", 60)
    assert lease is not None
    with sqlite_store.fenced(lease) as writer:
        number = writer.open_range(LsnPosition(0).to_json(), "hash", 1)
        for one in range(1, 11):
            writer.add_segment(_segment(one), number)
    return sqlite_store


def _segment(number: int, rows: int = 1) -> NewSegment:
    start, end = LsnPosition(number - 1).to_json(), LsnPosition(number).to_json()
    name = f"s{number}"
    return NewSegment(number, name, name, "c", "h", rows, SIZE, start, end, {}, {}, 1, 1)


@pytest.fixture
def preparer() -> CountingPreparer:
    """A preparer that works at once."""
    made = CountingPreparer()
    made.gate.set()
    return made


@pytest.fixture
def preparations(journaled: StateStore, preparer: CountingPreparer) -> Iterator[Preparations]:
    """Preparations of three segments at most."""
    made = Preparations(
        cast("Preparer", preparer),
        PendingSegments(journaled, "p", chained=False),
        "p",
        max_bytes=3 * SIZE,
        sinks=2,
    )
    yield made
    preparer.gate.set()
    made.close()


def test_one_job_covers_what_its_bytes_allow_and_the_next_one_begins(
    preparations: Preparations, preparer: CountingPreparer
) -> None:
    """A deliverer gets three segments, and the following three are prepared while it sends."""
    with preparations.covering("a", 1, 0) as prepared:
        assert (prepared.first_segment, prepared.last_segment) == (1, 3)
        eventually(lambda: preparer.covered() == [(1, 3), (4, 6)])


def test_what_is_captured_while_a_sink_sends_is_prepared_at_once(
    journaled: StateStore, preparations: Preparations, preparer: CountingPreparer
) -> None:
    """A sink that had everything does not wait, when it has sent it, for what came meanwhile."""
    with preparations.covering("a", 10, 0):
        preparations.segment_added()
        with journaled.fenced(Lease("p", "run", 1, 0)) as writer:
            writer.add_segment(_segment(11), 1)
        assert preparer.covered() == [(10, 10)]
        preparations.segment_added()
        eventually(lambda: preparer.covered() == [(10, 10), (11, 11)])


def test_siblings_share_one_job(preparations: Preparations, preparer: CountingPreparer) -> None:
    """Two deliverers at the same place, or close behind, cause one job."""
    with preparations.covering("a", 1, 0) as one, preparations.covering("b", 2, 0) as other:
        assert one is other
    with preparations.covering("c", 1, 0) as late:
        assert late is one
    eventually(lambda: preparer.covered() == [(1, 3), (4, 6)])


def test_a_sink_far_behind_gets_its_own_job(
    preparations: Preparations, preparer: CountingPreparer
) -> None:
    """Segments that nobody has prepared lately are prepared for the one who needs them."""
    with preparations.covering("a", 8, 0), preparations.covering("b", 1, 0) as behind:
        assert behind.first_segment == 1
    eventually(lambda: (1, 3) in preparer.covered() and (8, 10) in preparer.covered())


def test_a_failed_job_is_made_anew(preparations: Preparations, preparer: CountingPreparer) -> None:
    """The failure reaches who asked; asking again works."""
    preparer.failures = 1
    with pytest.raises(SparkUnavailable), preparations.covering("a", 1, 0):
        pass
    with preparations.covering("a", 1, 0) as prepared:
        assert prepared.first_segment == 1


def test_files_go_once_nobody_needs_them(
    preparations: Preparations, preparer: CountingPreparer
) -> None:
    """They wait for a sibling close behind; what all have passed goes at once."""
    with preparations.covering("behind", 1, 0):
        pass
    for segment in range(1, 7):
        with preparations.covering("ahead", segment, 0):
            pass
    eventually(lambda: preparer.covered() == [(1, 3), (4, 6), (7, 9)])
    assert not any(job.discarded for job in preparer.jobs)

    with preparations.covering("behind", 7, 0), preparations.covering("ahead", 7, 0):
        eventually(lambda: [job.discarded for job in preparer.jobs[:3]] == [True, True, False])
    eventually(lambda: len(preparer.jobs) == 4)
    preparations.close()
    eventually(lambda: all(job.discarded for job in preparer.jobs))


def test_the_files_of_one_job_are_free_for_the_next_but_one(
    preparations: Preparations, preparer: CountingPreparer
) -> None:
    """What a sink has passed goes before the next job begins, which can write over it."""
    for segment, jobs in ((1, 2), (4, 3), (7, 4)):
        with preparations.covering("a", segment, 0):
            eventually(lambda jobs=jobs: len(preparer.jobs) == jobs)  # type: ignore[misc]
    assert preparer.free == [0, 0, 1, 2]


def test_a_sink_that_hangs_keeps_no_more_than_a_few(
    preparations: Preparations, preparer: CountingPreparer
) -> None:
    """However far its siblings get, one unused preparation for each and one more are kept."""
    preparations._max_bytes = SIZE
    with preparations.covering("hangs", 1, 0):
        for segment in range(1, 11):
            with preparations.covering("ahead", segment, 0):
                pass
        eventually(lambda: len(preparer.jobs) == 10)
        with preparations.covering("ahead", 10, 0):
            pass
        kept = [job.first_segment for job in preparer.jobs if not job.discarded]
    assert kept == [1, 8, 9, 10]


def test_a_large_segment_is_taken_in_parts(
    journaled: StateStore, preparations: Preparations, preparer: CountingPreparer
) -> None:
    """Each part is a job of its own, the next one begun ahead; the segments after it share one."""
    with journaled.fenced(Lease("p", "run", 1, 0)) as writer:
        writer.add_segment(_segment(11, rows=25), 1)
        writer.add_segment(_segment(12), 1)

    with preparations.covering("a", 10, 0) as before:
        assert before.last_segment == 10
    for ordinal, part in ((0, range(10)), (9, range(10)), (10, range(10, 20)), (24, range(20, 25))):
        with preparations.covering("a", 11, ordinal) as prepared:
            assert cast("Job", prepared).ordinals == part

    eventually(lambda: len(preparer.jobs) == 5)
    assert [(job.first_segment, job.ordinals) for job in preparer.jobs] == [
        (10, None),
        (11, range(10)),
        (11, range(10, 20)),
        (11, range(20, 25)),
        (12, None),
    ]
    assert [job.discarded for job in preparer.jobs] == [True, True, True, False, False]


def test_closing_waits_for_no_job_and_leaves_none_of_its_files(
    journaled: StateStore, preparer: CountingPreparer
) -> None:
    """A job that is still running when the run ends deletes its files when it is done."""
    preparer.gate.clear()
    made = Preparations(
        cast("Preparer", preparer),
        PendingSegments(journaled, "p", chained=False),
        "p",
        max_bytes=SIZE,
        sinks=1,
    )
    asking = threading.Thread(target=_ask, args=(made,), daemon=True)
    asking.start()
    eventually(lambda: made._entries)
    made.close()
    preparer.gate.set()

    eventually(lambda: preparer.jobs and all(job.discarded for job in preparer.jobs))
    asking.join()


def _ask(preparations: Preparations) -> None:
    with preparations.covering("a", 1, 0):
        pass


def test_a_segment_that_is_not_in_the_journal_is_named(preparations: Preparations) -> None:
    """Asking for a segment without a row is an error that names it."""
    with pytest.raises(JournalDamaged, match="segment 11"), preparations.covering("a", 11, 0):
        pass
