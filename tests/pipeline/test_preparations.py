"""Who shares a preparation, and when its files go."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import pytest

from deltaforge_dagster.errors import JournalDamaged, SparkUnavailable
from deltaforge_dagster.pipeline.preparations import Preparations
from deltaforge_dagster.pipeline.prepare import Preparer
from deltaforge_dagster.positions import LsnPosition
from deltaforge_dagster.state.records import NewSegment, SegmentRow
from deltaforge_dagster.state.store import StateStore
from tests.pipeline.changes import eventually

SIZE = 100


@dataclass
class Job:
    """What a job made: the segments it covers, and whether its files are gone."""

    first_segment: int
    last_segment: int
    discarded: bool = False

    def discard(self) -> None:
        """Remember it."""
        self.discarded = True


@dataclass
class CountingPreparer:
    """Stands in for Spark, which has nothing to do with sharing: counts jobs, fails on demand."""

    jobs: list[Job] = field(default_factory=list)
    failures: int = 0
    gate: threading.Event = field(default_factory=threading.Event)

    def prepare(self, segments: Sequence[SegmentRow]) -> Job:
        """Make a job for these segments, once the gate is open."""
        assert self.gate.wait(10)
        if self.failures:
            self.failures -= 1
            raise SparkUnavailable("gone")
        self.jobs.append(Job(segments[0].segment, segments[-1].segment))
        return self.jobs[-1]

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


def _segment(number: int) -> NewSegment:
    start, end = LsnPosition(number - 1).to_json(), LsnPosition(number).to_json()
    name = f"s{number}"
    return NewSegment(number, name, name, "c", "h", 1, SIZE, start, end, {}, {}, 1, 1)


@pytest.fixture
def preparer() -> CountingPreparer:
    """A preparer that works at once."""
    made = CountingPreparer()
    made.gate.set()
    return made


@pytest.fixture
def preparations(journaled: StateStore, preparer: CountingPreparer) -> Iterator[Preparations]:
    """Preparations of three segments at most."""
    made = Preparations(cast("Preparer", preparer), journaled, "p", max_bytes=3 * SIZE, sinks=2)
    yield made
    preparer.gate.set()
    made.close()


def test_one_job_covers_what_its_bytes_allow_and_the_next_one_begins(
    preparations: Preparations, preparer: CountingPreparer
) -> None:
    """A deliverer gets three segments, and the following three are prepared while it sends."""
    with preparations.covering(1) as prepared:
        assert (prepared.first_segment, prepared.last_segment) == (1, 3)
        eventually(lambda: preparer.covered() == [(1, 3), (4, 6)])


def test_siblings_share_one_job(preparations: Preparations, preparer: CountingPreparer) -> None:
    """Two deliverers at the same place, or close behind, cause one job."""
    with preparations.covering(1) as one, preparations.covering(2) as other:
        assert one is other
    with preparations.covering(1) as late:
        assert late is one
    eventually(lambda: preparer.covered() == [(1, 3), (4, 6)])


def test_a_sink_far_behind_gets_its_own_job(
    preparations: Preparations, preparer: CountingPreparer
) -> None:
    """Segments that nobody has prepared lately are prepared for the one who needs them."""
    with preparations.covering(8), preparations.covering(1) as behind:
        assert behind.first_segment == 1
    eventually(lambda: (1, 3) in preparer.covered() and (8, 10) in preparer.covered())


def test_a_failed_job_is_made_anew(preparations: Preparations, preparer: CountingPreparer) -> None:
    """The failure reaches who asked; asking again works."""
    preparer.failures = 1
    with pytest.raises(SparkUnavailable), preparations.covering(1):
        pass
    with preparations.covering(1) as prepared:
        assert prepared.first_segment == 1


def test_files_go_once_nobody_needs_them(
    preparations: Preparations, preparer: CountingPreparer
) -> None:
    """Walking through the journal keeps a few unused preparations, and no more."""
    for segment in range(1, 11):
        with preparations.covering(segment):
            pass

    eventually(lambda: preparer.covered() == [(1, 3), (4, 6), (7, 9), (10, 10)])
    assert [job.discarded for job in preparer.jobs] == [True, False, False, False]
    preparations.close()
    assert all(job.discarded for job in preparer.jobs)


def test_closing_waits_for_no_job_and_leaves_none_of_its_files(
    journaled: StateStore, preparer: CountingPreparer
) -> None:
    """A job that is still running when the run ends deletes its files when it is done."""
    preparer.gate.clear()
    made = Preparations(cast("Preparer", preparer), journaled, "p", max_bytes=SIZE, sinks=1)
    asking = threading.Thread(target=_ask, args=(made,), daemon=True)
    asking.start()
    eventually(lambda: made._entries)
    made.close()
    preparer.gate.set()

    eventually(lambda: preparer.jobs and all(job.discarded for job in preparer.jobs))
    asking.join()


def _ask(preparations: Preparations) -> None:
    with preparations.covering(1):
        pass


def test_a_segment_that_is_not_in_the_journal_is_named(preparations: Preparations) -> None:
    """Asking for a segment without a row is an error that names it."""
    with pytest.raises(JournalDamaged, match="segment 11"), preparations.covering(11):
        pass
