"""Exactly once through restores, resets and switches: real runs, seen from the sink alone."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import psycopg
import pytest
import redis
from typer.testing import CliRunner

from deltaforge_dagster.cli.main import app
from deltaforge_dagster.servers.redis import RedisServer
from deltaforge_dagster.sinks.base import SinkPosition
from deltaforge_dagster.state.records import CheckpointRow
from tests.e2e.conftest import Shop, shop
from tests.fix_redis import StartRedis
from tests.fix_spark import SparkAddress
from tests.pipeline.live import Feed, opened_feed

__all__ = ["shop"]

pytestmark = [pytest.mark.spark, pytest.mark.postgres, pytest.mark.redis]

KEY = "deltaforge:position:feed:redis"
RUN = "{idle_seconds: 1, lease_seconds: 20, renew_seconds: 1}"
NEVER = '    - {{type: file, config: {{id: never, path: "{0}/never.txt/x"}}}}\n'
AHEAD = '    - {{type: file, config: {{id: ahead, path: "{0}/ahead.jsonl"}}}}\n'
LINES = '    - {{type: file, config: {{id: lines, path: "{0}/lines.jsonl"}}}}\n'


@dataclass
class World:
    """A database, a Redis server of its own, and a pipeline between them.

    Attributes:
        folder: Where the pipeline file and the installation lie.
        server: The Redis server; keeps its data in a dump only.
        text: The pipeline file.
    """

    shop: Shop
    folder: Path
    server: RedisServer
    text: str
    remote: str
    stack: ExitStack
    feed: Feed

    def begin(self) -> None:
        """Open the installation, and fix where the pipeline starts if it is new."""
        path = self.folder / "feed.yaml"
        self.feed = self.stack.enter_context(opened_feed(self.shop, path, self.text, self.remote))

    def end(self) -> None:
        """Close the installation."""
        self.stack.close()

    def configure(self, *, exactly_once: bool) -> None:
        """Write the pipeline file."""
        flag = f"exactly_once: {str(exactly_once).lower()}"
        for old in ("exactly_once: true", "exactly_once: false"):
            self.text = self.text.replace(old, flag)
        self.feed.path.write_text(self.text)

    def insert(self, first: int, last: int) -> None:
        """Insert customers, each in a transaction of its own but the first half of them."""
        middle = (first + last) // 2
        self.shop.execute(
            f"INSERT INTO customers SELECT n, 'x' FROM generate_series({first}, {middle}) n"
        )
        for number in range(middle + 1, last + 1):
            self.shop.execute(f"INSERT INTO customers VALUES ({number}, 'x')")

    def deliver(self, first: int, last: int) -> None:
        """Insert customers and deliver them."""
        self.insert(first, last)
        self.feed.catch_up()
        assert self.error() is None

    def arrived(self) -> list[int]:
        """Return the ids that the stream holds, in order."""
        return ids(one["df-event"] for one in self.feed.delivered("customers"))

    def lines(self, sink: str) -> list[int]:
        """Return the ids that a sink's file holds, in order."""
        return ids((self.folder / f"{sink}.jsonl").read_text().splitlines())

    def checkpoint(self) -> CheckpointRow:
        """Return the Redis sink's checkpoint."""
        return self.feed.store.checkpoints("feed")["redis"]

    def error(self) -> str | None:
        """Return why the Redis sink failed last."""
        return self.checkpoint().last_error

    def position(self) -> SinkPosition:
        """Return what the server holds as position."""
        with self.client() as client:
            held = client.get(KEY)
        assert isinstance(held, bytes)
        return SinkPosition.from_json(held)

    def store_position(self, text: str) -> None:
        """Put something in place of the position."""
        with self.client() as client:
            client.set(KEY, text)

    def client(self) -> redis.Redis:
        """Return a client that sees bytes."""
        return redis.Redis.from_url(self.server.uri)

    @property
    def home(self) -> Path:
        """The installation's directory."""
        return self.folder / "home"


def ids(events: Iterator[str] | list[str]) -> list[int]:
    """Return the customers of events."""
    return [json.loads(one)["after"]["id"] for one in events]


def numbers(first: int, last: int) -> list[int]:
    """Return the ids of the customers `first` to `last`."""
    return [*range(first, last + 1)]


MakeWorld = Callable[..., World]


