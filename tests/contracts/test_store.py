"""What every kind of state store promises: memory, SQLite and PostgreSQL run the same tests."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

import pytest

from deltaforge_dagster.errors import LeaseLost, NotAllowed
from deltaforge_dagster.state.fenced import FencedWriter
from deltaforge_dagster.state.records import Lease
from deltaforge_dagster.state.store import StateStore
from tests.state.make import NAME, capture, deliver, expire, held, new_segment, position, table

WRITES: dict[str, Callable[[FencedWriter], object]] = {
    "renew": lambda writer: writer.renew(60),
    "release": lambda writer: writer.release(),
    "set_session": lambda writer: writer.set_session("session"),
    "open_range": lambda writer: writer.open_range(position(0), "spec-1", 2),
    "add_segment": lambda writer: writer.add_segment(new_segment(2), 1),
    "close_range": lambda writer: writer.close_range(1, "max_seconds", "hash"),
    "advance": lambda writer: writer.advance("redis", 1, 2, True, position(1)),
    "set_lineage": lambda writer: writer.set_lineage("redis", "lineage"),
    "resume_at": lambda writer: writer.resume_at("redis", 0, -1, True, notice="lost"),
    "set_notice": lambda writer: writer.set_notice("redis", "lost"),
    "sink_failed": lambda writer: writer.sink_failed("redis", "no route", 0.0),
    "set_captured": lambda writer: writer.set_captured(position(9)),
    "set_confirmed": lambda writer: writer.set_confirmed(position(1)),
    "register_schema": lambda writer: writer.register_schema("acme", table("id"), position(1)),
}


def everything(store: StateStore) -> list[object]:
    """Return all that the store says about the pipeline, except publication."""
    return [
        store.pipelines(),
        store.lease(NAME),
        store.ranges(NAME),
        store.segments(NAME),
        store.checkpoints(NAME),
    ]


class TestPipelines:
    """Registration, start position, and what people want."""

    def test_first_registration(self, store: StateStore) -> None:
        """A new pipeline has a uid, numbers from 1, a free lease, and sinks before segment 1."""
        row = store.register_pipeline(NAME, "spec-1", ["redis", "file"])

        assert (row.name, row.spec_hash, row.want) == (NAME, "spec-1", "running")
        assert (row.next_segment, row.next_range, len(row.uid)) == (1, 1, 32)
        assert store.pipeline(NAME) == row
        assert store.pipelines() == [row]
        lease = store.lease(NAME)
        assert lease is not None
        assert (lease.epoch, lease.run_id) == (0, None)
        checkpoints = store.checkpoints(NAME)
        assert set(checkpoints) == {"redis", "file"}
        assert {
            (one.segment, one.complete, one.first_segment, one.source_position)
            for one in checkpoints.values()
        } == {(0, True, 1, None)}

    def test_again(self, store: StateStore) -> None:
        """Registering again keeps uid, positions and checkpoints; a changed file changes the hash."""
        lease = held(store)
        capture(store, lease, 1)
        deliver(store, lease, "redis", 1)
        before = everything(store)[1:]

        again = store.register_pipeline(NAME, "spec-2", ["redis"])

        assert again.spec_hash == "spec-2"
        assert again.captured_position == position(1)
        assert everything(store)[1:] == before
        assert store.register_pipeline(NAME, "spec-2", ["redis"]) == again

    def test_unknown(self, store: StateStore) -> None:
        """Reading an unknown pipeline finds nothing, writing to it is refused by name."""
        assert store.pipeline("nobody") is None
        assert store.lease("nobody") is None
        assert store.checkpoints("nobody") == {}
        assert store.ranges("nobody") == []
        assert store.journal_bytes("nobody") == 0
        for write in (
            lambda: store.set_start("nobody", position(1)),
            lambda: store.set_want("nobody", "paused"),
            lambda: store.set_probe("nobody", 1.0, 2.0),
            lambda: store.acquire_lease("nobody", "run-1", 30),
            lambda: store.reset_checkpoint("nobody", "redis", 0),
        ):
            with pytest.raises(NotAllowed, match="'nobody'"):
                write()

    def test_start_is_fixed_once(self, store: StateStore) -> None:
        """The first start position wins, and becomes the position of checkpoints without one."""
        store.register_pipeline(NAME, "spec-1", ["redis"])

        assert store.set_start(NAME, position(5)).start_position == position(5)
        assert store.set_start(NAME, position(7)).start_position == position(5)
        assert store.checkpoints(NAME)["redis"].source_position == position(5)

    def test_want_and_probe(self, store: StateStore) -> None:
        """What people want and when the sensor asks again are kept as given."""
        store.register_pipeline(NAME, "spec-1", [])
        store.set_want(NAME, "paused")
        store.set_probe(NAME, 12.5, 4.0)

        row = store.pipeline(NAME)
        assert row is not None
        assert (row.want, row.probe_after, row.probe_wait) == ("paused", 12.5, 4.0)

    def test_sink_added_later(self, store: StateStore) -> None:
        """A new sink starts, with a whole segment, where the hindmost sink will go on."""
        lease = held(store, "a", "b")
        capture(store, lease, 1, 2, 3)
        deliver(store, lease, "a", 3)
        deliver(store, lease, "b", 1)
        with store.fenced(lease) as writer:
            writer.advance("b", 2, 0, False, None)

        store.register_pipeline(NAME, "spec-2", ["a", "b", "c"])

        new = store.checkpoints(NAME)["c"]
        assert (new.segment, new.ordinal, new.complete) == (1, -1, True)
        assert (new.source_position, new.first_segment) == (position(1), 2)

    def test_sink_renamed(self, store: StateStore) -> None:
        """A renamed sink, even the only one, goes on where the old name stood."""
        lease = held(store, "old")
        capture(store, lease, 1, 2)
        deliver(store, lease, "old", 1)
        with store.fenced(lease) as writer:
            writer.release()

        store.register_pipeline(NAME, "spec-2", ["new"])

        checkpoints = store.checkpoints(NAME)
        assert list(checkpoints) == ["new"]
        assert (checkpoints["new"].segment, checkpoints["new"].complete) == (1, True)

    def test_first_sink_of_an_old_pipeline(self, store: StateStore) -> None:
        """Without any sink before, a new one starts with what is still in the journal."""
        store.register_pipeline(NAME, "spec-1", [])
        store.set_start(NAME, position(0))
        lease = store.acquire_lease(NAME, "run-1", 60)
        assert lease is not None
        capture(store, lease, 1)
        capture(store, lease, 2)
        for number, asset in store.unpublished(NAME):
            store.mark_published(NAME, number, asset)
        store.expire_segments(NAME, [1])

        store.register_pipeline(NAME, "spec-2", ["late"])

        late = store.checkpoints(NAME)["late"]
        assert (late.segment, late.first_segment) == (1, 2)
        assert late.source_position == position(1)

    def test_removal_waits_for_the_lease(self, store: StateStore) -> None:
        """A sink that left the file keeps its checkpoint while a run may still deliver to it."""
        lease = held(store, "a", "b")

        store.register_pipeline(NAME, "spec-2", ["a"])
        assert set(store.checkpoints(NAME)) == {"a", "b"}

        with store.fenced(lease) as writer:
            writer.release()
        store.register_pipeline(NAME, "spec-2", ["a"])
        assert set(store.checkpoints(NAME)) == {"a"}

    def test_reserved_name(self, store: StateStore) -> None:
        """No sink may carry the name of the asset of captured changes."""
        with pytest.raises(NotAllowed, match="'changes'"):
            store.register_pipeline(NAME, "spec-1", ["changes"])


class TestLease:
    """One holder at a time, by the database's clock."""

    def test_epochs_grow_by_one(self, store: StateStore) -> None:
        """Each acquisition has the next epoch; a released lease is free at once."""
        for epoch in (1, 2, 3):
            lease = held(store, run_id=f"run-{epoch}")
            assert lease.epoch == epoch
            assert store.acquire_lease(NAME, "other", 60) is None
            with store.fenced(lease) as writer:
                writer.release()
            row = store.lease(NAME)
            assert row is not None
            assert (row.epoch, row.run_id) == (epoch, None)

    def test_expired_lease_is_free(self, store: StateStore) -> None:
        """After its time another run gets the lease; until then its row still names the first."""
        held(store, seconds=0.2)
        assert store.acquire_lease(NAME, "run-2", 60) is None
        time.sleep(0.25)
        row = store.lease(NAME)
        assert row is not None
        assert row.run_id == "run-1"
        assert row.expires_at < store.now()

        lease = store.acquire_lease(NAME, "run-2", 60)

        assert lease is not None
        assert lease.epoch == 2

    def test_renewal(self, store: StateStore) -> None:
        """A renewed lease outlives its first expiry; the writer says until when."""
        lease = held(store, seconds=0.3)
        with store.fenced(lease) as writer:
            expires_at = writer.renew(60)
        time.sleep(0.35)

        assert expires_at == pytest.approx(store.now() + 60, abs=5)
        assert store.acquire_lease(NAME, "run-2", 60) is None
        with store.fenced(lease) as writer:
            writer.set_confirmed(position(1))

    def test_session_survives_the_holder(self, store: StateStore) -> None:
        """The Spark session stays known to the next holder."""
        lease = held(store)
        with store.fenced(lease) as writer:
            writer.set_session("session-1")
            writer.release()
        held(store, run_id="run-2")

        row = store.lease(NAME)
        assert row is not None
        assert row.session_id == "session-1"

    def test_threads_race(self, store: StateStore) -> None:
        """Of many threads that ask at once exactly one gets the lease."""
        store.register_pipeline(NAME, "spec-1", [])
        won: list[Lease | None] = []
        start = threading.Barrier(8)

        def race(number: int) -> None:
            start.wait()
            won.append(store.acquire_lease(NAME, f"run-{number}", 60))

        threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        leases = [lease for lease in won if lease is not None]
        assert len(won) == 8
        assert [lease.epoch for lease in leases] == [1]


