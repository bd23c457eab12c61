"""The lease of a run: renewal, loss, and what a stalled holder may still do."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from deltaforge_dagster.errors import LeaseLost, StoreUnavailable
from deltaforge_dagster.pipeline.run_context import ActiveLease
from deltaforge_dagster.state.store import StateStore
from tests.pipeline.changes import eventually


@pytest.fixture
def registered(sqlite_store: StateStore) -> StateStore:
    """A store with a pipeline."""
    sqlite_store.pipelines.register("p", "hash", ["s"])
    return sqlite_store


def acquire(
    store: StateStore, *, seconds: float = 30, renew_seconds: float = 10
) -> ActiveLease | None:
    """Take the lease as a new run."""
    return ActiveLease.acquire(
        store, "p", "run", seconds=seconds, renew_seconds=renew_seconds, on_renewal=lambda: None
    )


def test_only_one_run_holds_the_lease(registered: StateStore) -> None:
    """A second run gets nothing until the first has released."""
    first = acquire(registered)
    assert first is not None
    assert acquire(registered) is None
    first.release()

    second = acquire(registered)
    assert second is not None
    assert second.epoch == first.epoch + 1
    second.release()


def test_the_lease_outlives_its_term_while_it_is_renewed(registered: StateStore) -> None:
    """Each renewal moves its end, here and in the store, and checks the desired state."""
    renewals = threading.Semaphore(0)
    held = ActiveLease.acquire(
        registered, "p", "run", seconds=120, renew_seconds=0.1, on_renewal=renewals.release
    )
    assert held is not None
    for _ in range(5):
        until, expires_at = held._deadline, _expires_at(registered)
        assert renewals.acquire(timeout=60)
        eventually(lambda: held._deadline > until and _expires_at(registered) > expires_at)  # noqa: B023

    assert held._deadline <= time.monotonic() + 120
    held.guard()
    held.release()


def _expires_at(store: StateStore) -> float:
    row = store.leases.get("p")
    assert row is not None
    return row.expires_at


def test_a_holder_that_slept_past_its_lease_sends_and_writes_nothing(
    registered: StateStore,
) -> None:
    """After the local deadline `guard` and `write` refuse, although nobody else took the lease."""
    held = acquire(registered, seconds=0.2, renew_seconds=30)
    assert held is not None
    eventually(lambda: not _may_send(held))

    with pytest.raises(LeaseLost):
        held.write(lambda writer: writer.pipeline.set_confirmed("{}"))
    assert held.lost.is_set()
    held.release()


def test_a_write_under_an_older_epoch_is_refused_by_the_store(registered: StateStore) -> None:
    """Even a holder that believes in its lease writes nothing once another one has it."""
    held = acquire(registered, seconds=0.2, renew_seconds=30)
    assert held is not None
    eventually(lambda: registered.leases.acquire("p", "other", 30) is not None)
    held._deadline += 60  # the holder's clock lies

    with pytest.raises(LeaseLost):
        held.write(lambda writer: writer.pipeline.set_confirmed("{}"))
    row = registered.pipelines.get("p")
    assert row is not None
    assert row.confirmed_position is None
    held.release()


def _may_send(held: ActiveLease) -> bool:
    try:
        held.guard()
    except LeaseLost:
        return False
    return True


def test_a_lost_store_does_not_lose_a_write(tmp_path: Path) -> None:
    """While the store cannot be reached the same block is tried again, and then written once."""
    store = StateStore.open(f"sqlite:///{tmp_path}/state.db")
    store.pipelines.register("p", "hash", ["s"])
    held = acquire(store)
    assert held is not None
    tries = []

    def block(writer: object) -> int:
        tries.append(writer)
        if len(tries) < 3:
            raise StoreUnavailable("gone for a moment")
        return len(tries)

    assert held.write(block) == 3
    held.release()
    store.close()
