"""Rows that are to be looked for, in the state store."""

from __future__ import annotations

from deltaforge_dagster.state.snapshot_records import PlannedChunk
from deltaforge_dagster.state.store import StateStore
from tests.state.make import NAME, held
from tests.state.test_snapshots import FIRST, SECOND, TABLE, read, reading, splice, staged, state

LOOKING = PlannedChunk(TABLE, 3, "{}")
LONG = '{"id":"' + "x" * 10_000 + '"}'


def test_a_snapshot_is_not_finished_before_relocated_rows_are_looked_for(store: StateStore) -> None:
    """They are ready once every chunk of their table is spliced; then one more chunk takes them."""
    lease = held(store)
    number = reading(store)
    for chunk in (FIRST, SECOND):
        assert store.snapshots.stage(NAME, number, chunk, staged(str(chunk.number)))
    with store.fenced(lease) as writer:
        writer.relocated_rows.note(number, TABLE, ["{1}", LONG])
        writer.relocated_rows.note(number, TABLE, ["{1}"])
    assert store.relocated_rows.read(NAME, number, TABLE) == sorted([LONG, "{1}"])
    first, second = read(store, number)
    splice(store, lease, first)
    assert store.relocated_rows.ready_tables(NAME, number) == []
    splice(store, lease, second)
    assert state(store) == "reading"
    assert store.relocated_rows.ready_tables(NAME, number) == [TABLE]

    store.snapshots.plan_relocated_rows(NAME, number, LOOKING, keys=["{1}"], attempts=2)
    store.snapshots.plan_relocated_rows(
        NAME, number, LOOKING, keys=[LONG], attempts=2
    )  # another run was faster

    assert store.relocated_rows.read(NAME, number, TABLE) == [LONG]
    assert store.relocated_rows.ready_tables(NAME, number) == []
    (chunk,) = store.snapshots.chunks(NAME, number, table=TABLE, state="planned")
    assert (chunk.number, chunk.attempts) == (3, 2)
    store.snapshots.plan_relocated_rows(
        NAME, number, PlannedChunk(TABLE, 4, "{}"), keys=[LONG], attempts=0
    )
    for one in (3, 4):
        assert store.snapshots.stage(NAME, number, PlannedChunk(TABLE, one, ""), staged(str(one)))
    for row in read(store, number):
        splice(store, lease, row)
    assert state(store) == "complete"


def test_relocated_rows_of_a_cancelled_snapshot_are_not_looked_for(store: StateStore) -> None:
    """Nor is a chunk planned for them."""
    lease = held(store)
    number = reading(store)
    with store.fenced(lease) as writer:
        writer.relocated_rows.note(number, TABLE, ["{1}"])
    assert store.snapshots.cancel(NAME, number, "enough")

    store.snapshots.plan_relocated_rows(NAME, number, LOOKING, keys=["{1}"], attempts=0)

    assert store.relocated_rows.read(NAME, number, TABLE) == []
    assert len(store.snapshots.chunks(NAME, number)) == 2
