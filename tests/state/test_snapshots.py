"""Snapshots and their chunks in the state store."""

from __future__ import annotations

import pytest

from deltaforge_dagster.errors import LeaseLost, NotAllowed
from deltaforge_dagster.state.records import Lease
from deltaforge_dagster.state.snapshot_records import (
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
    number = store.snapshots.request(NAME, tables=[TABLE], cause="command").snapshot
    assert store.snapshots.plan(NAME, number, [FIRST, SECOND])
    return number


def read(store: StateStore, number: int) -> list[ChunkRow]:
    """Return the chunks that wait to be spliced."""
    return store.snapshots.chunks(NAME, number, state="read")


def splice(store: StateStore, lease: Lease, chunk: ChunkRow, segment: int | None = None) -> None:
    """Take a chunk over."""
    with store.fenced(lease) as writer:
        writer.snapshots.complete(chunk, segment=segment, rows=chunk.rows or 0)


def state(store: StateStore) -> str:
    """Return the state of the newest snapshot."""
    return store.snapshots.read(NAME, newest=1)[0].state


def test_a_snapshot_is_spliced_when_all_its_chunks_are(store: StateStore) -> None:
    """Wanted, planned, read chunk by chunk, taken over; only then may another one begin."""
    lease = held(store)
    number = reading(store)
    with pytest.raises(NotAllowed, match=f"snapshot {number} is not finished"):
        store.snapshots.request(NAME, cause="command")
    for name, chunk in (("one", FIRST), ("two", SECOND)):
        assert store.snapshots.stage(NAME, number, chunk, staged(name))
    assert store.snapshots.progress(NAME, number) == {TABLE: SnapshotProgress(0, 2, 0, 20, 200)}
    assert store.snapshots.staged_paths(NAME) == {"one", "two"}
    for chunk in read(store, number):
        assert state(store) == "reading"
        splice(store, lease, chunk)

    assert state(store) == "complete"
    assert store.snapshots.progress(NAME, number) == {TABLE: SnapshotProgress(0, 0, 2, 20, 0)}
    assert store.snapshots.request(NAME, cause="command").snapshot == number + 1


def test_an_empty_plan_is_spliced_at_once(store: StateStore) -> None:
    """There is nothing to wait for where no table has a row."""
    held(store)
    number = store.snapshots.request(NAME, cause="initial").snapshot

    assert store.snapshots.plan(NAME, number, [])
    assert state(store) == "complete"


def test_of_two_readers_the_first_counts(store: StateStore) -> None:
    """The second one hears that its file is of no use; so does a second planner."""
    held(store)
    number = reading(store)

    assert not store.snapshots.plan(NAME, number, [FIRST])
    assert store.snapshots.stage(NAME, number, FIRST, staged("mine"))
    assert not store.snapshots.stage(NAME, number, FIRST, staged("yours"))
    assert [one.path for one in read(store, number)] == ["mine"]


def test_a_reading_is_spliced_once(store: StateStore) -> None:
    """Neither by a run without its lease, nor after the chunk was read again; again is no error."""
    lease = held(store)
    number = reading(store)
    store.snapshots.stage(NAME, number, FIRST, staged())
    (old,) = read(store, number)
    with store.fenced(lease) as writer:
        writer.snapshots.plan_again(old)
    assert store.snapshots.chunks(NAME, number, state="planned")[0].attempts == 1
    store.snapshots.stage(NAME, number, FIRST, staged("two"))
    with pytest.raises(NotAllowed, match=r"public.orders/000001 is not to be taken over now"):
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
    store.snapshots.stage(NAME, number, FIRST, staged())
    (chunk,) = read(store, number)

    assert store.snapshots.cancel(NAME, number, "the slot is gone")
    assert not store.snapshots.cancel(NAME, number, "again")
    assert not store.snapshots.stage(NAME, number, SECOND, staged())
    with pytest.raises(NotAllowed):
        splice(store, lease, chunk)
    assert store.snapshots.staged_paths(NAME) == set()
    row = store.snapshots.read(NAME)[0]
    assert (row.state, row.problem) == ("cancelled", "the slot is gone")
    assert store.snapshots.unfinished(NAME) is None


def test_one_chunk_can_be_read_again(store: StateStore) -> None:
    """A finished snapshot goes on with just that chunk."""
    lease = held(store)
    number = reading(store)
    for chunk in (FIRST, SECOND):
        store.snapshots.stage(NAME, number, chunk, staged())
    for one in read(store, number):
        splice(store, lease, one, segment=3)

    store.snapshots.reopen(NAME, number, [(TABLE, 2)])
    assert state(store) == "reading"
    assert [one.number for one in store.snapshots.chunks(NAME, number, state="planned")] == [2]


def test_chunks_in_lost_segments_are_read_again(store: StateStore) -> None:
    """A journal that is rebuilt lacks what no sink had; what is reset begins without snapshots."""
    lease = held(store)
    capture(store, lease, 1, 2)
    deliver(store, lease, "redis", 1)
    number = reading(store)
    for segment, chunk in enumerate((FIRST, SECOND), 1):
        store.snapshots.stage(NAME, number, chunk, staged())
        splice(store, lease, read(store, number)[0], segment=segment)
    assert state(store) == "complete"
    with store.fenced(lease) as writer:
        writer.lease.release()

    store.journals.rebuild(NAME, accept_loss=True)
    assert state(store) == "reading"
    assert [one.number for one in store.snapshots.chunks(NAME, number, state="planned")] == [2]
    store.journals.reset(NAME)
    assert store.snapshots.read(NAME) == []


def test_chunks_of_old_snapshots_go(store: StateStore) -> None:
    """Once they are older than the journal's rows; the newest snapshot's stay, and what is journaled."""
    lease = held(store)
    first = reading(store)
    for chunk in (FIRST, SECOND):
        assert store.snapshots.stage(NAME, first, chunk, staged(str(chunk.number)))
    segment = capture(store, lease, 1)
    one, two = read(store, first)
    splice(store, lease, one, segment)
    splice(store, lease, two, None)
    assert store.snapshots.expire_chunks(NAME, before=store.now() + 10) == 0
    second = reading(store)
    assert store.snapshots.cancel(NAME, second, "enough")

    assert store.snapshots.expire_chunks(NAME, before=store.now() - 10) == 0
    assert store.snapshots.expire_chunks(NAME, before=store.now() + 10) == 1

    assert [chunk.number for chunk in store.snapshots.chunks(NAME, first)] == [1]
    assert len(store.snapshots.chunks(NAME, second)) == 2
    assert [row.snapshot for row in store.snapshots.read(NAME)] == [second, first]


class TestOfSomeSinks:
    """Snapshots whose rows only some sinks get."""

    @staticmethod
    def joined(store: StateStore, *starting: str) -> Lease:
        """Let sinks join, with a snapshot, a pipeline whose first sink has segments 1 and 2."""
        lease = held(store, "first")
        for number in (1, 2):
            capture(store, lease, number)
        sinks = ["first", *starting]
        store.pipelines.register(NAME, "spec-2", sinks, dict.fromkeys(starting, "snapshot"))
        return lease

    def test_its_segments_are_for_them(self, store: StateStore) -> None:
        """Those of chunks, and no other; whoever asks for a sink that is not there hears of it."""
        lease = self.joined(store, "new")
        with pytest.raises(NotAllowed, match="has no sink 'none' \\(there is: first, new\\)"):
            store.snapshots.request(NAME, cause="command", sinks=["new", "none"])
        row = store.snapshots.request(NAME, cause="sink", sinks=["new"])
        store.snapshots.plan(NAME, row.snapshot, [FIRST])
        store.snapshots.stage(NAME, row.snapshot, FIRST, staged())
        capture(store, lease, 3)
        splice(store, lease, read(store, row.snapshot)[0], segment=3)

        assert (row.sinks, row.since_segment) == (["new"], 3)
        segments = store.segments.read(NAME)
        assert [one.is_for("first") for one in segments] == [True, True, False]
        assert all(one.is_for("new") for one in segments)

    def test_it_is_due_until_it_is_wanted(self, store: StateStore) -> None:
        """One of all rows is what a sink was due to get; one of a table, or for others, is not."""
        self.joined(store, "a", "b")
        nothing: list[str] = []
        for tables, sinks, due, since in (
            ([TABLE], nothing, ["a", "b"], 3),
            (nothing, ["first"], ["a", "b"], 1),
            (nothing, ["a"], ["b"], 3),
            (nothing, nothing, nothing, 3),
            (nothing, nothing, nothing, 0),
        ):
            row = store.snapshots.request(NAME, tables=tables, cause="command", sinks=sinks)
            store.snapshots.cancel(NAME, row.snapshot, "enough")

            known = store.checkpoints.read(NAME)
            assert [one for one in ("first", "a", "b") if known[one].snapshot_due] == due
            assert row.since_segment == since

    def test_it_ends_with_the_last_of_its_sinks(self, store: StateStore) -> None:
        """Nobody would get it: it is cancelled, and says why."""
        lease = self.joined(store, "a", "b")
        store.snapshots.request(NAME, cause="sink", sinks=["a", "b"])
        with store.fenced(lease) as writer:
            writer.lease.release()
        store.pipelines.register(NAME, "spec-3", ["first", "b"])
        assert state(store) == "wanted"
        store.pipelines.register(NAME, "spec-4", ["first"])

        (row,) = store.snapshots.read(NAME)
        assert row.state == "cancelled"
        assert row.problem == "it was for a, b, which the file no longer has"

    def test_a_pipeline_that_starts_over(self, store: StateStore) -> None:
        """It begins by the rules of its file: what that asks for is due again."""
        lease = self.joined(store, "new")
        row = store.snapshots.request(NAME, cause="sink", sinks=["new"])
        store.snapshots.cancel(NAME, row.snapshot, "enough")
        with store.fenced(lease) as writer:
            writer.lease.release()
        store.journals.reset(NAME)

        assert store.checkpoints.read(NAME)["new"].snapshot_due
