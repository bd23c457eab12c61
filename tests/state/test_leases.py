"""The lease between processes, and under any order of calls."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.queues import Queue as ProcessQueue
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from typing import Any

import psycopg
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from sqlalchemy import insert

from deltaforge_dagster.errors import LeaseLost, NotAllowed, StoreUnavailable
from deltaforge_dagster.state.database.primitives import Kv
from deltaforge_dagster.state.database.tables import kv
from deltaforge_dagster.state.leases import check_lease
from deltaforge_dagster.state.records import Lease
from deltaforge_dagster.state.store import StateStore
from tests.chance import examples
from tests.e2e.deployment import eventually
from tests.fix_postgres import PostgresVersion
from tests.state.make import NAME, deliver, expire, held, new_segment, position

ROUNDS = 20


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def shared_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty store that several processes can open."""
    if request.param == "postgres":
        return str(request.getfixturevalue("postgres_server").create_database())
    return f"sqlite:///{tmp_path}/state.db"


def race(url: str, run_id: str, start: Barrier, won: ProcessQueue[tuple[str, Any]]) -> None:
    """Ask for one lease per round at the same moment as the other process."""
    store = StateStore.open(url)
    for number in range(ROUNDS):
        start.wait(200)
        lease = store.leases.acquire(f"{NAME}-{number}", run_id, 60)
        if lease is not None:
            won.put((lease.pipeline, lease.epoch))
    store.close()


def test_two_processes_race(shared_url: str) -> None:
    """Of two processes that ask at the same moment exactly one gets the lease, every time."""
    store = StateStore.open(shared_url)
    for number in range(ROUNDS):
        store.pipelines.register(f"{NAME}-{number}", "spec", [])
    context = multiprocessing.get_context("spawn")
    start, won = context.Barrier(2), context.Queue()
    processes = [
        context.Process(target=race, args=(shared_url, run_id, start, won))
        for run_id in ("run-1", "run-2")
    ]
    for process in processes:
        process.start()
    winners = [won.get(timeout=200) for _ in range(ROUNDS)]
    for process in processes:
        process.join(200)
    holders = [store.leases.get(f"{NAME}-{number}") for number in range(ROUNDS)]
    store.close()

    assert won.empty()
    assert sorted(winners) == sorted((f"{NAME}-{number}", 1) for number in range(ROUNDS))
    assert {holder.run_id for holder in holders if holder is not None} <= {"run-1", "run-2"}


def die_in_a_block(url: str, lease: Lease, inside: Event) -> None:
    """Write, and wait within the block to be killed."""
    store = StateStore.open(url)
    with store.fenced(lease) as writer:
        writer.segments.add(new_segment(1), writer.ranges.open(position(0), "spec-1", 1))
        inside.set()
        time.sleep(600)


def test_killed_within_a_block(shared_url: str) -> None:
    """A process killed before the commit leaves nothing, and its lock dies with it."""
    store = StateStore.open(shared_url)
    lease = held(store)
    context = multiprocessing.get_context("spawn")
    inside = context.Event()
    process = context.Process(target=die_in_a_block, args=(shared_url, lease, inside))
    process.start()
    assert inside.wait(200)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(200)

    with store.fenced(lease) as writer:
        writer.segments.add(new_segment(1), writer.ranges.open(position(0), "spec-1", 1))
    rows = store.segments.read(NAME)
    store.close()

    assert [row.segment for row in rows] == [1]


Hang = Callable[[psycopg.Connection, Callable[[], object]], None]
"""Begins to write and calls its second argument, which returns when it is to go on."""


def pipelined(connection: psycopg.Connection, hang: Callable[[], object]) -> None:
    """Send the first message of a pipeline, and no other."""

    def rows() -> Iterator[tuple[str]]:
        yield ("sent",)
        connection.pgconn.flush()
        hang()

    connection.cursor().executemany("SELECT %s", rows())


def copied(connection: psycopg.Connection, hang: Callable[[], object]) -> None:
    """Send a part of the rows of a COPY."""
    connection.execute("CREATE TEMPORARY TABLE staged (id text)")
    with connection.cursor().copy("COPY staged FROM STDIN") as copy:
        copy.write("x\n" * 100_000)
        hang()


def executed(connection: psycopg.Connection, _hang: Callable[[], object]) -> None:
    """Wait for a statement."""
    connection.execute("SELECT pg_sleep(50)")


def write_and_hang(url: str, within: Hang, parent: Connection) -> None:
    """Take the lease, and hang within a write; report how that ends."""
    store = StateStore.open(url)
    lease = held(store, seconds=3)
    try:
        with store.database.write() as connection:
            check_lease(connection, lease)
            connection.execute(insert(kv).values(ns="n", key="k", val=b"", updated_at=1))
            raw = connection.connection.driver_connection
            assert isinstance(raw, psycopg.Connection)
            parent.send("writes")
            within(raw, parent.recv)
    except StoreUnavailable as error:
        parent.send(str(error))


