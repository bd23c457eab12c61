"""What is held, through its states, and what the committed position may pass."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deltaforge_dagster.errors import LeaseLost, NotAllowed
from deltaforge_dagster.sources.postgres.position import LsnPosition
from deltaforge_dagster.sources.registry import parse_position
from deltaforge_dagster.state.records import HoldPart, HoldRow, Lease
from deltaforge_dagster.state.store import StateStore

TABLE, SUBJECT = "table", "shop.orders"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StateStore]:
    """A store with a pipeline that begins at 10."""
    opened = StateStore.open(f"sqlite:///{tmp_path}/state.db")
    opened.pipelines.register("p", "hash", ["a", "b"])
    opened.pipelines.set_start("p", at(10), {"t": "at the start", "gone": "x"})
    yield opened
    opened.close()


@pytest.fixture
def lease(store: StateStore) -> Lease:
    """The lease of that pipeline."""
    taken = store.leases.acquire("p", "run", 60)
    assert taken is not None
    return taken


def at(lsn: int) -> str:
    """Return a position as JSON text."""
    return LsnPosition(lsn).to_json()


def part(path: str, *, since: int = 20, subject: str = SUBJECT, events: int = 3) -> HoldPart:
    """Return a file of held events."""
    return HoldPart(TABLE, subject, "nobody knows", at(since), path, "sum", events, 100)


def keep(store: StateStore, lease: Lease, position: int, *parts: HoldPart) -> None:
    """Keep files up to a position."""
    with store.fenced(lease) as writer:
        writer.holds.keep(parts, at(position))


def only(store: StateStore) -> HoldRow:
    """Return the only hold."""
    (row,) = store.holds.read("p")
    return row


def test_what_is_kept_moves_the_captured_position_once(store: StateStore, lease: Lease) -> None:
    """A block that is run again after a lost answer counts nothing twice; parts stay in order."""
    for _ in range(2):
        keep(store, lease, 30, part("one"), part("other", subject="shop.items"))
    keep(store, lease, 40, part("two", since=30, events=5))

    found = {hold.subject: hold for hold in store.holds.read("p")}
    assert (found[SUBJECT].events, found[SUBJECT].bytes) == (8, 200)
    assert found[SUBJECT].since_position == at(20)
    assert [one.path for one in store.holds.parts("p", TABLE, SUBJECT)] == ["one", "two"]
    row = store.pipelines.get("p")
    assert row is not None
    assert row.captured_position == at(40)


def test_an_old_run_keeps_nothing(store: StateStore, lease: Lease) -> None:
    """Holds are fenced like segments."""
    with store.fenced(lease) as writer:
        writer.lease.release()
    assert store.leases.acquire("p", "other", 60) is not None
    with pytest.raises(LeaseLost):
        keep(store, lease, 30, part("one"))
    assert store.holds.read("p") == []


def test_a_hold_is_released_held_back_and_journaled(store: StateStore, lease: Lease) -> None:
    """Only what is held can be released; once journaled its files are nobody's."""
    keep(store, lease, 30, part("one"))
    with pytest.raises(NotAllowed, match="holds no table"):
        store.holds.release("p", TABLE, "no.table", "{}")

    released = store.holds.release("p", TABLE, SUBJECT, '{"catalog": true}')
    assert (released.state, released.remedy) == ("released", '{"catalog": true}')
    with store.fenced(lease) as writer:
        writer.holds.revoke_release(released, "still unknown")
    assert (only(store).state, only(store).reason) == ("held", "still unknown")

    released = store.holds.release("p", TABLE, SUBJECT, "{}")
    with store.fenced(lease) as writer:
        writer.holds.journaled(released, 7)
    assert only(store).passed(7)
    assert not only(store).passed(6)
    assert store.holds.parts("p") == []
    with pytest.raises(NotAllowed):
        store.holds.release("p", TABLE, SUBJECT, "{}")

    with store.fenced(lease) as writer:
        writer.holds.forget(6)
    assert only(store).state == "journaled"
    with store.fenced(lease) as writer:
        writer.holds.forget(7)
    assert store.holds.read("p") == []


def test_held_again_before_sinks_have_the_released_events(store: StateStore, lease: Lease) -> None:
    """It is one hold, which begins where the first one did."""
    keep(store, lease, 30, part("one"))
    with store.fenced(lease) as writer:
        writer.holds.journaled(only(store), 7)
    keep(store, lease, 60, part("two", since=50, events=2))

    row = only(store)
    assert (row.state, row.events, row.since_position) == ("held", 2, at(20))
    assert not row.passed(7)


def test_definitions_are_those_of_the_position(store: StateStore, lease: Lease) -> None:
    """A run that begins before a statement takes what held there, also after a second reading."""
    for _ in range(2):
        with store.fenced(lease) as writer:
            writer.definitions.define({"t": "altered", "gone": None, "new": "made"}, at(20))
            writer.definitions.define({"t": "altered again"}, at(30))

    assert store.definitions.at("p", parse_position(at(10))) == {"t": "at the start", "gone": "x"}
    assert store.definitions.at("p", parse_position(at(25))) == {"t": "altered", "new": "made"}
    assert store.definitions.at("p", parse_position(at(30)))["t"] == "altered again"

    with store.fenced(lease) as writer:
        writer.pipeline.set_confirmed(at(30))
        writer.definitions.define({"t": "altered once more", "gone": None}, at(40))
    assert "t" not in store.definitions.at("p", parse_position(at(25)))
    assert store.definitions.at("p", parse_position(at(30)))["t"] == "altered again"
    assert store.definitions.at("p", parse_position(at(45))) == {
        "t": "altered once more",
        "new": "made",
    }