class TestFence:
    """Who does not hold the lease writes nothing at all."""

    @pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
    def test_old_epoch(self, store: StateStore, write: Callable[[FencedWriter], object]) -> None:
        """A holder of an older epoch can use no writer method once another run took over."""
        old = held(store)
        expire(store)
        new = held(store, run_id="run-2")
        capture(store, new, 1, close=False)
        before = everything(store)

        with pytest.raises(LeaseLost, match=r"run-1.*run-2"), store.fenced(old) as writer:
            write(writer)

        assert everything(store) == before

    @pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
    def test_expired(self, store: StateStore, write: Callable[[FencedWriter], object]) -> None:
        """A holder that slept through its expiry writes nothing, even if nobody took the lease."""
        lease = held(store)
        capture(store, lease, 1, close=False)
        expire(store)
        before = everything(store)

        with pytest.raises(LeaseLost, match="expired"), store.fenced(lease) as writer:
            write(writer)

        assert everything(store) == before

    def test_released(self, store: StateStore) -> None:
        """Whoever gave the lease back cannot write afterwards."""
        lease = held(store)
        with store.fenced(lease) as writer:
            writer.release()

        with pytest.raises(LeaseLost, match="released"), store.fenced(lease) as writer:
            writer.renew(60)

    def test_holder_writes(self, store: StateStore) -> None:
        """The holder itself can use every method (so the refusals above mean something)."""
        lease = held(store)
        capture(store, lease, 1, close=False)
        for name, write in WRITES.items():
            if name == "open_range":
                continue  # one is open
            with store.fenced(lease) as writer:
                write(writer)
                writer.renew(60)
            if name == "release":
                lease = held(store, run_id="run-2")

    def test_block_is_all_or_nothing(self, store: StateStore) -> None:
        """An error inside the block takes back everything the block wrote."""
        lease = held(store)
        before = everything(store)

        with pytest.raises(ZeroDivisionError), store.fenced(lease) as writer:
            writer.add_segment(new_segment(1), writer.open_range(position(0), "spec-1", 1) // 0)

        assert everything(store) == before


class TestJournal:
    """Segments follow one another, ranges follow one another, nothing is written twice."""

    def test_segments_and_ranges(self, store: StateStore) -> None:
        """Segments enter the open range, which sums them up; the captured position follows."""
        lease = held(store)
        with store.fenced(lease) as writer:
            number = writer.open_range(position(0), "spec-1", 1)
            writer.add_segment(new_segment(1), number)
        with store.fenced(lease) as writer:
            second = new_segment(
                2,
                counts={"public.orders": {"u": 5}, "public.items": {"d": 1}},
                schema_versions={"public.orders": "sha256:two", "public.items": "sha256:x"},
                rows=6,
                first_ts_us=1,
            )
            writer.add_segment(second, number)

        open_range = store.range(NAME, 1)
        assert open_range is not None
        assert (open_range.state, open_range.closed_at) == ("open", None)
        assert (open_range.first_segment, open_range.last_segment) == (1, 2)
        assert (open_range.start_position, open_range.end_position) == (position(0), position(2))
        assert (open_range.rows, open_range.bytes) == (9, 200)
        assert open_range.counts == {"public.orders": {"c": 2, "u": 6}, "public.items": {"d": 1}}
        assert open_range.schema_versions == {
            "public.orders": "sha256:two",
            "public.items": "sha256:x",
        }
        assert (open_range.first_ts_us, open_range.last_ts_us) == (1, 2002)
        pipeline = store.pipeline(NAME)
        assert pipeline is not None
        assert (pipeline.captured_position, pipeline.next_segment) == (position(2), 3)
        row = store.segment(NAME, 2)
        assert row is not None
        assert (row.range, row.epoch, row.segment_id) == (1, 1, "id-2")
        assert row.counts == second.counts
        assert row.created_at == pytest.approx(store.now(), abs=5)
        assert store.journal_bytes(NAME) == 200

    def test_close(self, store: StateStore) -> None:
        """A closed range says when, why and with which content, and stays so."""
        lease = held(store)
        number = capture(store, lease, 1)

        closed = store.range(NAME, number)
        assert closed is not None
        assert (closed.state, closed.close_reason) == ("closed", "max_events")
        assert closed.content_hash == "hash-1"
        assert closed.closed_at is not None
        with pytest.raises(NotAllowed, match="closed"), store.fenced(lease) as writer:
            writer.close_range(number, "max_seconds", "another hash")
        with pytest.raises(NotAllowed, match="closed"), store.fenced(lease) as writer:
            writer.add_segment(new_segment(2), number)

    @pytest.mark.parametrize("number", [0, 1, 2, 4, 5])
    def test_segment_numbers_are_consecutive(self, store: StateStore, number: int) -> None:
        """Only the very next number is taken: no gap, and none a second time."""
        lease = held(store)
        capture(store, lease, 1, 2, close=False)

        with pytest.raises(NotAllowed, match="next segment is 3"), store.fenced(lease) as writer:
            writer.add_segment(new_segment(number, segment_id="another"), 1)

        assert [row.segment for row in store.segments(NAME)] == [1, 2]

    def test_range_rules(self, store: StateStore) -> None:
        """One range is open at a time, begins with the next segment, and is never empty."""
        lease = held(store)
        with pytest.raises(NotAllowed, match="next one is 1"), store.fenced(lease) as writer:
            writer.open_range(position(0), "spec-1", 2)
        with pytest.raises(NotAllowed, match="cannot be closed"), store.fenced(lease) as writer:
            writer.close_range(writer.open_range(position(0), "spec-1", 1), "idle", "hash")
        with pytest.raises(NotAllowed, match="no range 9"), store.fenced(lease) as writer:
            writer.close_range(9, "idle", "hash")
        capture(store, lease, 1, close=False)
        with pytest.raises(NotAllowed, match="still open"), store.fenced(lease) as writer:
            writer.open_range(position(1), "spec-1", 2)
        with pytest.raises(NotAllowed, match="no range 2"), store.fenced(lease) as writer:
            writer.add_segment(new_segment(2), 2)

    def test_range_of_a_dead_run(self, store: StateStore) -> None:
        """The next holder closes what the last one left open, and numbers go on."""
        old = held(store)
        capture(store, old, 1, 2, close=False)
        expire(store)
        lease = held(store, run_id="run-2")

        with store.fenced(lease) as writer:
            writer.close_range(1, "recovered", "hash-1")
        capture(store, lease, 3)

        assert [(row.range, row.epoch) for row in store.ranges(NAME)] == [(1, 1), (2, 2)]

    def test_block_may_be_run_again(self, store: StateStore) -> None:
        """A block whose commit was not answered can be repeated: nothing is written twice."""
        lease = held(store)

        def block() -> None:
            with store.fenced(lease) as writer:
                number = writer.open_range(position(0), "spec-1", 1)
                writer.add_segment(new_segment(1), number)

        def close() -> None:
            with store.fenced(lease) as writer:
                writer.close_range(1, "idle", "hash-1")
                writer.advance("redis", 1, 2, True, position(1))
                writer.register_schema("acme", table("id"), position(1))

        for repeated in (block, close):
            repeated()
            once = store.ranges(NAME), store.segments(NAME), store.pipeline(NAME)
            repeated()
            assert (store.ranges(NAME), store.segments(NAME), store.pipeline(NAME)) == once

    def test_reading(self, store: StateStore) -> None:
        """Ranges and segments can be had by number, state, limit and from the end."""
        lease = held(store)
        for number in range(1, 6):
            capture(store, lease, number, close=number < 5)

        assert [row.range for row in store.ranges(NAME, state="open")] == [5]
        assert [row.range for row in store.ranges(NAME, state="closed", limit=2)] == [1, 2]
        assert [row.range for row in store.ranges(NAME, first=2, last=3)] == [2, 3]
        newest = store.ranges(NAME, limit=2, newest_first=True)
        assert [row.range for row in newest] == [5, 4]
        assert [row.segment for row in store.segments(NAME, first=3, limit=2)] == [3, 4]
        assert store.range(NAME, 9) is None
        assert store.segment(NAME, 9) is None

    def test_idle_progress(self, store: StateStore) -> None:
        """The captured position moves over log without changes, and never back."""
        lease = held(store)
        capture(store, lease, 1)
        for passed, expected in ((5, 5), (3, 5), (6, 6)):
            with store.fenced(lease) as writer:
                writer.set_captured(position(passed))
            pipeline = store.pipeline(NAME)
            assert pipeline is not None
            assert pipeline.captured_position == position(expected)


class TestCheckpoints:
    """How far each sink is: forwards only, except by hand."""

    def test_advance(self, store: StateStore) -> None:
        """A checkpoint moves inside a segment and from one to the next, with its position."""
        lease = held(store, "a", "b")
        capture(store, lease, 1, 2)
        with store.fenced(lease) as writer:
            writer.advance("a", 1, 1, False, None)
        row = store.checkpoints(NAME)["a"]
        assert (row.segment, row.ordinal, row.complete) == (1, 1, False)
        assert row.source_position == position(0)

        with store.fenced(lease) as writer:
            writer.advance("a", 1, 2, True, position(1))
            writer.advance("a", 2, -1, True, position(2))

        row = store.checkpoints(NAME)["a"]
        assert (row.segment, row.ordinal, row.complete) == (2, -1, True)
        assert row.source_position == position(2)
        assert store.checkpoints(NAME)["b"].segment == 0

    @pytest.mark.parametrize(
        ("segment", "ordinal", "complete"),
        [(1, 2, True), (2, 0, True), (2, 0, False), (2, 1, False), (0, 0, True), (4, -1, False)],
    )
    def test_never_backwards_nor_beyond(
        self, store: StateStore, segment: int, ordinal: int, complete: bool
    ) -> None:
        """Neither an earlier place nor one after the journal's end is taken."""
        lease = held(store)
        capture(store, lease, 1, 2, 3)
        with store.fenced(lease) as writer:
            writer.advance("redis", 2, 1, True, position(2))
        before = store.checkpoints(NAME)

        with pytest.raises(NotAllowed, match="'redis' stands at"), store.fenced(lease) as writer:
            writer.advance("redis", segment, ordinal, complete, position(segment))

        assert store.checkpoints(NAME) == before

    def test_failures(self, store: StateStore) -> None:
        """Failures are counted with the last error, and forgotten at the next success."""
        lease = held(store)
        capture(store, lease, 1)
        for number in (1, 2):
            with store.fenced(lease) as writer:
                writer.sink_failed("redis", "no route to host" + "x" * 5000, 100.0 + number)
        row = store.checkpoints(NAME)["redis"]
        assert (row.failures, row.next_attempt_at) == (2, 102.0)
        assert row.last_error is not None
        assert row.last_error.startswith("no route")
        assert len(row.last_error) == 2000

        deliver(store, lease, "redis", 1)

        row = store.checkpoints(NAME)["redis"]
        assert (row.failures, row.next_attempt_at, row.last_error) == (0, 0.0, None)

    def test_unknown_sink(self, store: StateStore) -> None:
        """A sink that is not registered has no checkpoint to move."""
        lease = held(store)
        capture(store, lease, 1)
        with pytest.raises(NotAllowed, match="no sink 'kafka'"):
            deliver(store, lease, "kafka", 1)
        with pytest.raises(NotAllowed, match="no sink"), store.fenced(lease) as writer:
            writer.sink_failed("kafka", "down", 0.0)

    def test_reset(self, store: StateStore) -> None:
        """By hand a checkpoint goes anywhere in the journal, with the position of that place."""
        lease = held(store)
        capture(store, lease, 1, 2, 3)
        deliver(store, lease, "redis", 3)
        with store.fenced(lease) as writer:
            writer.sink_failed("redis", "down", 1e12)
        with pytest.raises(NotAllowed, match="held by run run-1"):
            store.reset_checkpoint(NAME, "redis", 1)
        with store.fenced(lease) as writer:
            writer.release()

        row = store.reset_checkpoint(NAME, "redis", 1)
        assert (row.segment, row.complete, row.source_position) == (1, True, position(1))
        assert (row.failures, row.next_attempt_at, row.last_error) == (0, 0.0, None)
        row = store.reset_checkpoint(NAME, "redis", 2, ordinal=1, complete=False)
        assert (row.segment, row.ordinal, row.source_position) == (2, 1, position(1))
        assert store.reset_checkpoint(NAME, "redis", 0).source_position == position(0)
        assert store.reset_checkpoint(NAME, "redis", 3).source_position == position(3)
        for nowhere in (-1, 4, 9):
            with pytest.raises(NotAllowed, match="not in the journal"):
                store.reset_checkpoint(NAME, "redis", nowhere)
        with pytest.raises(NotAllowed, match="no sink 'kafka'"):
            store.reset_checkpoint(NAME, "kafka", 0)


class TestPublication:
    """What is due, and what is not."""

    def test_unpublished(self, store: StateStore) -> None:
        """A closed range is due with its changes, and with each sink that has all of it."""
        lease = held(store, "a", "b")
        capture(store, lease, 1, 2)
        capture(store, lease, 3)
        capture(store, lease, 4, close=False)
        assert store.unpublished(NAME) == [(1, "changes"), (2, "changes")]

        deliver(store, lease, "a", 3)
        with store.fenced(lease) as writer:
            writer.advance("b", 2, 1, False, None)
        assert store.unpublished(NAME) == [
            (1, "changes"),
            (1, "a"),
            (2, "changes"),
            (2, "a"),
        ]

        deliver(store, lease, "b", 2)
        assert store.mark_published(NAME, 1, "changes")
        assert not store.mark_published(NAME, 1, "changes")
        assert store.mark_published(NAME, 2, "a")
        assert store.unpublished(NAME) == [(1, "a"), (1, "b"), (2, "changes")]
        assert store.published(NAME, 1, 1) == {(1, "changes")}
        assert store.published(NAME, 1, 2) == {(1, "changes"), (2, "a")}

    def test_late_sink(self, store: StateStore) -> None:
        """Ranges that a sink was not given, or not whole, are never published for it."""
        lease = held(store, "a")
        capture(store, lease, 1)
        capture(store, lease, 2, 3)
        capture(store, lease, 4)
        deliver(store, lease, "a", 2)
        store.register_pipeline(NAME, "spec-2", ["a", "late"])

        deliver(store, lease, "late", 4)

        assert [pair for pair in store.unpublished(NAME) if pair[1] == "late"] == [(3, "late")]

    def test_skipped_ranges(self, store: StateStore) -> None:
        """Ranges skipped by a reset are not published; after going back they are."""
        lease = held(store, "a")
        for number in (1, 2, 3):
            capture(store, lease, number)
        with store.fenced(lease) as writer:
            writer.release()

        def due() -> list[int]:
            return [number for number, asset in store.unpublished(NAME) if asset == "a"]

        store.reset_checkpoint(NAME, "a", 2)
        assert due() == []
        deliver(store, held(store, "a", run_id="run-2"), "a", 3)
        assert due() == [3]

        with store.fenced(Lease(NAME, "run-2", 2, 0.0)) as writer:
            writer.release()
        store.reset_checkpoint(NAME, "a", 0)
        deliver(store, held(store, "a", run_id="run-3"), "a", 3)
        assert due() == [1, 2, 3]


class TestRetention:
    """Nothing that anybody needs is forgotten."""

    def numbers(self, store: StateStore, before: float = math.inf) -> list[int]:
        """Return the segments that may go."""
        return [row.segment for row in store.expirable_segments(NAME, before)]

    def publish(self, store: StateStore) -> None:
        """Publish all that is due."""
        for number, asset in store.unpublished(NAME):
            store.mark_published(NAME, number, asset)

    def test_what_may_go(self, store: StateStore) -> None:
        """Only closed, old, published ranges that every sink has passed, from the start on."""
        lease = held(store, "a", "b")
        capture(store, lease, 1, 2)
        capture(store, lease, 3)
        capture(store, lease, 4, close=False)
        assert self.numbers(store) == []
        deliver(store, lease, "a", 4)
        deliver(store, lease, "b", 3)
        assert self.numbers(store) == []
        store.mark_published(NAME, 2, "changes")
        store.mark_published(NAME, 2, "a")
        store.mark_published(NAME, 2, "b")
        assert self.numbers(store) == []  # no hole in the journal while range 1 stays

        self.publish(store)

        assert self.numbers(store) == [1, 2, 3]
        assert self.numbers(store, before=store.now() - 60) == []

    @pytest.mark.parametrize("segment", [1, 2])
    def test_sink_that_is_behind(self, store: StateStore, segment: int) -> None:
        """A segment some sink still lacks stays, with its whole range."""
        lease = held(store, "a", "b")
        capture(store, lease, 1, 2)
        capture(store, lease, 3, 4)
        deliver(store, lease, "a", 4)
        deliver(store, lease, "b", 2)
        with store.fenced(lease) as writer:
            writer.advance("b", 2 + segment, 1, False, None)
        self.publish(store)

        assert self.numbers(store) == [1, 2]
        assert [row.segment for row in store.expire_segments(NAME, [1, 2, 3, 4])] == [1, 2]
        assert [row.segment for row in store.segments(NAME)] == [3, 4]

    def test_decided_again_when_forgotten(self, store: StateStore) -> None:
        """A checkpoint reset between asking and forgetting keeps its segments."""
        lease = held(store)
        capture(store, lease, 1)
        capture(store, lease, 2)
        deliver(store, lease, "redis", 2)
        self.publish(store)
        asked = self.numbers(store)
        with store.fenced(lease) as writer:
            writer.release()
        store.reset_checkpoint(NAME, "redis", 1)

        gone = store.expire_segments(NAME, asked)

        assert asked == [1, 2]
        assert [row.segment for row in gone] == [1]
        assert gone[0].path == "orders/1.parquet"

    def test_ranges(self, store: StateStore) -> None:
        """A range goes, with what was published of it, once its segments are gone; numbers go on."""
        lease = held(store)
        capture(store, lease, 1)
        capture(store, lease, 2)
        deliver(store, lease, "redis", 2)
        self.publish(store)
        store.expire_segments(NAME, [1])

        assert store.expire_ranges(NAME, [1, 2, 77]) == [1]

        assert [row.range for row in store.ranges(NAME)] == [2]
        assert store.published(NAME, 1, 2) == {(2, "changes"), (2, "redis")}
        assert store.unpublished(NAME) == []
        assert capture(store, lease, 3) == 3
        assert store.expire_ranges(NAME, []) == []
        assert store.expire_segments(NAME, []) == []

    def test_emptied_journal(self, store: StateStore) -> None:
        """After everything is forgotten, capture and delivery go on with the next numbers."""
        lease = held(store)
        capture(store, lease, 1)
        deliver(store, lease, "redis", 1)
        self.publish(store)
        store.expire_segments(NAME, [1])
        store.expire_ranges(NAME, [1])

        capture(store, lease, 2)
        deliver(store, lease, "redis", 2)

        assert store.journal_bytes(NAME) == 100
        assert store.unpublished(NAME) == [(2, "changes"), (2, "redis")]


class TestDetached:
    """A detached sink holds nothing, and is attached again only where nothing is missing."""

    def journal(self, store: StateStore) -> Lease:
        """Let `a` have three published ranges of which the detached `b` has the first."""
        lease = held(store, "a", "b")
        for number in (1, 2, 3):
            capture(store, lease, number)
        deliver(store, lease, "a", 3)
        deliver(store, lease, "b", 1)
        with store.fenced(lease) as writer:
            writer.detach_sink("b", "the journal is full")
        for number, asset in store.unpublished(NAME):
            store.mark_published(NAME, number, asset)
        return lease

    def test_holds_nothing(self, store: StateStore) -> None:
        """Its checkpoint stays, says why, and keeps no segment in the journal."""
        self.journal(store)
        row = store.checkpoints(NAME)["b"]
        assert (row.state, row.segment, row.last_error) == ("detached", 1, "the journal is full")

        gone = store.expire_segments(NAME, [1, 2, 3])

        assert [one.segment for one in gone] == [1, 2, 3]

    def test_attached_from_the_journal(self, store: StateStore) -> None:
        """It goes on after its checkpoint, also while a run holds the lease."""
        lease = self.journal(store)
        store.expire_segments(NAME, [1])

        row = store.attach_sink(NAME, "b", tail=False)

        assert (row.state, row.segment, row.first_segment, row.last_error) == (
            "attached", 1, 1, None,
        )  # fmt: skip
        assert store.expire_segments(NAME, [2]) == []
        deliver(store, lease, "b", 3)
        with pytest.raises(NotAllowed, match="is attached"):
            store.attach_sink(NAME, "b", tail=True)

    def test_attached_at_the_tail(self, store: StateStore) -> None:
        """What it missed is gone, which is refused unless skipping was asked for."""
        lease = self.journal(store)
        store.expire_segments(NAME, [1, 2])
        with pytest.raises(NotAllowed, match=r"segment 2, .* no longer in the journal; --tail"):
            store.attach_sink(NAME, "b", tail=False)
        assert store.checkpoints(NAME)["b"].state == "detached"

        row = store.attach_sink(NAME, "b", tail=True)

        assert (row.state, row.segment, row.first_segment) == ("attached", 3, 4)
        assert row.source_position == position(3)
        capture(store, lease, 4)
        deliver(store, lease, "b", 4)
        assert (4, "b") in store.unpublished(NAME)
        assert (3, "b") not in store.unpublished(NAME)

    def test_a_new_sink_does_not_begin_there(self, store: StateStore) -> None:
        """A sink added later starts where the hindmost attached sink is."""
        self.journal(store)
        store.register_pipeline(NAME, "spec-2", ["a", "b", "c"])
        assert store.checkpoints(NAME)["c"].first_segment == 4


class TestSchemas:
    """Table versions keep their stamps."""

    def test_stamps(self, store: StateStore) -> None:
        """Versions count per table, the sequence over all tables of the pipeline."""
        lease = held(store)
        with store.fenced(lease) as writer:
            first = writer.register_schema("acme", table("id"), position(1))
            other = writer.register_schema("acme", table("id", name="items"), position(2))
            second = writer.register_schema("acme", table("id", "name"), position(3))

        assert [(one.version, one.sequence) for one in (first, other, second)] == [
            (1, 1),
            (1, 2),
            (2, 3),
        ]
        assert first.fingerprint == other.fingerprint != second.fingerprint

    def test_earlier_version_again(self, store: StateStore) -> None:
        """A table that looks again as before gets that version's stamp, not a new one."""
        lease = held(store)
        stamps = []
        for columns in (("id",), ("id", "name"), ("id",), ("id", "name"), ("id", "x")):
            with store.fenced(lease) as writer:
                stamps.append(writer.register_schema("acme", table(*columns), position(1)))

        assert stamps[2] == stamps[0]
        assert stamps[3] == stamps[1]
        assert (stamps[4].version, stamps[4].sequence) == (3, 3)

    def test_pipelines_do_not_share(self, store: StateStore) -> None:
        """Each pipeline numbers its own versions."""
        leases = []
        for name in ("one", "two"):
            store.register_pipeline(name, "spec", [])
            leases.append(store.acquire_lease(name, "run", 60))
        for lease in leases:
            assert lease is not None
            with store.fenced(lease) as writer:
                stamp = writer.register_schema("acme", table("id"), position(1))
            assert (stamp.version, stamp.sequence) == (1, 1)


class TestSinksOwnPosition:
    """What a checkpoint says about the position that its sink keeps."""

    @staticmethod
    def lineage(store: StateStore) -> tuple[str | None, bool]:
        """Return lineage and whether the checkpoint overrules."""
        row = store.checkpoints(NAME)["redis"]
        return row.lineage, row.overrules

    def test_a_life(self, store: StateStore) -> None:
        """A lineage begins, is confirmed by a delivery, and ends with one at least once."""
        lease = held(store)
        capture(store, lease, 1, 2, 3)
        assert self.lineage(store) == (None, False)

        with store.fenced(lease) as writer:
            writer.set_lineage("redis", "a")
        assert self.lineage(store) == ("a", True)
        with store.fenced(lease) as writer:
            writer.advance("redis", 1, 2, True, position(1), exactly_once=True)
        assert self.lineage(store) == ("a", False)
        deliver(store, lease, "redis", 2)
        assert self.lineage(store) == (None, True)

    def test_reset_and_tail_end_it(self, store: StateStore) -> None:
        """Setting a checkpoint by hand ends the lineage and what was noted under it."""
        lease = held(store)
        capture(store, lease, 1, 2)
        with store.fenced(lease) as writer:
            writer.set_lineage("redis", "a")
            writer.resume_at("redis", 1, 2, True, notice="lost")
            writer.release()

        row = store.reset_checkpoint(NAME, "redis", 0)

        assert (row.lineage, row.overrules, row.notice) == (None, True, None)

    @pytest.mark.parametrize(
        ("segment", "ordinal", "complete", "expected"),
        [(1, 2, True, 1), (2, 0, False, 1), (3, 2, True, 3), (0, -1, True, 0)],
    )
    def test_going_on_elsewhere(
        self, store: StateStore, segment: int, ordinal: int, complete: bool, expected: int
    ) -> None:
        """A sink goes on before or after its checkpoint; twice is like once."""
        lease = held(store)
        capture(store, lease, 1, 2, 3)
        with store.fenced(lease) as writer:
            writer.set_lineage("redis", "a")
            writer.advance("redis", 2, 2, True, position(2), exactly_once=True)
        for _ in range(2):
            with store.fenced(lease) as writer:
                writer.resume_at("redis", segment, ordinal, complete, notice="lost")

        row = store.checkpoints(NAME)["redis"]
        assert (row.segment, row.ordinal, row.complete) == (segment, ordinal, complete)
        assert (row.source_position, row.notice) == (position(expected), "lost")
        assert (row.lineage, row.overrules) == ("a", True)
        with store.fenced(lease) as writer:
            writer.set_notice("redis", None)
        assert store.checkpoints(NAME)["redis"].notice is None

    def test_what_is_not_in_the_journal(self, store: StateStore) -> None:
        """A sink cannot go on with a segment that is not there."""
        lease = held(store)
        capture(store, lease, 1)
        with store.fenced(lease) as writer:
            for segment, complete in ((2, True), (5, False)):
                with pytest.raises(NotAllowed, match="not in the journal"):
                    writer.resume_at("redis", segment, 0, complete, notice=None)


class TestRebuild:
    """A journal started afresh."""

    @staticmethod
    def prepared(store: StateStore) -> Lease:
        """Return the lease over three segments: `ahead` has all, `behind` the first."""
        lease = held(store, "ahead", "behind")
        capture(store, lease, 1, 2)
        capture(store, lease, 3, close=False)
        with store.fenced(lease) as writer:
            writer.set_lineage("ahead", "a")
            writer.advance("ahead", 3, 2, True, position(3), exactly_once=True)
            writer.advance("behind", 1, 2, True, position(1))
            writer.set_confirmed(position(1))
        return lease

    def test_begins_at_the_confirmed_position(self, store: StateStore) -> None:
        """Everything of the journal goes, numbers go on, and sinks keep what they surely have."""
        lease = self.prepared(store)
        store.mark_published(NAME, 1, "changes")
        before = store.pipeline(NAME)
        with store.fenced(lease) as writer:
            writer.release()

        rebuilt = store.rebuild_journal(NAME, accept_loss=False)

        assert (rebuilt.position, rebuilt.lossy) == (position(1), [])
        assert (rebuilt.segments, rebuilt.ranges) == (3, 2)
        row = store.pipeline(NAME)
        assert before is not None
        assert row is not None
        assert row.uid != before.uid
        assert (row.captured_position, row.next_segment, row.next_range) == (position(1), 4, 3)
        assert (store.segments(NAME), store.ranges(NAME)) == ([], [])
        assert store.published(NAME, 1, 9) == set()
        ahead, behind = (store.checkpoints(NAME)[sink] for sink in ("ahead", "behind"))
        for one in (ahead, behind):
            assert (one.segment, one.complete, one.first_segment) == (3, True, 4)
            assert one.source_position == position(1), "the source must keep what comes again"
        assert (ahead.skip, ahead.lineage, ahead.overrules) == (position(3), "a", False)
        assert behind.skip == position(1)
        store.rebuild_journal(NAME, accept_loss=False)
        assert store.checkpoints(NAME)["ahead"].skip == position(3), "twice is like once"

    def test_goes_on(self, store: StateStore) -> None:
        """What follows is captured and delivered under new numbers."""
        lease = self.prepared(store)
        with store.fenced(lease) as writer:
            writer.release()
        store.rebuild_journal(NAME, accept_loss=False)

        again = store.acquire_lease(NAME, "run-2", 60)
        assert again is not None
        assert capture(store, again, 4) == 3
        deliver(store, again, "behind", 4)

    def test_refusals(self, store: StateStore) -> None:
        """Not under a run, not unknown, not before anything was captured."""
        store.register_pipeline("new", "spec", ["redis"])
        with pytest.raises(NotAllowed, match="captured nothing yet"):
            store.rebuild_journal("new", accept_loss=False)
        with pytest.raises(NotAllowed, match="no pipeline"):
            store.rebuild_journal("other", accept_loss=False)
        self.prepared(store)
        with pytest.raises(NotAllowed, match="held by run run-1; stop it"):
            store.rebuild_journal(NAME, accept_loss=False)

    def test_loss(self, store: StateStore) -> None:
        """A sink that lacks what the source may have forgotten loses it only when told so."""
        lease = self.prepared(store)
        with store.fenced(lease) as writer:
            writer.set_confirmed(position(2))
            writer.release()
        before = everything(store)

        with pytest.raises(NotAllowed, match=r"sinks behind lack changes.*--accept-loss"):
            store.rebuild_journal(NAME, accept_loss=False)
        assert everything(store) == before
        assert store.rebuild_journal(NAME, accept_loss=True).lossy == ["behind"]

    def test_empty_log_is_no_loss(self, store: StateStore) -> None:
        """Log without a change that was confirmed meanwhile is nothing that a sink lacks."""
        lease = held(store)
        capture(store, lease, 1)
        deliver(store, lease, "redis", 1)
        with store.fenced(lease) as writer:
            writer.set_captured(position(7))
            writer.set_confirmed(position(7))
            number = writer.open_range(position(7), "spec-1", 2)
            later = {"start_position": position(7), "end_position": position(8)}
            writer.add_segment(new_segment(2, **later), number)
            writer.release()

        assert store.rebuild_journal(NAME, accept_loss=False).lossy == []

    def test_detached_sinks_stay_where_they_are(self, store: StateStore) -> None:
        """A detached sink can afterwards be attached at the tail only: nothing is skipped unsaid."""
        lease = self.prepared(store)
        with store.fenced(lease) as writer:
            writer.detach_sink("behind", "full")
            writer.set_confirmed(position(3))
            writer.release()

        assert store.rebuild_journal(NAME, accept_loss=False).detached == ["behind"]
        with pytest.raises(NotAllowed, match="no longer in the journal"):
            store.attach_sink(NAME, "behind", tail=False)
        assert store.attach_sink(NAME, "behind", tail=True).whole_segment == 3