@pytest.mark.postgres
@pytest.mark.parametrize(
    ("within", "state", "version"),
    [
        (pipelined, "ClientRead", 12),
        (copied, "ClientRead", 18),
        pytest.param(executed, "PgSleep", 18, marks=pytest.mark.soak("stalls")),
        pytest.param(pipelined, "ClientRead", 17, marks=pytest.mark.soak("stalls")),
    ],
)
def test_a_frozen_holder_keeps_no_lock(
    request: pytest.FixtureRequest,
    postgres_version: PostgresVersion,
    within: Hang,
    state: str,
    version: int,
) -> None:
    """While its lease lasts nobody waits for it; then the next run has the lease at once, and nothing of it stays."""
    dsn = postgres_version(version).create_database()
    store = StateStore.open(dsn)
    context = multiprocessing.get_context("spawn")
    child, parent = context.Pipe()
    process = context.Process(target=write_and_hang, args=(dsn, within, parent))
    request.addfinalizer(process.kill)
    process.start()
    assert child.recv() == "writes"
    with psycopg.connect(dsn, autocommit=True) as admin:
        query = "SELECT 1 FROM pg_stat_activity WHERE state = 'active' AND wait_event = %s AND datname = current_database()"
        eventually(lambda: admin.execute(query, [state]).fetchone(), what="the write")
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        assert store.leases.acquire(NAME, "run-2", 60) is None
        holder = store.leases.get(NAME)
        assert holder is not None
        eventually(lambda: not holder.active_at(store.now()), what="the end of the lease")

        lease = store.leases.acquire(NAME, "run-2", 60)

        assert lease is not None
        assert lease.epoch == 2
        with store.fenced(lease) as writer:
            writer.lease.renew(60)
        os.kill(process.pid, signal.SIGCONT)
        child.send("goes on")
        assert child.recv().startswith("state store postgres")
        assert Kv(store.database, "n").get("k") is None
    store.close()


class Leases(RuleBasedStateMachine):
    """Whoever holds the newest live lease writes; nobody else ever does; checkpoints only rise."""

    @initialize()
    def begin(self) -> None:
        """Register a pipeline with one sink."""
        self.store = StateStore.open("memory")
        self.store.pipelines.register(NAME, "spec", ["redis"])
        self.store.pipelines.set_start(NAME, position(0))
        self.leases: list[Lease] = []
        self.live: Lease | None = None
        self.captured = 0
        self.delivered = 0

    def teardown(self) -> None:
        """Close the store."""
        self.store.close()

    @rule()
    def acquire(self) -> None:
        """Ask for the lease."""
        lease = self.store.leases.acquire(NAME, f"run-{len(self.leases)}", 60)
        assert (lease is None) == (self.live is not None)
        if lease is not None:
            assert lease.epoch == len(self.leases) + 1
            self.leases.append(lease)
            self.live = lease

    @rule()
    def time_passes(self) -> None:
        """Let a held lease expire."""
        if self.live is not None:
            expire(self.store)
            self.live = None

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Give a lease back, the live one or an old one."""
        if self.leases:
            lease = data.draw(st.sampled_from(self.leases))
            if lease == self.live:
                with self.store.fenced(lease) as writer:
                    writer.lease.release()
                self.live = None
            else:
                with pytest.raises(LeaseLost), self.store.fenced(lease) as writer:
                    writer.lease.release()

    @rule(data=st.data())
    def add_segment(self, data: st.DataObject) -> None:
        """Capture a segment with any lease ever given."""
        if self.leases:
            lease = data.draw(st.sampled_from(self.leases))
            number = self.captured + 1
            try:
                with self.store.fenced(lease) as writer:
                    range_ = writer.ranges.open(position(number - 1), "spec", number)
                    writer.segments.add(new_segment(number), range_)
                    writer.ranges.close(range_, "max_events", "hash")
            except LeaseLost:
                assert lease != self.live
            else:
                assert lease == self.live
                self.captured = number

    @rule(segment=st.integers(0, 6))
    def advance(self, segment: int) -> None:
        """Move the checkpoint anywhere."""
        if self.live is not None:
            try:
                deliver(self.store, self.live, "redis", segment)
            except NotAllowed:
                assert segment < self.delivered or segment > self.captured
            else:
                assert self.delivered <= segment <= self.captured
                self.delivered = segment

    @invariant()
    def agrees(self) -> None:
        """Journal and checkpoint are what the live holders wrote, in order and without a gap."""
        rows = self.store.segments.read(NAME)
        assert [row.segment for row in rows] == list(range(1, self.captured + 1))
        assert self.store.checkpoints.read(NAME)["redis"].segment == self.delivered
        due = {number for number, asset in self.store.ranges.unpublished(NAME) if asset == "redis"}
        assert due == set(range(1, self.delivered + 1))


TestLeasesModel = Leases.TestCase
TestLeasesModel.settings = settings(max_examples=examples(20), stateful_step_count=20)
