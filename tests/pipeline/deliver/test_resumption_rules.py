"""Where a sink goes on: every row of the rules, and that no undelivered change is ever skipped."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from deltaforge_dagster.errors import PositionLost
from deltaforge_dagster.pipeline.deliver.resumption import (
    JournalEnd,
    JournalPlace,
    SkipSegments,
    SkipToEvent,
    decide,
    find_event,
    find_segment,
)
from deltaforge_dagster.sinks.base import SinkPosition
from deltaforge_dagster.sources.postgres.position import LsnPosition
from deltaforge_dagster.sources.registry import parse_position
from deltaforge_dagster.state.records import CheckpointRow
from tests.chance import examples

UID, INCARNATION = "uid-1", "lineage-1"


def lsn(number: int) -> str:
    """Return the position that ends transaction `number`."""
    return LsnPosition(number, number).to_json()


@dataclass(frozen=True)
class Row:
    """A segment, as its row in the store has it."""

    segment: int
    first: int
    last: int
    events: tuple[str, ...]
    segment_id: str = "id"

    @property
    def rows(self) -> int:
        """How many rows it holds."""
        return len(self.events)

    @property
    def start_position(self) -> str:
        """Where it starts."""
        return lsn(self.first)

    @property
    def end_position(self) -> str:
        """Where it ends."""
        return lsn(self.last)


def checkpoint(**changes: object) -> CheckpointRow:
    """Return a checkpoint in the middle of segment 5, under our incarnation."""
    fields: dict[str, object] = {
        "sink": "redis",
        "segment": 5,
        "ordinal": 3,
        "complete": False,
        "source_position": lsn(40),
        "failures": 0,
        "next_attempt_at": 0.0,
        "last_error": None,
        "updated_at": 0.0,
        "first_segment": 1,
        "incarnation": INCARNATION,
    }
    return CheckpointRow(**{**fields, **changes})  # type: ignore[arg-type]


HELD = SinkPosition(UID, INCARNATION, 5, "id", 3, "e3", lsn(40), lsn(50), "shop")
SEGMENT = Row(5, 40, 50, tuple(f"e{n}" for n in range(10)))
JOURNAL = JournalEnd(UID, "shop", next_segment=8, start=lsn(20))
STAYS = JournalPlace(5, 3, complete=False)
BY_SOURCE = SkipToEvent("e3", LsnPosition(40), LsnPosition(50))


def test_same_place() -> None:
    """What the checkpoint says is what the sink has: nothing moves, also long after retention."""
    assert decide(checkpoint(), HELD, SEGMENT, JOURNAL) == STAYS
    assert decide(checkpoint(), HELD, None, JOURNAL) == STAYS


@pytest.mark.parametrize(("ordinal", "complete"), [(7, False), (9, True)])
def test_newer(ordinal: int, complete: bool) -> None:
    """The checkpoint was not written any more: it advances to what the sink has."""
    held = replace(HELD, ordinal=ordinal)

    assert decide(checkpoint(), held, SEGMENT, JOURNAL) == JournalPlace(5, ordinal, complete)


def test_older() -> None:
    """The sink has lost data that the journal still has: back to what it has."""
    held = replace(HELD, ordinal=1)
    far = replace(HELD, segment=3)

    assert decide(checkpoint(), held, SEGMENT, JOURNAL) == JournalPlace(5, 1, complete=False)
    assert decide(checkpoint(), far, replace(SEGMENT, segment=3), JOURNAL).segment == 3  # type: ignore[union-attr]


@pytest.mark.parametrize("held", [replace(HELD, segment=3), replace(HELD, ordinal=1)])
def test_older_than_the_journal(held: SinkPosition) -> None:
    """What the sink has lost is no longer in the journal: it stops."""
    with pytest.raises(PositionLost, match=r"lost data.*no longer in the journal"):
        decide(checkpoint(complete=True), held, None, JOURNAL)


@pytest.mark.parametrize("incarnation", [None, "lineage-2"])
@pytest.mark.parametrize("overrules", [False, True])
def test_another_incarnation(incarnation: str | None, overrules: bool) -> None:
    """After a reset, or a delivery at least once, an older position of ours means nothing."""
    set_by_hand = checkpoint(incarnation=incarnation, overrules=overrules)
    for held in (HELD, replace(HELD, segment=7), replace(HELD, segment=1)):
        assert decide(set_by_hand, held, SEGMENT, JOURNAL) == STAYS


def test_overruled() -> None:
    """A checkpoint that was set by hand stands against whatever position of others."""
    set_by_hand = checkpoint(incarnation=None, overrules=True)
    for held in (replace(HELD, uid="uid-0"), replace(HELD, uid="uid-0", source="other")):
        assert decide(set_by_hand, held, SEGMENT, JOURNAL) == STAYS


def test_store_recreated() -> None:
    """A new store's checkpoint gives way to a position from before: the source position decides."""
    fresh = checkpoint(segment=0, ordinal=-1, complete=True, incarnation=None)
    held = replace(HELD, uid="uid-0", incarnation="lineage-0")

    assert decide(fresh, held, SEGMENT, JOURNAL) == BY_SOURCE
    assert decide(replace(fresh, incarnation="lineage-2"), held, None, JOURNAL) == BY_SOURCE


