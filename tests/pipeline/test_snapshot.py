"""Snapshots from tables to the journal, on both databases, while writers and stream go on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import update

from deltaforge_dagster.pipeline.capture.capture import Capture
from deltaforge_dagster.positions import Position
from deltaforge_dagster.state.database.tables import chunks, snapshots
from deltaforge_dagster.state.snapshots import SnapshotRepository
from deltaforge_dagster.state.store import StateStore
from deltaforge_lab.servers import mysql
from tests.e2e.conftest import Shop
from tests.pipeline.capturing import Stage
from tests.pipeline.changes import eventually
from tests.pipeline.ends import MysqlShop
from tests.pipeline.snapshotting import Copy, Key, Killed, Row, Snapshots, Writers, fill
from tests.sources.mysql.bench import MysqlBench
from tests.sources.postgres.bench import PostgresBench

SECONDS = 120.0


@dataclass
class World:
    """A pipeline over the tables of a database, of which `hot` was full before it began."""

    shop: Shop
    schema: str
    stage: Stage
    snapshots: Snapshots

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        """Return the rows of a statement."""
        if isinstance(self.shop, MysqlShop):
            with mysql.connect(self.shop.dsn) as connection, connection.cursor() as cursor:
                cursor.execute(statement)
                return list(cursor.fetchall())
        with psycopg.connect(self.shop.dsn) as connection:
            return connection.execute(statement).fetchall()

    def rows(self, table: str = "hot") -> dict[Key, Row]:
        """Return what the source has."""
        found = self.query(f"SELECT a, b, v, t FROM {table}")
        return {(a, b): {"a": a, "b": b, "v": v, "t": t} for a, b, v, t in found}

    def captured_up_to_now(self) -> None:
        """Capture everything that was written."""
        head = self.stage.bench.source().head()
        self.stage.capture(lambda capture: _has_reached(capture, head))

    def caught_up(self, table: str = "hot") -> Copy:
        """Capture everything there is, chunks included, and return what that makes of a table."""
        head = self.stage.bench.source().head()
        self.stage.capture(
            lambda capture: _has_reached(capture, head) and self.snapshots.complete()
        )
        return self.snapshots.copy(table)


def _has_reached(capture: Capture, head: Position) -> bool:
    passed = capture.passed
    return head <= capture.position or (passed is not None and head <= passed)


@pytest.fixture(
    params=[
        pytest.param("postgres", marks=pytest.mark.postgres),
        pytest.param("mysql", marks=pytest.mark.mysql),
    ]
)
def world(
    request: pytest.FixtureRequest, sqlite_store: StateStore, tmp_path: Path
) -> Iterator[World]:
    """A world in each database."""
    dsn: str = request.getfixturevalue(f"{request.param}_dsn")
    bench: PostgresBench | MysqlBench
    shop: Shop
    if request.param == "postgres":
        bench, shop, schema = PostgresBench(dsn), Shop(dsn, ""), "public"
    else:
        bench = MysqlBench(dsn)
        shop, schema = MysqlShop(dsn, ""), bench.database
    with bench:
        fill(shop, "hot")
        stage = Stage(_Wide(bench, schema), sqlite_store, tmp_path / "journal")
        yield World(shop, schema, stage, Snapshots(stage, tmp_path))


class _Wide:
    """A bench whose sources capture every table."""

    def __init__(self, bench: PostgresBench | MysqlBench, schema: str) -> None:
        self._bench = bench
        self._tables = (f"{schema}.*",)

    def source(self) -> Any:
        """Return a new source."""
        return self._bench.source(tables=self._tables)


def test_the_journal_makes_what_the_source_has(world: World) -> None:
    """Writers insert, update, delete and move rows while chunks are read and the stream goes on.

    Nothing is lost, and no change brings an older version of a row than was there before it.
    """
    writers = Writers(world.shop, "hot")
    with writers.hammering():
        eventually(lambda: writers.transactions > 20, SECONDS)
        world.snapshots.request(f"{world.schema}.hot")
        world.snapshots.read()
        reached = writers.transactions
        world.stage.capture(lambda _: world.snapshots.complete())
        eventually(lambda: writers.transactions > reached + 20, SECONDS)
    copy = world.caught_up()

    assert copy.older == []
    assert copy.rows == world.rows()
    assert copy.ops["r"] > 100


def test_chunks_wait_until_they_are_in_the_journal(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while they are looked for, which may take long: a run may end as soon as none waits."""
    listed = SnapshotRepository.chunks

    def late(*args: Any, **options: Any) -> Any:
        time.sleep(0.3)
        return listed(*args, **options)

    world.snapshots.request(f"{world.schema}.hot")
    world.snapshots.read()
    monkeypatch.setattr(SnapshotRepository, "chunks", late)
    spliced: list[bool] = []

    def none_waits(capture: Capture) -> bool:
        if not capture.chunks_waiting:
            spliced.append(world.snapshots.complete())
        return bool(spliced)

    world.stage.capture(none_waits)

    assert spliced == [True]


