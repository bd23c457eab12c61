"""The contract of a state store: commits of sinks that write tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.state.copies import back_up, restore
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.state.table_commits import (
    Rejection,
    TableCommits,
    TableFront,
    TableWrite,
)
from tests.state.make import NAME, capture, deliver, held, new_segment, position

ORDERS, ITEMS = ("public", "orders"), ("public", "a.b")
SINK = "lake"


def commits(store: StateStore) -> TableCommits:
    """Return what the store has of the sink."""
    found = store.table_commits.read(NAME, SINK)
    assert found is not None
    return found


def places(store: StateStore) -> tuple[object, ...]:
    """Return front, plan, ends and the segments and plans of held tables."""
    found = commits(store)
    tables = {name: (one.segment, one.planned_to) for name, one in found.suspended.items()}
    return (found.front.segment, found.front.planned_to, found.front.ends, tables)


def write(name: str, changes: int, segment: int) -> TableWrite:
    """Return what a commit up to a segment has added to a table."""
    columns = (("id", "bigint"), ("größe", "decimal(10,2)"))
    source = ("public", name)
    return TableWrite(source, ("raw", name), columns, changes, position(segment), segment / 8)


def writes(store: StateStore) -> list[tuple[int, str, int]]:
    """Return what is to be published: end of the commit, table and changes."""
    found = store.table_commits.unpublished(NAME)
    return [(one.segment, one.write.source[1], one.write.changes) for one in found]


def publish(store: StateStore) -> None:
    """Publish everything."""
    for one in store.table_commits.unpublished(NAME):
        store.table_commits.mark_published(NAME, one)


def test_a_commit_is_planned_then_done(store: StateStore) -> None:
    """Each step has the same effect a second time; another plan is refused until this one is done."""
    lease = held(store, SINK)
    assert store.table_commits.read(NAME, SINK) is None
    for _ in range(2):
        with store.fenced(lease) as writer:
            writer.table_commits.restart(SINK, 3)
    for _ in range(2):
        with store.fenced(lease) as writer:
            writer.table_commits.plan(SINK, 7)
    assert places(store) == (3, 7, (), {})

    for other in (6, 8):
        with pytest.raises(NotAllowed, match="planned: 7"), store.fenced(lease) as writer:
            writer.table_commits.plan(SINK, other)
    moved = []
    for _ in range(2):
        with store.fenced(lease) as writer:
            moved.append(writer.table_commits.advance(SINK, 7))

    assert (moved, places(store)) == ([True, False], (7, None, (), {}))
    with pytest.raises(NotAllowed), store.fenced(lease) as writer:
        writer.table_commits.plan(SINK, 7)


def test_a_held_table_follows_by_itself(store: StateStore) -> None:
    """Its failed commit stays planned; it is held until it has reached the front."""
    lease = held(store, SINK)
    with store.fenced(lease) as writer:
        writer.table_commits.restart(SINK, 3)
        writer.table_commits.plan(SINK, 5)
        rejected = [Rejection(one, "no such type", 17.0) for one in (ORDERS, ITEMS)]
        writer.table_commits.advance(SINK, 5, rejected)
        writer.table_commits.plan(SINK, 9)
        writer.table_commits.advance(SINK, 9)
    assert places(store) == (9, None, (), {ORDERS: (3, 5), ITEMS: (3, 5)})
    assert commits(store).reached == 3

    with store.fenced(lease) as writer:
        writer.table_commits.tried(SINK, Rejection(ITEMS, "still none", 19.0))
        moved = writer.table_commits.wrote(SINK, ORDERS, 5)
        again = writer.table_commits.wrote(SINK, ORDERS, 5)
        writer.table_commits.plan(SINK, 9, ORDERS)
    found = commits(store)
    items = found.suspended[ITEMS]
    assert (items.error, items.failures, items.next_attempt_at) == ("still none", 2, 19.0)
    assert 0 < items.since <= store.now()
    assert (moved, again, found.suspended[ORDERS].segment, found.reached) == (True, False, 5, 3)

    with store.fenced(lease) as writer:
        assert writer.table_commits.wrote(SINK, ORDERS, 9)
    assert places(store) == (9, None, (), {ITEMS: (3, 5)})
    with store.fenced(lease) as writer:
        assert not writer.table_commits.wrote(SINK, ORDERS, 9)


def test_after_a_restart_commits_end_where_they_did(store: StateStore) -> None:
    """Tables have some of the commits that were planned; ends are forgotten once every table has passed them."""
    lease = held(store, SINK)
    with store.fenced(lease) as writer:
        writer.table_commits.restart(SINK, 3)
        writer.table_commits.plan(SINK, 5)
        writer.table_commits.advance(SINK, 5, [Rejection(ORDERS, "no", 0.0)])
        writer.table_commits.plan(SINK, 8)
    owner = commits(store).front.owner

    with store.fenced(lease) as writer:
        writer.table_commits.restart(SINK, 1)
    assert commits(store).front == TableFront(1, None, owner, (3, 5, 8))

    with store.fenced(lease) as writer:
        writer.table_commits.plan(SINK, 3)
        writer.table_commits.advance(SINK, 3, [Rejection(ORDERS, "no", 0.0)])
        writer.table_commits.plan(SINK, 5)
        writer.table_commits.advance(SINK, 5)
    assert places(store) == (5, None, (3, 5, 8), {ORDERS: (1, 3)})
    with store.fenced(lease) as writer:
        writer.table_commits.wrote(SINK, ORDERS, 3)
    assert places(store) == (5, None, (5, 8), {ORDERS: (3, None)})


def test_it_goes_with_its_sink(store: StateStore) -> None:
    """A sink that is no longer in the file has none; nor has a removed pipeline."""
    lease = held(store, SINK, "other")
    for sink in (SINK, "other"):
        with store.fenced(lease) as writer:
            writer.table_commits.restart(sink, 0)
    with store.fenced(lease) as writer:
        writer.lease.release()

    store.pipelines.register(NAME, "spec-2", ["other"])
    assert store.table_commits.read(NAME, SINK) is None
    assert store.table_commits.read(NAME, "other") is not None
    store.pipelines.remove(NAME)
    assert store.table_commits.read(NAME, "other") is None


@pytest.mark.parametrize("how", ["rebuild", "reset"])
def test_segments_of_another_journal_are_others(store: StateStore, how: str) -> None:
    """What tables have says nothing about them."""
    lease = held(store, SINK)
    capture(store, lease, 1)
    deliver(store, lease, SINK, 1)
    with store.fenced(lease) as writer:
        writer.table_commits.restart(SINK, 1)
        writer.lease.release()

    if how == "reset":
        store.journals.reset(NAME)
    else:
        store.journals.rebuild(NAME, accept_loss=True)

    assert store.table_commits.read(NAME, SINK) is None


def test_a_restored_store_does_not_know_what_tables_have(store: StateStore, tmp_path: Path) -> None:
    """After the copy was made, they may have got other segments of the same numbers."""
    lease = held(store, SINK)
    with store.fenced(lease) as writer:
        writer.table_commits.restart(SINK, 1)
        writer.lease.release()
    back_up(store, tmp_path / "copy.db")

    restore(tmp_path / "copy.db", store, force=True)

    assert store.pipelines.get(NAME) is not None
    assert store.table_commits.read(NAME, SINK) is None


def test_a_sink_that_goes_on_although_tables_are_held(store: StateStore) -> None:
    """Its checkpoint moves, and it is shown as failing since the first table was held."""
    lease = held(store, SINK)
    capture(store, lease, 1, 2)
    with store.fenced(lease) as writer:
        row = new_segment(1)
        writer.checkpoints.advance(SINK, 1, 2, True, row.end_position)
        writer.checkpoints.suspended(
            SINK, "orders: no", remedy=["x"], failures=3, since=17.0, next_attempt_at=21.0
        )

    found = store.checkpoints.read(NAME)[SINK]
    assert (found.segment, found.failures, found.error_line) == (1, 3, "orders: no; run: x")
    assert (found.failing_since, found.next_attempt_at) == (17.0, 21.0)


def test_each_write_is_published_and_the_last_is_kept(store: StateStore) -> None:
    """A commit that is recorded a second time is one; a table without changes in it has none."""
    lease = held(store, SINK)
    with store.fenced(lease) as writer:
        writer.table_commits.restart(SINK, 0)
    for to, added in ((3, ["orders", "a.b"]), (5, ["orders"])):
        for _ in range(2):
            with store.fenced(lease) as writer:
                writer.table_commits.advance(SINK, to, (), [write(one, to, to) for one in added])
    assert writes(store) == [(3, "a.b", 3), (3, "orders", 3), (5, "orders", 5)]

    store.table_commits.mark_published(NAME, store.table_commits.unpublished(NAME)[1])
    assert writes(store) == [(3, "a.b", 3), (5, "orders", 5)]
    publish(store)
    with store.fenced(lease) as writer:
        writer.table_commits.advance(SINK, 6, (), [write("orders", 6, 6)])

    assert writes(store) == [(6, "orders", 6)]
    items, orders = store.table_commits.tables(NAME)
    assert (items.sink, items.segment, items.write) == (SINK, 3, write("a.b", 3, 3))
    assert (orders.segment, orders.write) == (6, write("orders", 6, 6))
    assert 0 < orders.written_at <= store.now()


def test_what_older_rows_lack_is_known_until_the_table_is_recreated(store: StateStore) -> None:
    """Later writes of the table keep it, and add to it; then it has other columns. Other tables have nothing to do with it."""
    lease = held(store, SINK)
    lacking = replace(write("orders", 3, 3), lacking=("c",))
    later = replace(write("orders", 5, 5), lacking=("b",))
    with store.fenced(lease) as writer:
        writer.table_commits.restart(SINK, 0)
        writer.table_commits.advance(SINK, 3, (), [lacking, write("a.b", 3, 3)])
        writer.table_commits.advance(SINK, 5, (), [later])
        writer.table_commits.advance(SINK, 6, (), [write("orders", 6, 6)])
    known = {one.write.source[-1]: one.write.lacking for one in store.table_commits.tables(NAME)}
    assert known == {"orders": ("b", "c"), "a.b": ()}

    with store.fenced(lease) as writer:
        writer.table_commits.recreated(SINK, lacking.source, lacking.destination, [("id", "int")])
    _, orders = store.table_commits.tables(NAME)
    assert [tuple(one) for one in orders.write.columns] == [("id", "int")]
    with store.fenced(lease) as writer:
        writer.table_commits.advance(SINK, 7, (), [write("orders", 7, 7)])
    assert [one.write.lacking for one in store.table_commits.tables(NAME)] == [(), ()]


def test_writes_of_a_held_table(store: StateStore) -> None:
    """They come later than those of the others."""
    lease = held(store, SINK)
    with store.fenced(lease) as writer:
        writer.table_commits.restart(SINK, 0)
        writer.table_commits.advance(
            SINK, 3, [Rejection(ITEMS, "no", 0.0)], [write("orders", 3, 3)]
        )
        writer.table_commits.advance(SINK, 4, (), [write("orders", 4, 4)])
    for to in (3, 4):
        for _ in range(2):
            with store.fenced(lease) as writer:
                writer.table_commits.wrote(SINK, ITEMS, to, [write("a.b", to, to)])

    assert writes(store) == [(3, "a.b", 3), (3, "orders", 3), (4, "a.b", 4), (4, "orders", 4)]


def test_commits_that_a_table_had_are_not_published_again(store: StateStore) -> None:
    """After the checkpoint was set back, tables skip what they have."""
    lease = held(store, SINK)
    with store.fenced(lease) as writer:
        writer.table_commits.restart(SINK, 0)
        for to in (3, 5):
            writer.table_commits.advance(SINK, to, (), [write("orders", to, to)])
    publish(store)

    with store.fenced(lease) as writer:
        writer.table_commits.restart(SINK, 0)
        for to in (3, 5, 7):
            writer.table_commits.advance(SINK, to, (), [write("orders", to, to)])

    assert writes(store) == [(7, "orders", 7)]


def test_tables_stay_known(store: StateStore, tmp_path: Path) -> None:
    """After a reset and in a restored store, which publishes nothing of before; not without the sink."""
    lease = held(store, SINK)
    with store.fenced(lease) as writer:
        writer.table_commits.restart(SINK, 0)
        writer.table_commits.advance(SINK, 3, (), [write("orders", 3, 3)])
        writer.lease.release()
    back_up(store, tmp_path / "copy.db")
    store.journals.reset(NAME)
    assert len(store.table_commits.tables(NAME)) == 1

    restore(tmp_path / "copy.db", store, force=True)
    assert (len(store.table_commits.tables(NAME)), writes(store)) == (1, [])

    store.pipelines.register(NAME, "spec-2", ["other"])
    assert store.table_commits.tables(NAME) == []


def test_pending_changes(store: StateStore) -> None:
    """They are counted once recorded; a commit that goes to the table, and a fold, ends them; a step back counts from 0."""
    lease = held(store, SINK)
    source = ("shop", None, "orders")

    def pending() -> list[tuple[object, ...]]:
        rows = store.table_commits.pending(NAME)
        found = store.table_commits.read(NAME, SINK)
        assert found is not None
        assert list(found.pending.values()) == rows
        return [(one.destination, one.source, one.segment, one.changes) for one in rows]

    with store.fenced(lease) as writer:
        writer.table_commits.restart(SINK, 0)
    for _ in range(2):
        with store.fenced(lease) as writer:
            writer.table_commits.plan(SINK, 2)
            writer.table_commits.plan_pending(SINK, {ORDERS: source, ITEMS: source}, 2)
    assert sorted(pending(), key=str) == [(ITEMS, source, 2, 0), (ORDERS, source, 2, 0)]
    added = [replace(write("orders", 3, 2), destination=ORDERS, pending=True)]
    added += [replace(write("items", 3, 2), destination=ITEMS)]
    for _ in range(2):
        with store.fenced(lease) as writer:
            writer.table_commits.advance(SINK, 2, (), added)
    assert pending() == [(ORDERS, source, 2, 3)]

    with store.fenced(lease) as writer:
        writer.table_commits.plan(SINK, 4)
        writer.table_commits.plan_pending(SINK, {ORDERS: source}, 4)
        writer.table_commits.advance(SINK, 4, (), added[:1])
        writer.table_commits.plan_pending(SINK, {ORDERS: source}, 3)
        writer.table_commits.restart(SINK, 9)
    assert pending() == [(ORDERS, source, 4, 6)]
    with store.fenced(lease) as writer:
        writer.table_commits.restart(SINK, 1)
    assert pending() == [(ORDERS, source, 4, 0)]
    for _ in range(2):
        with store.fenced(lease) as writer:
            writer.table_commits.folded(SINK, ORDERS)
    assert pending() == []


def test_pending_changes_of_a_former_series(store: StateStore, tmp_path: Path) -> None:
    """A restored store does not take a commit of its series for the former one of that number."""
    lease = held(store, SINK)
    with store.fenced(lease) as writer:
        writer.table_commits.restart(SINK, 2)
        writer.table_commits.plan(SINK, 9)
        writer.table_commits.plan_pending(SINK, {ORDERS: ("shop", "public", "orders")}, 9)
        writer.lease.release()
    back_up(store, tmp_path / "copy.db")
    restore(tmp_path / "copy.db", store, force=True)
    with store.fenced(held(store, SINK)) as writer:
        writer.table_commits.restart(SINK, 2)
    (table,) = store.table_commits.pending(NAME)
    assert table.segment == 2


def test_a_table_is_held_although_it_has_everything(store: StateStore) -> None:
    """Because its pending changes cannot be folded; then it is held no longer."""
    lease = held(store, SINK)
    for _ in range(2):
        with store.fenced(lease) as writer:
            writer.table_commits.restart(SINK, 3)
            writer.table_commits.suspend(SINK, Rejection(ORDERS, "why", 5.0))
            writer.table_commits.suspend(SINK, Rejection(ORDERS, "why", 5.0))
        assert places(store) == (3, None, (), {ORDERS: (3, None)})
    moved = []
    for _ in range(2):
        with store.fenced(lease) as writer:
            moved.append(writer.table_commits.wrote(SINK, ORDERS, 3))
    assert (moved, places(store)) == ([True, False], (3, None, (), {}))


def test_a_resync_begins_at_the_front(store: StateStore) -> None:
    """Once, with one snapshot, and not within a commit; what the table lacked before is forgotten."""
    lease = held(store, SINK)
    capture(store, lease, *range(1, 11))
    with store.fenced(lease) as writer:
        writer.table_commits.restart(SINK, 3)
        writer.table_commits.plan(SINK, 7)
        writer.table_commits.advance(SINK, 7, [Rejection(ORDERS, "why", 99.0)])
        writer.table_commits.plan(SINK, 9)
        for one in (ORDERS, ITEMS):
            writer.table_commits.plan_pending(SINK, {one: ("shop", None, one[-1])}, 9)
    store.table_commits.resync(NAME, SINK, {ORDERS: "public.orders", ITEMS: "public.a.b"})
    store.table_commits.resync(NAME, SINK, {ORDERS: "public.orders"})
    with pytest.raises(NotAllowed, match="planned"), store.fenced(lease) as writer:
        writer.table_commits.begin_resyncs(SINK, [ORDERS])
    with store.fenced(lease) as writer:
        writer.table_commits.advance(SINK, 9)
    for _ in range(2):
        with store.fenced(lease) as writer:
            writer.table_commits.begin_resyncs(SINK, [ORDERS])
    assert places(store) == (9, None, (), {ORDERS: (9, None)})
    assert commits(store).suspended[ORDERS].recreate
    (snapshot,) = store.snapshots.read(NAME)
    assert (snapshot.tables, snapshot.sinks, snapshot.since_segment) == (
        ["public.orders"],
        [SINK],
        10,
    )
    assert [(one.destination, one.begun) for one in store.table_commits.resyncs(NAME)] == [
        (ITEMS, False), (ORDERS, True),
    ]  # fmt: skip
    with pytest.raises(NotAllowed, match="unfinished"), store.fenced(lease) as writer:
        writer.table_commits.begin_resyncs(SINK, [ITEMS])
    with pytest.raises(NotAllowed, match="begun already"):
        store.table_commits.resync(NAME, SINK, {ORDERS: "public.orders"})

    with store.fenced(lease) as writer:
        writer.table_commits.restart(SINK, 5)
    assert places(store)[3] == {ORDERS: (5, None)}
    for _ in range(2):
        with store.fenced(lease) as writer:
            writer.table_commits.recreated(SINK, ("public", "orders"), ORDERS, ())
    assert places(store)[3] == {}
    assert [one.destination for one in store.table_commits.pending(NAME)] == [ITEMS]
    assert [one.destination for one in store.table_commits.resyncs(NAME, SINK)] == [ITEMS]