@pytest.mark.parametrize("held", [HELD, replace(HELD, segment=6), replace(HELD, segment=9)])
def test_store_restored(held: SinkPosition) -> None:
    """Segments that the store does not know, or knows as others: the source position decides."""
    other = replace(SEGMENT, segment_id="another", segment=held.segment)
    segment = None if held.segment >= JOURNAL.next_segment else other

    assert decide(checkpoint(), held, segment, JOURNAL) == BY_SOURCE


def test_journal_rebuilt() -> None:
    """After a rebuild a position from before it counts if it is as new as the checkpoint was."""
    rebuilt = checkpoint(segment=7, ordinal=-1, complete=True, skip=lsn(50))
    held = replace(HELD, uid="uid-0", start=lsn(50))
    begins = replace(JOURNAL, start=lsn(60))

    assert decide(rebuilt, held, None, begins) == JournalPlace(7, -1, complete=True)
    assert decide(rebuilt, held, None, JOURNAL) == SkipToEvent(
        "e3", LsnPosition(50), LsnPosition(50)
    )
    with pytest.raises(PositionLost, match="begins later"):
        decide(replace(rebuilt, skip=lsn(55)), held, None, begins)
    gone_on = replace(rebuilt, skip=None, overrules=True)
    assert decide(gone_on, held, None, begins) == JournalPlace(7, -1, complete=True)


@pytest.mark.parametrize(
    ("held", "said"),
    [
        (replace(HELD, source="other"), "source 'other'"),
        (replace(HELD, start="?"), "unreadable"),
        (
            replace(
                HELD,
                start='{"file": "b.1", "pos": 4, "gtid_set": null}',
                end='{"file": "b.1", "pos": 9, "gtid_set": null}',
            ),
            "another kind",
        ),
        (replace(HELD, start=lsn(10), end=lsn(19)), "begins later"),
    ],
)
def test_foreign_positions(held: SinkPosition, said: str) -> None:
    """What cannot be found in this source's log stops the sink."""
    with pytest.raises(PositionLost, match=said):
        decide(checkpoint(incarnation=None), replace(held, uid="uid-0"), None, JOURNAL)


# A log of transactions, cut into segments in two ways: by the journal that delivered the first
# events, and by the one that goes on. Event n of all is "e<n>".

TRANSACTIONS = st.lists(st.integers(1, 4), min_size=1, max_size=12)


def cut(sizes: list[int], first: int, ends: set[int]) -> list[Row]:
    """Return the segments of the transactions from `first` on, which end after those in `ends`."""
    rows: list[Row] = []
    events: list[str] = []
    begun = first
    number = sum(sizes[:first])
    for transaction in range(first, len(sizes)):
        events += [f"e{number + n}" for n in range(sizes[transaction])]
        number += sizes[transaction]
        if transaction + 1 in ends or transaction + 1 == len(sizes):
            rows.append(Row(len(rows) + 1, begun, transaction + 1, tuple(events)))
            events, begun = [], transaction + 1
    return rows


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[int], int, int, SinkPosition, list[Row]]:
    """Return the log, how much of it the sink has, where the journal begins, and the rest."""
    sizes = draw(TRANSACTIONS)
    cuts = st.sets(st.integers(1, len(sizes)))
    delivered = draw(st.integers(1, sum(sizes)))
    before = 0
    for row in cut(sizes, 0, draw(cuts)):
        if before + row.rows >= delivered:
            ordinal = delivered - before - 1
            start = row.end_position if ordinal == row.rows - 1 else row.start_position
            break
        before += row.rows
    held = SinkPosition(
        "uid-0", "l-0", row.segment, "id", ordinal, f"e{delivered - 1}", start,
        row.end_position, "shop",
    )  # fmt: skip
    begins = draw(st.integers(0, len(sizes)))
    return sizes, delivered, begins, held, cut(sizes, begins, draw(cuts))


