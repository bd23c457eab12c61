"""What the store knows of dead letters that are gone without having been delivered."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.state.dead_letters import _joined
from deltaforge_dagster.state.records import Lease
from deltaforge_dagster.state.store import StateStore
from tests.state.make import NAME, capture, dead_letter, deliver, held


def aside(store: StateStore, lease: Lease, segment: int, *ordinals: int, room: int = 100) -> None:
    """Put changes of a segment into the queue of the sink, which rejects what finds no room."""
    letters = [
        dead_letter(ordinal, segment=segment, event_id=f"{segment}:{ordinal}")
        for ordinal in ordinals
    ]
    with store.fenced(lease) as writer:
        writer.dead_letters.add("redis", letters, max_entries=room, overflow="reject")


def noted(store: StateStore, segment: int) -> dict[str, list[int]]:
    """Return by fate the ordinals that the sink never got of a segment."""
    found = store.undelivered.read(NAME, segment).get("redis", {})
    return {fate: [one for run in runs for one in run] for fate, runs in found.items()}


def test_each_way_out_of_the_queue(store: StateStore) -> None:
    """Given up, expired, rejected, evicted: each is noted with its rows; what was delivered is not."""
    lease = held(store)
    capture(store, lease, 1, 2)
    aside(store, lease, 1, 4, 1, 2, 3)
    aside(store, lease, 2, 0, 1, room=5)
    store.dead_letters.remove(NAME, up_to=1)
    store.dead_letters.remove(NAME, seqs=[3, 4])
    with store.fenced(lease) as writer:
        writer.dead_letters.redriven([2])

    assert noted(store, 1) == {"acknowledged": [2, 3, 4]}
    assert noted(store, 2) == {"rejected": [1]}

    store.dead_letters.expire(NAME, older_than=-60)
    assert noted(store, 2) == {"rejected": [1], "expired": [0]}

    aside(store, lease, 1, 7)
    with store.fenced(lease) as writer:
        letter = dead_letter(8, segment=1)
        writer.dead_letters.add("redis", [letter], max_entries=1, overflow="drop_oldest")
    assert noted(store, 1) == {"acknowledged": [2, 3, 4], "evicted": [7]}


def test_a_sink_that_meets_changes_again(store: StateStore) -> None:
    """What is noted behind the place from which it goes on is forgotten, the rest stays."""
    lease = held(store)
    capture(store, lease, 1, 2, 3)
    deliver(store, lease, "redis", 3)
    for segment in (1, 2, 3):
        aside(store, lease, segment, 0, 1, 2)
    store.dead_letters.remove(NAME)

    with store.fenced(lease) as writer:
        writer.checkpoints.resume_at("redis", 2, 1, False, notice=None)
    assert [noted(store, one) for one in (1, 2, 3)] == [
        {"acknowledged": [0, 1, 2]},
        {"acknowledged": [0, 1]},
        {},
    ]

    with store.fenced(lease) as writer:
        writer.undelivered.forget_behind("redis", 1, -1, complete=True)
    assert [noted(store, one) for one in (1, 2)] == [{"acknowledged": [0, 1, 2]}, {}]


def test_notes_go_with_their_segments(store: StateStore) -> None:
    """Retention takes them along, and of a segment that is gone nothing is noted."""
    lease = held(store)
    capture(store, lease, 1, 2)
    deliver(store, lease, "redis", 2)
    aside(store, lease, 1, 0, 1)
    store.dead_letters.remove(NAME, seqs=[1])
    for asset in ("changes", "redis"):
        store.ranges.mark_published(NAME, 1, asset)

    assert [row.segment for row in store.segments.expire(NAME, [1])] == [1]
    assert noted(store, 1) == {}
    store.dead_letters.remove(NAME)
    assert noted(store, 1) == {}


@given(batches=st.lists(st.lists(st.integers(0, 40))))
def test_runs_of_rows(batches: Sequence[Sequence[int]]) -> None:
    """However rows come, they stand in order, once, in the fewest runs."""
    runs: list[list[int]] = []
    for batch in batches:
        runs = _joined(runs, batch)

    wanted = sorted({one for batch in batches for one in batch})
    assert [one for first, last in runs for one in range(first, last + 1)] == wanted
    assert all(left[1] + 1 < right[0] for left, right in pairwise(runs))
