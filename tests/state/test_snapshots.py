"""Snapshots and their chunks in the state store."""

from __future__ import annotations

import pytest

from deltaforge_dagster.errors import LeaseLost, NotAllowed
from deltaforge_dagster.state.records import Lease
from deltaforge_dagster.state.snapshots import (
    ChunkRow,
    PlannedChunk,
    SnapshotProgress,
    StagedChunk,
)
from deltaforge_dagster.state.store import StateStore
from tests.state.make import NAME, capture, deliver, expire, held, position

TABLE = "public.orders"
FIRST, SECOND = PlannedChunk(TABLE, 1, "{}"), PlannedChunk(TABLE, 2, "{}")


def staged(path: str = "one", rows: int = 10) -> StagedChunk:
    """Return what a reader says of a chunk."""
    return StagedChunk(path, "sum", rows, 100, "sight", position(5), "{}", 1, 0.5)


def reading(store: StateStore) -> int:
    """Begin a snapshot of two chunks, and return its number."""
    number = store.want_snapshot(NAME, tables=[TABLE], cause="command").snapshot
    assert store.plan_snapshot(NAME, number, [FIRST, SECOND])
    return number


def read(store: StateStore, number: int) -> list[ChunkRow]:
    """Return the chunks that wait to be spliced."""
    return store.chunks(NAME, number, state="read")


def splice(store: StateStore, lease: Lease, chunk: ChunkRow, segment: int | None = None) -> None:
    """Take a chunk over."""
    with store.fenced(lease) as writer:
        writer.splice_chunk(chunk, segment=segment, rows=chunk.rows or 0)


def state(store: StateStore) -> str:
    """Return the state of the newest snapshot."""
    return store.snapshots(NAME, newest=1)[0].state


def test_a_snapshot_is_spliced_when_all_its_chunks_are(store: StateStore) -> None:
    """Wanted, planned, read chunk by chunk, taken over; only then may another one begin."""
    lease = held(store)
    number = reading(store)
    with pytest.raises(NotAllowed, match=f"snapshot {number} is not finished"):
        store.want_snapshot(NAME, cause="command")
    for name, chunk in (("one", FIRST), ("two", SECOND)):
        assert store.stage_chunk(NAME, number, chunk, staged(name))
    assert store.snapshot_progress(NAME, number) == {TABLE: SnapshotProgress(0, 2, 0, 20, 200)}
    assert store.staged_paths(NAME) == {"one", "two"}
    for chunk in read(store, number):
        assert state(store) == "reading"
        splice(store, lease, chunk)

    assert state(store) == "spliced"
    assert store.snapshot_progress(NAME, number) == {TABLE: SnapshotProgress(0, 0, 2, 20, 0)}
    assert store.want_snapshot(NAME, cause="command").snapshot == number + 1


def test_an_empty_plan_is_spliced_at_once(store: StateStore) -> None:
    """There is nothing to wait for where no table has a row."""
    held(store)
    number = store.want_snapshot(NAME, cause="initial").snapshot

    assert store.plan_snapshot(NAME, number, [])
    assert state(store) == "spliced"


def test_of_two_readers_the_first_counts(store: StateStore) -> None:
    """The second one hears that its file is of no use; so does a second planner."""
    held(store)
    number = reading(store)

    assert not store.plan_snapshot(NAME, number, [FIRST])
    assert store.stage_chunk(NAME, number, FIRST, staged("mine"))
    assert not store.stage_chunk(NAME, number, FIRST, staged("yours"))
    assert [one.path for one in read(store, number)] == ["mine"]


def test_a_reading_is_spliced_once(store: StateStore) -> None:
    """Neither by a run without its lease, nor after the chunk was read anew; again is no error."""
    lease = held(store)
    number = reading(store)
    store.stage_chunk(NAME, number, FIRST, staged())
    (old,) = read(store, number)
    with store.fenced(lease) as writer:
        writer.plan_chunk_again(old)
    assert store.chunks(NAME, number, state="planned")[0].attempts == 1
    store.stage_chunk(NAME, number, FIRST, staged("two"))
    with pytest.raises(NotAllowed, match=r"public.orders/000001 is not to be spliced now"):
        splice(store, lease, old)
    (new,) = read(store, number)
    splice(store, lease, new, segment=7)
    splice(store, lease, new, segment=7)

    expire(store)
    with pytest.raises(LeaseLost):
        splice(store, lease, new)


def test_what_is_cancelled_is_neither_read_nor_spliced(store: StateStore) -> None:
    """Whoever is reading or splicing a chunk then hears of it; the cause stays."""
    lease = held(store)
    number = reading(store)
    store.stage_chunk(NAME, number, FIRST, staged())
    (chunk,) = read(store, number)

    assert store.cancel_snapshot(NAME, number, "the slot is gone")
    assert not store.cancel_snapshot(NAME, number, "again")
    assert not store.stage_chunk(NAME, number, SECOND, staged())
    with pytest.raises(NotAllowed):
        splice(store, lease, chunk)
    assert store.staged_paths(NAME) == set()
    row = store.snapshots(NAME)[0]
    assert (row.state, row.problem) == ("cancelled", "the slot is gone")
    assert store.unfinished_snapshot(NAME) is None


def test_one_chunk_can_be_read_again(store: StateStore) -> None:
    """A finished snapshot goes on with just that chunk."""
    lease = held(store)
    number = reading(store)
    for chunk in (FIRST, SECOND):
        store.stage_chunk(NAME, number, chunk, staged())
    for one in read(store, number):
        splice(store, lease, one, segment=3)

    store.reopen_chunks(NAME, number, [(TABLE, 2)])
    assert state(store) == "reading"
    assert [one.number for one in store.chunks(NAME, number, state="planned")] == [2]


def test_chunks_in_lost_segments_are_read_again(store: StateStore) -> None:
    """A journal that is rebuilt lacks what no sink had; what is reset begins without snapshots."""
    lease = held(store)
    capture(store, lease, 1, 2)
    deliver(store, lease, "redis", 1)
    number = reading(store)
    for segment, chunk in enumerate((FIRST, SECOND), 1):
        store.stage_chunk(NAME, number, chunk, staged())
        splice(store, lease, read(store, number)[0], segment=segment)
    assert state(store) == "spliced"
    with store.fenced(lease) as writer:
        writer.release()

    store.rebuild_journal(NAME, accept_loss=True)
    assert state(store) == "reading"
    assert [one.number for one in store.chunks(NAME, number, state="planned")] == [2]
    store.reset_all(NAME)
    assert store.snapshots(NAME) == []


def test_chunks_of_old_snapshots_go(store: StateStore) -> None:
    """Once they are older than the journal's rows; the newest snapshot's stay, and what is journaled."""
    lease = held(store)
    first = reading(store)
    for chunk in (FIRST, SECOND):
        assert store.stage_chunk(NAME, first, chunk, staged(str(chunk.number)))
    segment = capture(store, lease, 1)
    one, two = read(store, first)
    splice(store, lease, one, segment)
    splice(store, lease, two, None)
    assert store.expire_chunks(NAME, before=store.now() + 10) == 0
    second = reading(store)
    assert store.cancel_snapshot(NAME, second, "enough")

    assert store.expire_chunks(NAME, before=store.now() - 10) == 0
    assert store.expire_chunks(NAME, before=store.now() + 10) == 1

    assert [chunk.number for chunk in store.chunks(NAME, first)] == [1]
    assert len(store.chunks(NAME, second)) == 2
    assert [row.snapshot for row in store.snapshots(NAME)] == [second, first]
