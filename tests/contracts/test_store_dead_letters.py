"""What every kind of state store promises of dead letters."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import update

from deltaforge_dagster.errors import LeaseLost, NotAllowed
from deltaforge_dagster.state.database.database import clock
from deltaforge_dagster.state.database.tables import dead_letters
from deltaforge_dagster.state.dead_letters import Overflow, token_of
from deltaforge_dagster.state.records import Lease, NewDeadLetter
from deltaforge_dagster.state.store import StateStore
from tests.state.make import NAME, dead_letter, expire, held


def add(
    store: StateStore,
    lease: Lease,
    *letters: NewDeadLetter,
    sink: str = "redis",
    room: int = 100,
    overflow: Overflow = "block",
) -> int:
    """Put letters into the queue; return how many are done with."""
    with store.fenced(lease) as writer:
        return writer.dead_letters.add(sink, letters, max_entries=room, overflow=overflow)


def events(store: StateStore, **which: Any) -> list[str]:
    """Return the numbers of the events in the queue."""
    return [row.event_id.removeprefix("event-") for row in store.dead_letters.read(NAME, **which)]


class TestAdding:
    """What a run puts into the queue."""

    def test_an_event_is_one_entry_of_a_sink(self, store: StateStore) -> None:
        """However often it is refused; another sink has its own; numbers increase."""
        lease = held(store, "redis", "kafka")
        assert add(store, lease, dead_letter(1), dead_letter(2)) == 2
        (first, _) = store.dead_letters.read(NAME)

        assert (
            add(store, lease, dead_letter(2, error_message="again"), dead_letter(3), dead_letter(1))
            == 3
        )
        add(store, lease, dead_letter(1), sink="kafka")

        rows = store.dead_letters.read(NAME, sink="redis")
        assert rows[0] == first
        assert (first.attempts, first.error_message, first.event) == (
            1,
            "nowhere to go",
            '{"after":1}',
        )
        assert [row.event_id for row in rows] == ["event-1", "event-2", "event-3"]
        everything = store.dead_letters.read(NAME)
        assert [row.seq for row in everything] == sorted({row.seq for row in everything})
        assert [row.sink for row in everything] == ["redis"] * 3 + ["kafka"]

    def test_only_the_holder_of_the_lease_writes(self, store: StateStore) -> None:
        """A run that was overtaken adds nothing."""
        lease = held(store)
        expire(store)

        with pytest.raises(LeaseLost):
            add(store, lease, dead_letter(1))
        assert store.dead_letters.read(NAME) == []

    def test_a_full_queue_blocks(self, store: StateStore) -> None:
        """What still fits goes in, in order; what is there already needs no room."""
        lease = held(store)
        assert add(store, lease, *map(dead_letter, range(1, 5)), room=3) == 3
        assert events(store) == ["1", "2", "3"]

        assert add(store, lease, dead_letter(2), dead_letter(4), dead_letter(3), room=3) == 1
        store.dead_letters.remove(NAME, up_to=store.dead_letters.read(NAME)[0].seq)
        assert add(store, lease, dead_letter(4), dead_letter(5), room=3) == 1
        assert events(store) == ["2", "3", "4"]

    def test_a_full_queue_drops_the_oldest(self, store: StateStore) -> None:
        """They are counted; what waits behind others goes last, since nothing is wrong with it."""
        lease = held(store)
        waits = dead_letter(1, state="waiting", error_kind="waiting")
        add(store, lease, waits, dead_letter(2), dead_letter(3), room=3, overflow="drop_oldest")

        assert (
            add(store, lease, dead_letter(4), dead_letter(5), room=3, overflow="drop_oldest") == 2
        )
        assert events(store) == ["1", "4", "5"]
        found = store.dead_letters.depth(NAME)
        assert (found.entries, found.dead, found.evicted, found.rejected) == (3, 2, 2, 0)

    def test_a_full_queue_rejects_the_new(self, store: StateStore) -> None:
        """They are counted, too, and nothing stops."""
        lease = held(store)
        add(store, lease, dead_letter(1), room=1, overflow="reject")

        assert (
            add(
                store,
                lease,
                dead_letter(2),
                dead_letter(1),
                dead_letter(3),
                room=1,
                overflow="reject",
            )
            == 3
        )
        assert events(store) == ["1"]
        assert store.dead_letters.depth(NAME).rejected == 2

    def test_what_waits_is_never_rejected(self, store: StateStore) -> None:
        """Nothing is wrong with it: it would be lost although the sink can have it."""
        lease = held(store)
        waits = dead_letter(3, state="waiting", error_kind="waiting")
        add(store, lease, dead_letter(1), room=1, overflow="reject")

        assert add(store, lease, dead_letter(2), waits, room=1, overflow="reject") == 2
        assert events(store) == ["1", "3"]
        found = store.dead_letters.depth(NAME)
        assert (found.rejected, found.evicted) == (1, 0)

    @pytest.mark.parametrize("overflow", ["block", "reject"])
    def test_a_lowered_limit_drops_nothing(self, store: StateStore, overflow: Overflow) -> None:
        """Only a policy that says so loses what is in the queue."""
        lease = held(store)
        add(store, lease, dead_letter(1), dead_letter(2), dead_letter(3))

        add(store, lease, dead_letter(4), room=1, overflow=overflow)

        assert events(store) == ["1", "2", "3"]
        assert store.dead_letters.depth(NAME).evicted == 0


class TestReading:
    """What people and checks see."""

    def test_entries_are_found_by_what_they_are(self, store: StateStore) -> None:
        """By sink, cause, number; a page at a time."""
        lease = held(store, "redis", "kafka")
        add(store, lease, *map(dead_letter, range(1, 4)))
        add(store, lease, dead_letter(4, error_kind="too_large"), sink="kafka")
        seqs = [row.seq for row in store.dead_letters.read(NAME)]

        assert events(store, sink="kafka") == ["4"]
        assert events(store, error_kind="routing", limit=2) == ["1", "2"]
        assert events(store, after=seqs[1]) == ["3", "4"]
        assert events(store, seqs=[seqs[2], seqs[0], 999]) == ["1", "3"]
        assert store.dead_letters.files(NAME) == {"orders/dead/1.arrow"}

    def test_places_are_in_the_journal_s_order(self, store: StateStore) -> None:
        """Whatever the order in which they were put into the queue."""
        lease = held(store)
        add(store, lease, dead_letter(5), dead_letter(3), dead_letter(4, segment=2))

        places = store.dead_letters.places(NAME, "redis")
        assert [(row.segment, row.ordinal) for row in places] == [(1, 3), (1, 5), (2, 4)]
        assert {row.event for row in places} == {""}

    def test_an_empty_queue(self, store: StateStore) -> None:
        """Nothing is deep, old or lost."""
        held(store)
        found = store.dead_letters.depth(NAME)
        assert (found.entries, found.oldest, found.evicted) == (0, None, 0)
        assert store.dead_letters.state(NAME, "redis") == (0, 0, 0)


class TestActing:
    """What becomes of entries."""

    def test_redrive(self, store: StateStore) -> None:
        """Asked for; refused again, with one attempt more; delivered and gone."""
        lease = held(store)
        add(store, lease, *map(dead_letter, range(1, 4)))
        first, second, third = (row.seq for row in store.dead_letters.read(NAME))

        assert store.dead_letters.redrive(NAME, seqs=[first, second]) == 2
        assert [row.state for row in store.dead_letters.read(NAME)] == [
            "redrive",
            "redrive",
            "dead",
        ]
        with store.fenced(lease) as writer:
            writer.dead_letters.redrive_failed(first, "too_large", "still too large")
            writer.dead_letters.redriven([second])

        one, other = store.dead_letters.read(NAME)
        assert (one.seq, one.state, one.attempts) == (first, "dead", 2)
        assert (one.error_kind, one.error_message) == ("too_large", "still too large")
        assert other.seq == third

    def test_what_a_sink_says_has_arrived_is_gone(self, store: StateStore) -> None:
        """Up to the token that it holds, of that attempt only, in the order of sending."""
        lease = held(store)
        add(store, lease, *map(dead_letter, range(1, 6)))
        one, two, three, four, five = (row.seq for row in store.dead_letters.read(NAME))
        with store.fenced(lease) as writer:
            writer.dead_letters.begin_redrive("a" * 32, {0: three, 1: one, 3: two})
            writer.dead_letters.begin_redrive("b" * 32, {0: four, 1: five})

        with store.fenced(lease) as writer:
            assert writer.dead_letters.redriven_up_to(token_of("a" * 32, 1)) == 2
            assert writer.dead_letters.redriven_up_to(token_of("a" * 32, 1)) == 0
            assert writer.dead_letters.redriven_up_to(token_of("c" * 32, 9)) == 0
        assert events(store) == ["2", "4", "5"]

    def test_removing(self, store: StateStore) -> None:
        """Up to a number, some, those of a sink, or all."""
        lease = held(store, "redis", "kafka")
        add(store, lease, *map(dead_letter, range(1, 6)))
        add(store, lease, dead_letter(1), sink="kafka")
        seqs = [row.seq for row in store.dead_letters.read(NAME)]

        assert store.dead_letters.remove(NAME, up_to=seqs[1]) == 2
        assert store.dead_letters.remove(NAME, seqs=[seqs[3], 999]) == 1
        assert store.dead_letters.remove(NAME, sink="kafka") == 1
        assert events(store) == ["3", "5"]
        assert store.dead_letters.remove(NAME) == 2
        with pytest.raises(NotAllowed, match="no pipeline 'other'"):
            store.dead_letters.remove("other")

    def test_age(self, store: StateStore) -> None:
        """Old entries are dropped and counted; those that wait for others are not."""
        lease = held(store)
        add(store, lease, dead_letter(1), dead_letter(2, state="waiting"), dead_letter(3))
        with store.database.write() as connection:
            old = dead_letters.c.event_id != "event-3"
            connection.execute(update(dead_letters).where(old).values(created_at=clock() - 100))

        assert store.dead_letters.expire(NAME, 200) == 0
        with store.fenced(lease) as writer:
            assert writer.dead_letters.expire(50) == 1
        assert events(store) == ["2", "3"]
        assert store.dead_letters.depth(NAME).expired == 1
