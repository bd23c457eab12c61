"""What every kind of state store promises of pipelines, lease and fence.

Memory, SQLite and PostgreSQL run the same tests.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import pytest

from deltaforge_dagster.errors import LeaseLost, NotAllowed
from deltaforge_dagster.state.records import Lease
from deltaforge_dagster.state.store import FencedWriter, StateStore
from tests.pipeline.changes import eventually
from tests.state.make import (
    NAME,
    capture,
    deliver,
    everything,
    expire,
    held,
    new_segment,
    position,
    table,
)

WRITES: dict[str, Callable[[FencedWriter], object]] = {
    "lease.renew": lambda writer: writer.lease.renew(60),
    "lease.release": lambda writer: writer.lease.release(),
    "lease.set_session": lambda writer: writer.lease.set_session("session"),
    "ranges.open": lambda writer: writer.ranges.open(position(0), "spec-1", 2),
    "segments.add": lambda writer: writer.segments.add(new_segment(2), 1),
    "ranges.close": lambda writer: writer.ranges.close(1, "max_seconds", "hash"),
    "checkpoints.advance": lambda writer: writer.checkpoints.advance(
        "redis", 1, 2, True, position(1)
    ),
    "checkpoints.set_incarnation": lambda writer: writer.checkpoints.set_incarnation(
        "redis", "incarnation"
    ),
    "checkpoints.resume_at": lambda writer: writer.checkpoints.resume_at(
        "redis", 0, -1, True, notice="lost"
    ),
    "checkpoints.set_notice": lambda writer: writer.checkpoints.set_notice("redis", "lost"),
    "checkpoints.failed": lambda writer: writer.checkpoints.failed("redis", "no route", 0.0),
    "pipeline.set_captured": lambda writer: writer.pipeline.set_captured(position(9)),
    "pipeline.set_confirmed": lambda writer: writer.pipeline.set_confirmed(position(1)),
    "schemas.register": lambda writer: writer.schemas.register("acme", table("id"), position(1)),
}


def renewed(store: StateStore) -> tuple[Lease, float, float]:
    """Return a lease that was renewed before its short time was over, and both of its ends."""
    for seconds in (0.3, 3.0, 30.0):  # a busy machine may come too late for the first
        lease = held(store, seconds=seconds)
        row = store.leases.get(NAME)
        assert row is not None
        with contextlib.suppress(LeaseLost), store.fenced(lease) as writer:
            return lease, row.expires_at, writer.lease.renew(300)
    raise AssertionError("no lease could be renewed in time")


class TestPipelines:
    """Registration, start position, and the desired state."""

    def test_first_registration(self, store: StateStore) -> None:
        """A new pipeline has a uid, numbers from 1, a free lease, and sinks before segment 1."""
        row = store.pipelines.register(NAME, "spec-1", ["redis", "file"])

        assert (row.name, row.spec_hash, row.desired_state) == (NAME, "spec-1", "running")
        assert (row.next_segment, row.next_range, len(row.uid)) == (1, 1, 32)
        assert store.pipelines.get(NAME) == row
        assert store.pipelines.read() == [row]
        lease = store.leases.get(NAME)
        assert lease is not None
        assert (lease.epoch, lease.run_id) == (0, None)
        checkpoints = store.checkpoints.read(NAME)
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

        again = store.pipelines.register(NAME, "spec-2", ["redis"])

        assert again.spec_hash == "spec-2"
        assert again.captured_position == position(1)
        assert everything(store)[1:] == before
        assert store.pipelines.register(NAME, "spec-2", ["redis"]) == again

    def test_unknown(self, store: StateStore) -> None:
        """Reading an unknown pipeline finds nothing, writing to it is refused by name."""
        assert store.pipelines.get("nobody") is None
        assert store.leases.get("nobody") is None
        assert store.checkpoints.read("nobody") == {}
        assert store.ranges.read("nobody") == []
        assert store.segments.total_bytes("nobody") == 0
        for write in (
            lambda: store.pipelines.set_start("nobody", position(1)),
            lambda: store.pipelines.set_desired_state("nobody", "paused"),
            lambda: store.pipelines.set_probe("nobody", 1.0, 2.0),
            lambda: store.leases.acquire("nobody", "run-1", 30),
            lambda: store.checkpoints.reset("nobody", "redis", 0),
        ):
            with pytest.raises(NotAllowed, match="'nobody'"):
                write()

    def test_start_is_fixed_once(self, store: StateStore) -> None:
        """The first start position wins, and becomes the position of checkpoints without one."""
        store.pipelines.register(NAME, "spec-1", ["redis"])

        assert store.pipelines.set_start(NAME, position(5)).start_position == position(5)
        assert store.pipelines.set_start(NAME, position(7)).start_position == position(5)
        assert store.checkpoints.read(NAME)["redis"].source_position == position(5)

    def test_want_and_probe(self, store: StateStore) -> None:
        """What people want and when the sensor asks again are kept as given."""
        store.pipelines.register(NAME, "spec-1", [])
        store.pipelines.set_desired_state(NAME, "paused")
        store.pipelines.set_probe(NAME, 12.5, 4.0)

        row = store.pipelines.get(NAME)
        assert row is not None
        assert (row.desired_state, row.probe_after, row.probe_wait) == ("paused", 12.5, 4.0)

    def test_sink_added_later(self, store: StateStore) -> None:
        """A new sink starts, with a whole segment, where the slowest sink will go on."""
        lease = held(store, "a", "b")
        capture(store, lease, 1, 2, 3)
        deliver(store, lease, "a", 3)
        deliver(store, lease, "b", 1)
        with store.fenced(lease) as writer:
            writer.checkpoints.advance("b", 2, 0, False, None)

        store.pipelines.register(NAME, "spec-2", ["a", "b", "c"])

        new = store.checkpoints.read(NAME)["c"]
        assert (new.segment, new.ordinal, new.complete) == (1, -1, True)
        assert (new.source_position, new.first_segment) == (position(1), 2)

    def test_sink_renamed(self, store: StateStore) -> None:
        """A renamed sink, even the only one, goes on where the old name stood."""
        lease = held(store, "old")
        capture(store, lease, 1, 2)
        deliver(store, lease, "old", 1)
        with store.fenced(lease) as writer:
            writer.lease.release()

        store.pipelines.register(NAME, "spec-2", ["new"])

        checkpoints = store.checkpoints.read(NAME)
        assert list(checkpoints) == ["new"]
        assert (checkpoints["new"].segment, checkpoints["new"].complete) == (1, True)

    def test_first_sink_of_an_old_pipeline(self, store: StateStore) -> None:
        """Without any sink before, a new one starts with what is still in the journal."""
        store.pipelines.register(NAME, "spec-1", [])
        store.pipelines.set_start(NAME, position(0))
        lease = store.leases.acquire(NAME, "run-1", 60)
        assert lease is not None
        capture(store, lease, 1)
        capture(store, lease, 2)
        for number, asset in store.ranges.unpublished(NAME):
            store.ranges.mark_published(NAME, number, asset)
        store.segments.expire(NAME, [1])

        store.pipelines.register(NAME, "spec-2", ["late"])

        late = store.checkpoints.read(NAME)["late"]
        assert (late.segment, late.first_segment) == (1, 2)
        assert late.source_position == position(1)

    def test_removal_waits_for_the_lease(self, store: StateStore) -> None:
        """A sink that left the file keeps its checkpoint while a run may still deliver to it."""
        lease = held(store, "a", "b")

        store.pipelines.register(NAME, "spec-2", ["a"])
        assert set(store.checkpoints.read(NAME)) == {"a", "b"}

        with store.fenced(lease) as writer:
            writer.lease.release()
        store.pipelines.register(NAME, "spec-2", ["a"])
        assert set(store.checkpoints.read(NAME)) == {"a"}

    def test_reserved_name(self, store: StateStore) -> None:
        """No sink may carry the name of the asset of captured changes."""
        with pytest.raises(NotAllowed, match="'changes'"):
            store.pipelines.register(NAME, "spec-1", ["changes"])


class TestLease:
    """One holder at a time, by the database's clock."""

    def test_epochs_grow_by_one(self, store: StateStore) -> None:
        """Each acquisition has the next epoch; a released lease is free at once."""
        for epoch in (1, 2, 3):
            lease = held(store, run_id=f"run-{epoch}")
            assert lease.epoch == epoch
            assert store.leases.acquire(NAME, "other", 60) is None
            with store.fenced(lease) as writer:
                writer.lease.release()
            row = store.leases.get(NAME)
            assert row is not None
            assert (row.epoch, row.run_id) == (epoch, None)

    def test_expired_lease_is_free(self, store: StateStore) -> None:
        """After its time another run gets the lease; until then its row still names the first."""
        first = held(store)
        assert store.leases.acquire(NAME, "run-2", 60) is None
        with store.fenced(first) as writer:
            expires_at = writer.lease.renew(0.2)
        eventually(lambda: store.now() > expires_at)
        row = store.leases.get(NAME)
        assert row is not None
        assert row.run_id == "run-1"
        assert row.expires_at == pytest.approx(expires_at)

        lease = store.leases.acquire(NAME, "run-2", 60)

        assert lease is not None
        assert lease.epoch == 2

    def test_renewal(self, store: StateStore) -> None:
        """A renewed lease outlives its first expiry; the writer says until when."""
        lease, first, expires_at = renewed(store)
        eventually(lambda: store.now() > first)

        assert expires_at == pytest.approx(store.now() + 300, abs=60)
        assert store.leases.acquire(NAME, "run-2", 60) is None
        with store.fenced(lease) as writer:
            writer.pipeline.set_confirmed(position(1))

    def test_session_survives_the_holder(self, store: StateStore) -> None:
        """The Spark session stays known to the next holder."""
        lease = held(store)
        with store.fenced(lease) as writer:
            writer.lease.set_session("session-1")
            writer.lease.release()
        held(store, run_id="run-2")

        row = store.leases.get(NAME)
        assert row is not None
        assert row.session_id == "session-1"

    def test_threads_race(self, store: StateStore) -> None:
        """Of many threads that ask at once exactly one gets the lease."""
        store.pipelines.register(NAME, "spec-1", [])
        won: list[Lease | None] = []
        start = threading.Barrier(8)

        def race(number: int) -> None:
            start.wait()
            won.append(store.leases.acquire(NAME, f"run-{number}", 60))

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
            writer.lease.release()

        with pytest.raises(LeaseLost, match="released"), store.fenced(lease) as writer:
            writer.lease.renew(60)

    def test_holder_writes(self, store: StateStore) -> None:
        """The holder itself can use every method (so the refusals above mean something)."""
        lease = held(store)
        capture(store, lease, 1, close=False)
        for name, write in WRITES.items():
            if name == "ranges.open":
                continue  # one is open
            with store.fenced(lease) as writer:
                write(writer)
                writer.lease.renew(60)
            if name == "lease.release":
                lease = held(store, run_id="run-2")

    def test_block_is_all_or_nothing(self, store: StateStore) -> None:
        """An error inside the block takes back everything the block wrote."""
        lease = held(store)
        before = everything(store)

        with pytest.raises(ZeroDivisionError), store.fenced(lease) as writer:
            writer.segments.add(new_segment(1), writer.ranges.open(position(0), "spec-1", 1) // 0)

        assert everything(store) == before