@pytest.fixture
def make_world(
    shop: Shop, spark_server: SparkAddress, start_redis: StartRedis, tmp_path: Path
) -> Iterator[MakeWorld]:
    """Make a world whose pipeline has the given sinks beside Redis; it has begun."""
    with ExitStack() as stack:

        def make(more_sinks: str = "", *, exactly_once: bool = True) -> World:
            server = start_redis({"appendonly": "no"})
            ours = replace(shop, redis_uri=server.uri)
            (tmp_path / "never.txt").touch()
            text = ours.pipeline("feed", run=RUN, more_sinks=more_sinks.format(tmp_path))
            flag = f"exactly_once: {str(exactly_once).lower()}, stream"
            world = World(
                ours, tmp_path, server, text.replace("stream", flag), spark_server.remote,
                stack, None,  # type: ignore[arg-type]
            )  # fmt: skip
            world.begin()
            return world

        yield make


def test_restored_to_an_older_dump(make_world: MakeWorld) -> None:
    """A server that lost data gets it again from the journal, each change once, and it is said."""
    world = make_world()
    world.deliver(1, 10)
    with world.client() as client:
        client.save()
        folder = Path(client.config_get("dir")["dir"])
    dump = (folder / "dump.rdb").read_bytes()
    world.deliver(11, 20)
    world.server.stop(immediate=True)
    (folder / "dump.rdb").write_bytes(dump)
    world.server.restart()
    assert world.arrived() == numbers(1, 10)

    run = world.feed.live_run(until_caught_up=True)
    world.insert(21, 25)
    run.execute()

    assert world.arrived() == numbers(1, 25)
    notice = world.checkpoint().notice
    assert notice is not None
    assert "had lost data" in notice
    assert run._observer.warnings == [f"sink redis: {notice}"]  # type: ignore[attr-defined]
    world.deliver(26, 30)
    assert (world.arrived(), world.checkpoint().notice) == (numbers(1, 30), None)


def test_store_made_anew(make_world: MakeWorld) -> None:
    """A new store and journal on the same slot: what the sink has is skipped, and nothing else."""
    world = make_world(NEVER)
    world.deliver(1, 10)
    world.deliver(11, 20)
    before = world.position()
    world.end()
    shutil.rmtree(world.home)

    world.insert(21, 30)
    world.begin()
    world.deliver(31, 35)

    assert world.arrived() == numbers(1, 35)
    assert (world.position().uid != before.uid, world.position().source) == (True, before.source)


def test_store_made_anew_when_the_source_has_forgotten(make_world: MakeWorld) -> None:
    """A new journal that begins after the sink's position stops, until someone has decided."""
    world = make_world()
    world.deliver(1, 10)
    world.end()
    shutil.rmtree(world.home)
    world.insert(11, 12)
    with psycopg.connect(world.shop.dsn) as connection:
        connection.execute(
            "SELECT pg_replication_slot_advance(slot_name, pg_current_wal_lsn())"
            " FROM pg_replication_slots WHERE database = current_database()"
        )

    world.insert(13, 15)
    world.begin()
    error = world.error()

    assert error is not None
    assert "the journal begins later" in error
    assert "deltaforge checkpoint reset feed --sink redis --to oldest|tail|range:N" in error
    assert world.arrived() == numbers(1, 10)
    world.feed.store.reset_checkpoint("feed", "redis", 0)
    world.feed.catch_up()
    assert world.arrived() == [*numbers(1, 10), *numbers(13, 15)]


def test_store_restored_from_a_backup(make_world: MakeWorld) -> None:
    """Segments captured again under the same numbers: what the sink has of them is skipped."""
    world = make_world(NEVER)
    world.deliver(1, 10)
    backup = world.folder / "backup.db"
    with sqlite3.connect(world.home / "state.db") as now, sqlite3.connect(backup) as copy:
        now.backup(copy)
    world.deliver(11, 20)
    world.deliver(21, 30)
    world.end()
    for file in world.home.glob("state.db*"):
        file.unlink()
    shutil.copy(backup, world.home / "state.db")

    world.insert(31, 40)
    world.begin()
    world.deliver(41, 45)

    assert world.arrived() == numbers(1, 45)
    assert world.checkpoint().notice is None