def ordinal_in(segment: object, event_id: str) -> int | None:
    """Return the ordinal of an event in a segment."""
    assert isinstance(segment, Row)
    return segment.events.index(event_id) if event_id in segment.events else None


@settings(max_examples=examples(500))
@given(situations(), st.data())
def test_nothing_is_skipped_and_nothing_repeated(
    situation: tuple[list[int], int, int, SinkPosition, list[Row]], data: st.DataObject
) -> None:
    """However both journals cut the log: delivery goes on with the very next event, or stops."""
    sizes, delivered, begins, held, rows = situation
    captured = data.draw(st.integers(0, len(rows)))
    fresh = checkpoint(segment=0, ordinal=-1, complete=True, incarnation=None)
    journal = JournalEnd("uid-1", "shop", captured + 1, lsn(begins))
    known = rows[:captured]
    reached = LsnPosition(known[-1].last if known else begins)
    lost_between = sum(sizes[:begins]) > delivered
    try:
        skip = decide(fresh, held, None, journal)
        assert isinstance(skip, SkipToEvent)
        place = find_event(skip, JournalPlace(0, -1, complete=True), known, reached, ordinal_in)
    except PositionLost:
        assert sum(sizes[:begins]) >= delivered, "everything was there"
        return
    if place is None:
        assert captured < len(rows), "it waits for nothing"
        return
    assert not lost_between
    segment, ordinal = place.next_row
    skipped = sum(row.rows for row in rows[: segment - 1]) + ordinal
    assert sum(sizes[:begins]) + skipped == delivered


@given(situations())
def test_it_is_found_in_the_end(
    situation: tuple[list[int], int, int, SinkPosition, list[Row]],
) -> None:
    """Once everything is captured, a journal that has the sink's last event is gone on with."""
    sizes, delivered, begins, held, rows = situation
    assume(sum(sizes[:begins]) < delivered)
    skip = SkipToEvent(held.event_id, parse_position(held.start), parse_position(held.end))

    place = find_event(
        skip, JournalPlace(0, -1, complete=True), rows, LsnPosition(len(sizes)), ordinal_in
    )

    assert place is not None


def test_whole_segments_only() -> None:
    """Without an event, as after a rebuild for a sink at least once, whole segments are skipped."""
    rows = [Row(8, 40, 45, ("a", "b")), Row(9, 45, 55, ("c",)), Row(10, 55, 60, ("d",))]
    stays = JournalPlace(7, -1, complete=True)
    skip = SkipSegments(LsnPosition(50))

    assert find_segment(skip, stays, rows, LsnPosition(60)) == JournalPlace(8, 1, complete=True)
    assert find_segment(skip, stays, rows[:1], LsnPosition(45)) is None
    assert find_segment(skip, stays, [], LsnPosition(50)) == stays


def test_what_has_no_length_is_not_skipped() -> None:
    """A snapshot's or a hold's segment: where it stands in the log says nothing of who has it."""
    rows = [Row(8, 40, 50, ("a",)), Row(9, 50, 50, ("r",)), Row(10, 50, 60, ("b",))]
    skip = SkipSegments(LsnPosition(60))

    place = find_segment(skip, JournalPlace(7, -1, complete=True), rows, LsnPosition(60))

    assert place == JournalPlace(8, 0, complete=True)


def test_an_event_that_is_not_there() -> None:
    """The journal has passed the place, and the event was not there: stop."""
    rows = [Row(1, 40, 50, ("a", "b"))]
    for known, captured in ((rows, 50), ([], 55)):
        with pytest.raises(PositionLost, match="e3, is not in the journal"):
            find_event(
                BY_SOURCE,
                JournalPlace(0, -1, complete=True),
                known,
                LsnPosition(captured),
                ordinal_in,
            )
