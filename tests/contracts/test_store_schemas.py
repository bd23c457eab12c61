"""What every kind of state store promises of table versions: by number, sequence, position; approval."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.sources.postgres.position import LsnPosition
from deltaforge_dagster.state.holds import SCHEMA
from deltaforge_dagster.state.records import HoldPart, Lease
from deltaforge_dagster.state.schemas import Marker
from deltaforge_dagster.state.store import StateStore
from tests.state.make import NAME, held, new_segment, position, table

ORDERS = "public.orders"


def at(number: int) -> LsnPosition:
    """Return the position that `position` writes."""
    return LsnPosition(number * 0x100)


def part(number: int, events: int = 2) -> HoldPart:
    """Return a file of rows of `orders` that wait."""
    return HoldPart(SCHEMA, ORDERS, "waits", position(1), f"held/{number}", "sum", events, 10)


def register(store: StateStore, lease: Lease, *columns: str, at: int, pause: bool = True) -> int:
    """Register a version of `orders` at a position, and return its number."""
    with store.fenced(lease) as writer:
        return writer.schemas.register("acme", table(*columns), position(at), pause=pause).version


class TestLookups:
    """A version is found by its number, by a sequence and by a position."""

    def test_the_version_in_force(self, store: StateStore) -> None:
        """At a position it is the one that rows had there, also after a return to an earlier one."""
        lease = held(store)
        for number, columns in ((2, "a"), (4, "ab"), (6, "a"), (8, "abc")):
            register(store, lease, *columns, at=number)
        history = store.schemas.history(NAME, ORDERS)

        found = [history.at_position(at(number)) for number in range(1, 10)]
        numbers = [one and one.stamp.version for one in found]
        assert numbers == [None, 1, 1, 2, 2, 1, 1, 3, 3]
        assert [one.position for one in history.versions] == [position(n) for n in (2, 4, 8)]
        assert history.current == history.newest == history.version(3)
        assert history.version(4) is None

    def test_the_names_that_columns_have_now(self, store: StateStore) -> None:
        """A column that was added and dropped again has none; one that a snapshot has read does."""
        lease = held(store)
        for number, columns in ((2, "a"), (4, "ab"), (6, "a")):
            register(store, lease, *columns, at=number)
        history = store.schemas.history(NAME, ORDERS)
        identities = history.newest.columns.identities
        assert history.names_now(identities.values()) == ["a"]

        with store.fenced(lease) as writer:
            writer.schemas.register("acme", table("a", "z"), position(7), streamed=False)
        history = store.schemas.history(NAME, ORDERS)
        assert history.names_now(history.newest.columns.identities.values()) == ["a", "z"]

    def test_sequences_count_over_all_tables(self, store: StateStore) -> None:
        """At a sequence it is the newest version that the pipeline had by then."""
        lease = held(store)
        with store.fenced(lease) as writer:
            writer.schemas.register("acme", table("a"), position(1))
            writer.schemas.register("acme", table("a", name="items"), position(2))
            writer.schemas.register("acme", table("a", "b"), position(3))

        history = store.schemas.history(NAME, ORDERS)
        found = [history.at_sequence(number) for number in range(5)]
        assert [one and one.stamp.version for one in found] == [None, 1, 1, 2, 2]
        with pytest.raises(NotAllowed, match="captured no table"):
            store.schemas.history(NAME, "public.others")

    def test_a_snapshot_says_nothing_of_the_log(self, store: StateStore) -> None:
        """A version that a snapshot has read is known, and in force only where nothing else was."""
        lease = held(store)
        register(store, lease, "a", at=5)
        with store.fenced(lease) as writer:
            stamp = writer.schemas.register("acme", table("z"), position(7), streamed=False)

        history = store.schemas.history(NAME, ORDERS)
        assert stamp.version == 2
        assert history.current.stamp.version == 1
        assert history.newest.stamp.version == 2

    def test_versions_survive_another_process(self, tmp_path: Path) -> None:
        """A store that is opened again has every version with its position."""
        store_url = f"sqlite:///{tmp_path}/state.db"
        first = StateStore.open(store_url)
        register(first, held(first), "a", at=3)
        expected = first.schemas.histories(NAME)
        first.close()
        again = StateStore.open(store_url)
        assert again.schemas.histories(NAME) == expected
        again.close()


class TestApproval:
    """New forms of known tables wait, until somebody approves them."""

    def test_what_waits(self, store: StateStore) -> None:
        """The first version never; every further one that is new; none when nobody is to be asked."""
        lease = held(store)
        assert register(store, lease, "a", at=1) == 1
        assert store.schemas.history(NAME, ORDERS).pending == frozenset()
        register(store, lease, "a", "b", at=2, pause=False)
        register(store, lease, "a", "c", at=3)
        register(store, lease, "a", at=4)
        assert store.schemas.history(NAME, ORDERS).pending == {3}

    def test_approval_releases(self, store: StateStore) -> None:
        """Approved, what is held is released, once; what comes later waits again."""
        lease = held(store)
        register(store, lease, "a", at=1)
        register(store, lease, "a", "b", at=2)
        with store.fenced(lease) as writer:
            writer.holds.keep([part(1), part(2, 3)], position(3))
        assert store.holds.approve_table(NAME, ORDERS) == 5
        (hold,) = store.holds.read(NAME)
        assert hold.state == "released"
        assert store.schemas.history(NAME, ORDERS).pending == frozenset()
        with pytest.raises(NotAllowed, match="waits for approval"):
            store.holds.approve_table(NAME, ORDERS)

        register(store, lease, "a", "c", at=4)
        with store.fenced(lease) as writer:
            writer.holds.keep([part(3)], position(5))
        assert [one.state for one in store.holds.read(NAME)] == ["released"], (
            "until a run divides it"
        )

    def test_approved_before_anything_was_held(self, store: StateStore) -> None:
        """Rows that are kept after the approval are released at once: nobody has to ask twice."""
        lease = held(store)
        register(store, lease, "a", at=1)
        register(store, lease, "a", "b", at=2)
        assert store.holds.approve_table(NAME, ORDERS) == 0
        with store.fenced(lease) as writer:
            writer.holds.keep([part(1)], position(3))
        assert [one.state for one in store.holds.read(NAME)] == ["released"]

    def test_held_again_behind_what_was_released(self, store: StateStore) -> None:
        """With the segment of what was released the rest is held, in files of its own."""
        lease = held(store)
        register(store, lease, "a", at=1)
        register(store, lease, "a", "b", at=2)
        with store.fenced(lease) as writer:
            writer.holds.keep([part(1, 4)], position(1))
        store.holds.approve_table(NAME, ORDERS)
        register(store, lease, "a", "c", at=3)
        (released,) = store.holds.read(NAME)
        with store.fenced(lease) as writer:
            number = writer.ranges.open(position(0), "spec-1", 1)
            again = replace(part(2, 1), since_position=position(9))
            writer.segments.add(new_segment(1), number, parked=[again], released=released)

        (hold,) = store.holds.read(NAME)
        assert (hold.state, hold.events, hold.since_position) == ("held", 1, position(1))
        assert [one.path for one in store.holds.parts(NAME)] == ["held/2"]

    def test_a_hold_without_rows(self, store: StateStore) -> None:
        """A table may be held before a row of it is kept: what comes later is added."""
        lease = held(store)
        register(store, lease, "a", at=1)
        register(store, lease, "a", "b", at=2)
        with store.fenced(lease) as writer:
            writer.holds.begin(replace(part(0, 0), path="", bytes=0))
        (hold,) = store.holds.read(NAME)
        assert (hold.state, hold.events) == ("held", 0)
        assert store.holds.parts(NAME) == []
        assert store.holds.approve_table(NAME, ORDERS) == 0
        assert store.holds.read(NAME)[0].state == "released"


def test_versions_are_shown_once(sqlite_store: StateStore) -> None:
    """Each version comes out to be shown until it was, by sequence."""
    lease = held(sqlite_store)
    register(sqlite_store, lease, "a", at=1)
    register(sqlite_store, lease, "a", "b", at=2)
    due = sqlite_store.schemas.unpublished(NAME)
    assert [version.stamp.sequence for _, version in due] == [1, 2]
    sqlite_store.schemas.mark_published(NAME, due[0][1])
    due = sqlite_store.schemas.unpublished(NAME)
    assert [version.stamp.sequence for _, version in due] == [2]
    sqlite_store.schemas.mark_published(NAME, due[0][1])
    assert sqlite_store.schemas.unpublished(NAME) == []


notes = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3)), max_size=8).map(
    lambda found: sorted(found, key=lambda one: one[0])
)


@given(notes, st.lists(st.integers(0, 9), max_size=4))
def test_reading_again_changes_nothing(log: list[tuple[int, int]], deaths: list[int]) -> None:
    """Wherever readers die and begin again, what was in force where is as if one had read on."""

    def read(marker: Marker, begin: int, end: int) -> Marker:
        for place, sequence in log:
            if begin <= place <= end:
                marker = marker.reached(position(place), sequence)
        return marker

    marker, begin = Marker(), 0
    for death in deaths:
        marker = read(marker, begin, death)
        begin = min(begin, death)
    again = read(marker, begin, 10)

    assert again == read(Marker(), 0, 10)