def test_reset(make_world: MakeWorld) -> None:
    """A reset counts, whatever the sink holds: backwards delivers again, forwards skips."""
    world = make_world()
    world.deliver(1, 6)
    world.feed.store.reset_checkpoint("feed", "redis", 0)
    world.deliver(7, 8)
    assert world.arrived() == [*numbers(1, 6), *numbers(1, 8)]

    with world.client() as client:
        client.save()
    world.server.stop()
    world.insert(9, 12)
    world.feed.catch_up()
    row = world.feed.store.pipeline("feed")
    assert row is not None
    world.feed.store.reset_checkpoint("feed", "redis", row.next_segment - 1)
    world.server.restart()
    world.deliver(13, 14)
    assert world.arrived() == [*numbers(1, 6), *numbers(1, 8), 13, 14]


def test_switched_on_off_and_on(make_world: MakeWorld) -> None:
    """Whenever it is switched, nothing is lost or repeated: an old position is outdated."""
    world = make_world(exactly_once=False)
    world.deliver(1, 4)
    with world.client() as client:
        assert not client.exists(KEY)
    for first, exactly_once in ((5, True), (9, False), (13, True)):
        before = None if first == 5 else world.position()
        world.configure(exactly_once=exactly_once)
        world.deliver(first, first + 3)
        assert (world.position() == before) is not exactly_once

    assert world.arrived() == numbers(1, 16)


def test_what_is_no_position_of_this_pipeline(make_world: MakeWorld) -> None:
    """Garbage, another source's position, or an event that is not there: a clear stop."""
    world = make_world()
    ours = SinkPosition("u", "l", 3, "s", 4, "e", '{"lsn": "0/1"}', '{"lsn": "0/2"}', "other")
    world.store_position("garbage")
    world.insert(1, 4)
    for text, said in (
        ("garbage", f"key '{KEY}': what is stored there is not a position"),
        (ours.to_json(), "is one of source 'other'"),
        (replace(ours, source="feed-source").to_json(), "the journal begins later"),
    ):
        world.store_position(text)
        world.feed.catch_up()
        error = world.error()
        assert error is not None
        assert said in error
    assert world.arrived() == []

    world.feed.store.reset_checkpoint("feed", "redis", 0)
    world.store_position("garbage")
    world.deliver(5, 6)
    assert world.arrived() == numbers(1, 6)


def test_position_gone(make_world: MakeWorld) -> None:
    """A sink that lost its position goes on after the checkpoint, and it is said."""
    world = make_world()
    world.deliver(1, 4)
    with world.client() as client:
        client.flushdb()

    world.deliver(5, 8)

    assert world.arrived() == numbers(5, 8)
    assert "the position that the sink kept is gone" in str(world.checkpoint().notice)
    world.deliver(9, 10)
    assert (world.arrived(), world.checkpoint().notice) == (numbers(5, 10), None)


def test_journal_lost(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sinks that are behind a lost journal stop and name the command; then they lack nothing.

    `redis` delivers exactly once and repeats nothing; `lines` was behind, too, `ahead` was not.
    """
    world = make_world(LINES + AHEAD)
    faults = world.folder / "faults"
    faults.mkdir()
    monkeypatch.setenv("DELTAFORGE_HOME", str(world.home))
    monkeypatch.setenv("DELTAFORGE_SINK_FAULTS", str(faults))
    world.deliver(1, 10)
    for sink in ("redis", "lines"):
        (faults / sink).write_text("fail_before")
    world.insert(11, 20)
    world.feed.catch_up()
    shutil.rmtree(world.home / "journal")
    for sink in ("redis", "lines"):
        (faults / sink).unlink()

    outcome = world.feed.catch_up()

    command = "deltaforge journal rebuild feed"
    assert outcome.sink_errors.keys() == {"redis", "lines"}
    assert all(command in error for error in outcome.sink_errors.values())
    assert command in str(world.error())
    result = CliRunner().invoke(app, command.split()[1:])
    assert result.exit_code == 0, result.output
    assert "the next run captures again from" in result.stdout
    world.deliver(21, 25)
    assert world.arrived() == numbers(1, 25)
    assert world.lines("lines") == numbers(1, 25)
    assert world.lines("ahead")[:20] == numbers(1, 20)
    assert sorted(set(world.lines("ahead"))) == numbers(1, 25)
