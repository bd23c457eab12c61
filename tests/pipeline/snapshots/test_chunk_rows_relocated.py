"""Rows that move between chunks while these are read, with values that only the table has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.run_context import ActiveLease
from deltaforge_dagster.pipeline.snapshots.chunk_rows import (
    MAX_ROUNDS,
    RelocatedRows,
    plan_relocated_rows,
)
from deltaforge_dagster.sources.snapshot import Chunk, ChunkKind
from deltaforge_dagster.state.snapshot_records import PlannedChunk, SnapshotRow, StagedChunk
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.tables import Column, TableSchema
from tests.journal.changes import batch, change
from tests.pipeline.snapshotting import fill
from tests.pipeline.test_snapshot import World, world

__all__ = ["world"]

LARGE = "repeat('large', 1000)"


def make(world: World, table: str = "wide") -> str:
    """Make a table whose updates leave `t` out, and return its full name."""
    fill(world.shop, table)
    if world.schema == "public":
        world.shop.execute(f"ALTER TABLE {table} ALTER COLUMN t SET STORAGE EXTERNAL")
    world.shop.execute(f"UPDATE {table} SET t = {LARGE}")
    world.captured_up_to_now()
    return f"{world.schema}.{table}"


def update(world: World, *statements: str) -> None:
    """Run updates, none of which logs a large value that stays."""
    noblob = [] if world.schema == "public" else ["SET SESSION binlog_row_image = 'NOBLOB'"]
    world.shop.execute(*noblob, *statements)


def read_last_chunk_first(world: World, table: str) -> None:
    """Have the last chunk of a new snapshot in the journal while the others are not read."""
    world.snapshots.request(table)
    world.snapshots.read(only={(table, 1)})
    last = world.snapshots.store.snapshots.chunks("p", 1)[-1]
    world.snapshots.read(only={(table, last.number)})
    world.stage.capture(
        lambda _: world.snapshots.store.snapshots.chunks("p", 1)[-1].state == "complete"
    )
    world.snapshots.store.snapshots.reopen("p", 1, [(table, 1)])


def read_on(world: World) -> SnapshotRow:
    """Read what is missing, and have it in the journal."""
    world.snapshots.read()
    world.captured_up_to_now()
    world.stage.capture(lambda _: not world.snapshots.store.snapshots.chunks("p", 1, state="read"))
    return world.snapshots.newest()


def test_a_row_that_moves_past_both_readings(world: World) -> None:
    """Into a chunk that is done from one that is not: it is looked for until it is found."""
    table = make(world)
    read_last_chunk_first(world, table)
    update(world, "UPDATE wide SET a = 9000, v = 1 WHERE a = 60")
    assert read_on(world).state == "reading"
    update(world, "UPDATE wide SET a = 9001, v = 2 WHERE a = 9000")  # nobody knows yet

    assert read_on(world).state == "reading"
    assert read_on(world).state == "complete"
    copy = world.snapshots.copy("wide")
    assert copy.older == []
    assert copy.rows == world.rows("wide")


TABLE = "public.orders"
COLUMNS = tuple(Column(name, "text", None, True, n) for n, name in enumerate(("id", "v", "t"), 1))
DESCRIBED = TableSchema("shop", "public", "orders", COLUMNS, ("id",))


class Desk:
    """A snapshot of two chunks of a table, and the relocated rows of a run that takes them over."""

    def __init__(self, store: StateStore, folder: Path, kind: ChunkKind) -> None:
        store.pipelines.register("p", "hash", ["s"])
        lease = ActiveLease.acquire(
            store, "p", "run", seconds=60, renew_seconds=20, on_renewal=lambda: None
        )
        assert lease is not None
        self.store, self.lease = store, lease
        self._journal = Journal(f"file://{folder}")
        self._relocated_rows = RelocatedRows(store, self._journal, lease)
        self._segment = 0
        store.snapshots.request("p", cause="command")
        chunks = [Chunk(TABLE, number, kind) for number in (1, 2)]
        planned = [PlannedChunk(TABLE, one.number, one.to_json()) for one in chunks]
        assert store.snapshots.plan("p", 1, planned)

    def take_over(self, number: int) -> None:
        """Have a chunk in the journal, none of whose rows is left."""
        (chunk,) = [one for one in self.store.snapshots.chunks("p", 1) if one.number == number]
        read = StagedChunk(None, "", 0, 0, "{}", "{}", DESCRIBED.to_json(), 1, 0.1)
        assert self.store.snapshots.stage("p", 1, chunk, read)
        (chunk,) = self.store.snapshots.chunks("p", 1, state="read")
        self.lease.write(lambda writer: writer.snapshots.complete(chunk, segment=None, rows=0))
        self._relocated_rows.poll(self.store.snapshots.unfinished("p"))

    def capture(self, *moves: tuple[int, int], whole: bool = False) -> list[str]:
        """Capture updates of rows, from key to key; return which rows were relocated."""
        rows = []
        for number, (old, new) in enumerate(moves):
            after = {"id": new, "v": 1} | ({"t": "x"} if whole else {"t": {"_unchanged": True}})
            image = json.dumps(after, separators=(",", ":"))
            before = None if old == new else f'{{"id":{old}}}'
            key = f'{{"id":{new}}}'
            rows.append(change(number, op="u", before=before, after=image, key=key, table="orders"))
        self._segment += 1
        writer = self._journal.writer("p", "uid", self._segment, self.lease.epoch)
        writer.write(batch(rows))
        self._relocated_rows.watch(writer.close())
        return self.store.relocated_rows.read("p", 1, TABLE)


@pytest.mark.parametrize(
    ("kind", "stray"), [("key", ['{"id":9}']), ("ctid", ['{"id":2}', '{"id":9}'])]
)
def test_what_may_take_a_row_to_another_chunk(
    sqlite_store: StateStore, tmp_path: Path, kind: ChunkKind, stray: list[str]
) -> None:
    """Another key, or in a table of blocks any update; once a chunk is done, and if columns lack."""
    desk = Desk(sqlite_store, tmp_path, kind)

    assert desk.capture((1, 9)) == []
    desk.take_over(1)
    assert desk.capture((1, 9), (2, 2), whole=True) == []
    assert desk.capture((1, 9), (2, 2)) == stray


def test_only_rows_that_are_looked_for_are_followed(
    sqlite_store: StateStore, tmp_path: Path
) -> None:
    """Once all chunks are done, nothing else can be missing; and not for ever."""
    desk = Desk(sqlite_store, tmp_path, "key")
    store = desk.store
    desk.take_over(1)
    desk.capture((1, 9))
    desk.take_over(2)
    assert desk.capture((3, 4)) == ['{"id":9}']
    snapshot = store.snapshots.unfinished("p")
    assert snapshot is not None
    for number in range(MAX_ROUNDS):
        plan_relocated_rows(store, "p", snapshot)
        (planned,) = store.snapshots.chunks("p", 1, state="planned")
        assert Chunk.from_json(planned.plan).keys == (f'{{"id":{9 + number}}}',)
        assert desk.capture((5, 6), (9 + number, 10 + number)) == [f'{{"id":{10 + number}}}']
        desk.take_over(planned.number)

    plan_relocated_rows(store, "p", snapshot)

    cancelled = store.snapshots.read("p")[0]
    assert cancelled.state == "cancelled"
    assert "get other keys all the time" in str(cancelled.problem)