def test_a_table_that_joins_later(world: World) -> None:
    """Its rows of before come behind what was captured of it meanwhile; other tables are not read."""
    fill(world.shop, "late", 120)
    world.captured_up_to_now()  # its next run lets PostgreSQL send it
    world.shop.execute("UPDATE late SET v = 7 WHERE a = 5", "DELETE FROM hot WHERE a = 1")
    world.snapshots.request(f"{world.schema}.late")
    world.snapshots.read()
    late = world.caught_up("late")

    assert late.older == []
    assert late.rows == world.rows("late")
    assert world.snapshots.copy("hot").ops == {"d": 1}


def test_only_rows_that_fulfil_a_condition(world: World) -> None:
    """The others are not read."""
    world.snapshots.request(f"{world.schema}.hot", condition="a < 10")
    world.snapshots.read()

    assert sorted(a for a, _ in world.caught_up().rows) == list(range(10))


def test_a_truncate_while_chunks_are_read(world: World) -> None:
    """What was read before it does not come back."""
    world.snapshots.request(f"{world.schema}.hot")
    world.snapshots.read()
    world.shop.execute("TRUNCATE TABLE hot")
    world.shop.execute("INSERT INTO hot VALUES (1, 'k', 1, 'after')")
    # The journal passes the truncate before it takes the chunks over.
    head = world.stage.bench.source().head()
    for chunk in world.snapshots.store.snapshots.chunks("p", 1, state="read"):
        _stand_behind(world, chunk.number, head.to_json())

    assert world.caught_up().rows == world.rows()


def _stand_behind(world: World, number: int, position: str) -> None:
    """Let a chunk's place in the journal be behind a position."""
    with world.snapshots.store.database.write() as connection:
        connection.execute(
            update(chunks).where(chunks.c.number == number).values(position=position)
        )


def test_a_table_without_a_key(world: World) -> None:
    """Nobody can tell which of its rows changed: a chunk is read again if any did, and fits if none did."""
    world.shop.execute(
        "CREATE TABLE bare (a int, b varchar(20), v bigint, t text)",
        "INSERT INTO bare VALUES (1, 'x', 0, 'one'), (2, 'y', 0, 'two')",
    )
    if world.schema == "public":
        world.shop.execute("ALTER TABLE bare REPLICA IDENTITY FULL")
    world.captured_up_to_now()
    world.snapshots.request(f"{world.schema}.bare")
    world.snapshots.read()
    world.shop.execute("DELETE FROM bare WHERE a = 1")
    for chunk in world.snapshots.store.snapshots.chunks("p", 1, state="read"):
        _stand_behind(world, chunk.number, world.stage.bench.source().head().to_json())
    world.stage.capture(
        lambda _: bool(world.snapshots.store.snapshots.chunks("p", 1, state="planned"))
    )
    world.snapshots.read()

    copy = world.caught_up("bare")
    assert copy.rows == world.rows("bare")
    assert world.snapshots.store.snapshots.chunks("p", 1)[0].attempts == 1


def test_a_reader_that_dies(world: World) -> None:
    """The next one reads exactly the chunks that are missing, and every row comes once."""
    world.snapshots.request(f"{world.schema}.hot")
    with pytest.raises(Killed):
        world.snapshots.read(dies_after=1)
    done = {
        chunk.number: chunk.path
        for chunk in world.snapshots.store.snapshots.chunks("p", 1, state="read")
    }
    assert 0 < len(done) < len(world.snapshots.store.snapshots.chunks("p", 1))
    world.snapshots.read()

    again = {
        chunk.number: chunk.path
        for chunk in world.snapshots.store.snapshots.chunks("p", 1, state="read")
    }
    assert {number: again[number] for number in done} == done
    copy = world.caught_up()
    assert copy.rows == world.rows()
    assert copy.ops == {"r": len(copy.rows)}


def test_what_a_sink_would_miss_is_read_again(world: World) -> None:
    """Until what a reading may not have seen lies in segments that the sink is given."""
    store, table = world.stage.store, f"{world.schema}.hot"
    row = world.snapshots.request(table)
    begins = store.pipelines.get("p")
    assert begins is not None
    with store.database.write() as connection:
        connection.execute(update(snapshots).values(since_segment=begins.next_segment + 1))
    with pytest.raises(Killed):
        world.snapshots.read(dies_after=1)
    assert {one.state for one in store.snapshots.chunks("p", row.snapshot)} == {"planned"}
    world.shop.execute("UPDATE hot SET v = 9 WHERE a = 3")
    world.captured_up_to_now()
    world.snapshots.read()

    found = store.snapshots.chunks("p", row.snapshot)
    assert all((one.first_segment or 0) > begins.next_segment for one in found)
    assert world.caught_up().rows == world.rows()


def test_one_chunk_once_more(world: World) -> None:
    """Just that one is read and delivered again; a damaged staging file is read again by itself."""
    world.snapshots.request(f"{world.schema}.hot")
    world.snapshots.read()
    total = len(world.caught_up().rows)
    world.snapshots.store.snapshots.reopen("p", 1, [(f"{world.schema}.hot", 2)])
    world.snapshots.read(only={(f"{world.schema}.hot", 2)})
    (chunk,) = world.snapshots.store.snapshots.chunks("p", 1, state="read")
    world.stage.journal.delete(str(chunk.path))
    world.stage.capture(
        lambda _: bool(world.snapshots.store.snapshots.chunks("p", 1, state="planned"))
    )
    world.snapshots.read()

    copy = world.caught_up()
    assert copy.rows == world.rows()
    assert copy.ops == {"r": total + (chunk.rows or 0)}
