"""What looks at the source's log say together, and when it is about to be lost."""

from __future__ import annotations

import dataclasses
import math

import pytest

from deltaforge_dagster.pipeline.control.unread_log import (
    behind_since,
    growth,
    kept_looks,
    measured_log,
)
from deltaforge_dagster.sources.base import RetainedLog
from deltaforge_dagster.sources.postgres.position import LsnPosition
from deltaforge_dagster.state.records import LogLook, SourceLog
from deltaforge_dagster.state.store import StateStore
from tests.state.make import NAME, held

MIB = 1 << 20


def look(at: float, end: int, retained: int | None = None) -> LogLook:
    """Return a look at a log that ends at an LSN."""
    return LogLook(at, LsnPosition(end).to_json(), retained)


def test_since_when_a_position_is_behind() -> None:
    """Since the last look that found it at the end; since the first one if none did."""
    looks = [look(10, 100), look(20, 200), look(30, 300), look(40, 300)]

    assert behind_since(looks, LsnPosition(300)) is None
    assert behind_since(looks, LsnPosition(299)) == 20
    assert behind_since(looks, LsnPosition(100)) == 10
    assert behind_since(looks, LsnPosition(99)) == 10
    assert behind_since([], LsnPosition(99)) is None


def test_growth_is_not_what_goes_up_and_down() -> None:
    """A server frees log in steps: the least amount of each half counts, not the first and the last one."""
    steady = [look(at, 0, at * MIB) for at in range(0, 121, 5)]
    assert growth(steady) == pytest.approx(MIB)
    saw = [look(at, 0, (at % 15) * MIB) for at in range(0, 135, 5)]
    assert growth(saw) is None
    rising_saw = [look(at, 0, (at % 15 + at // 15) * MIB) for at in range(0, 135, 5)]
    assert growth(rising_saw) == pytest.approx(MIB / 15, rel=0.3)
    assert growth(steady[::-1]) is None
    assert growth(steady[:2]) is None
    assert growth([look(at, 0) for at in range(0, 121, 5)]) is None
    quiet_before = [look(at, 0, 0) for at in range(0, 3600, 5)]
    assert growth([*quiet_before, *(look(3600 + one.at, 0, one.retained) for one in steady)])


def test_few_looks_are_kept() -> None:
    """A few dozen for a month of a position that stands still; ages are right to a quarter all the while."""
    stands_at = LsnPosition(1000)
    looks: list[LogLook] = []
    at = 0.0
    while at < 30 * 86_400:
        at += 5 if at < 3600 else 600
        looks = kept_looks(looks, look(at, round(at)), [stands_at])
        since = behind_since(looks, stands_at)
        if at > 1000:
            assert since is not None
            assert at - 1000 <= at - since <= 1.25 * (at - 1000) + 600
    assert len(looks) < 150
    assert [one.at for one in looks] == sorted(one.at for one in looks)
    looks = kept_looks(looks, look(at + 5, round(at)), [LsnPosition(round(at))])
    looks = kept_looks(looks, look(at + 200, round(at)), [LsnPosition(round(at))])
    assert len(looks) <= 3


class LookedAt:
    """A log that is looked at, by a clock of the test; captured and confirmed is its beginning."""

    def __init__(self) -> None:
        self.found = RetainedLog(LsnPosition(0), 0)
        self.now = 1000.0
        self.looks: list[LogLook] = []

    def after(self, seconds: float, **changed: object) -> SourceLog:
        """Look so many seconds later."""
        self.now += seconds
        self.found = found = dataclasses.replace(self.found, **changed)  # type: ignore[arg-type]
        look = LogLook(self.now, found.end.to_json(), found.retained)
        self.looks = kept_looks(self.looks, look, [LsnPosition(0)])
        seen = SourceLog(self.now)
        return measured_log(seen, found, self.looks, LsnPosition(0), LsnPosition(0))


@pytest.fixture
def looked_at() -> LookedAt:
    """A pipeline at the end of its log."""
    return LookedAt()


def test_time_until_a_slot_is_lost(looked_at: LookedAt) -> None:
    """What is left of the limit by the growth; none below a tenth of the limit, and zero beyond it."""
    seen = [
        looked_at.after(5, end=LsnPosition(at * MIB), bytes=0, retained=at * MIB, limit=256 * MIB)
        for at in range(1, 61)
    ]

    assert [one.seconds_left for one in seen[:25]] == [None] * 25
    left = [one.seconds_left or math.nan for one in seen[25:]]
    assert left == [pytest.approx(5 * (256 - at), rel=0.01) for at in range(26, 61)]
    assert seen[-1].growth == pytest.approx(MIB / 5)
    assert looked_at.after(5, retained=257 * MIB).seconds_left == 0
    unlimited = looked_at.after(5, retained=300 * MIB, limit=None)
    assert (unlimited.seconds_left, unlimited.growth is None) == (None, False)


def test_time_until_a_log_is_purged_by_age(looked_at: LookedAt) -> None:
    """How long it is kept, less the age of what is not captured; nothing while all is captured."""
    kept = {"kept_seconds": 7200.0, "limited_by": "binlog_expire_logs_seconds"}
    assert looked_at.after(5, room=9, **kept).seconds_left is None
    begins = looked_at.after(5, end=LsnPosition(10), bytes=10)
    assert (begins.unread_since, begins.seconds_left) == (1005, 7195)
    later = looked_at.after(3600, end=LsnPosition(20), bytes=20)
    assert (later.unread_since, later.seconds_left) == (1005, 3595)
    assert looked_at.after(7200, bytes=30).seconds_left == 0


def test_a_record_of_an_earlier_version(sqlite_store: StateStore) -> None:
    """Is read: what it does not say is unknown."""
    held(sqlite_store)
    sqlite_store.pipelines.note_source_log(NAME, SourceLog(7.0, 5, retained=9))
    found = sqlite_store.pipelines.source_log(NAME)
    assert found == SourceLog(7.0, 5, retained=9)
    assert sqlite_store.pipelines.log_looks(NAME) == []
