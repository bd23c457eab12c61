"""Restores, resets and switches: no change is skipped, whatever the sink remembers.

Nor does one repeat exactly once. Real runs from PostgreSQL to Redis and from MySQL to Kafka, seen
from the sink alone.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deltaforge_dagster.cli.main import app
from deltaforge_dagster.sinks.base import SinkPosition
from deltaforge_dagster.state.copies import back_up, restore
from deltaforge_dagster.state.records import CheckpointRow
from deltaforge_dagster.state.store import StateStore
from tests.e2e.conftest import shop
from tests.fix_kafka import StartKafka
from tests.fix_redis import StartRedis
from tests.fix_spark import SparkAddress
from tests.kills.cells import ENDS as MATRIX
from tests.kills.cells import ONE_OF_EACH, crossed
from tests.pipeline.ends import (
    Database,
    KafkaTopic,
    MysqlDatabase,
    PostgresDatabase,
    RedisStream,
    Sink,
    ids,
)
from tests.pipeline.live import Feed, opened_feed

__all__ = ["shop"]

ENDS = MATRIX[:2]
EVERYWHERE = pytest.mark.parametrize("ends", ENDS)
CELLS = pytest.mark.parametrize(("ends", "exactly_once"), crossed(ENDS, "faults", gate=ONE_OF_EACH))
BOTH = pytest.mark.parametrize(
    "exactly_once",
    [pytest.param(False, marks=pytest.mark.soak("faults")), True],
    ids=["at-least-once", "exactly-once"],
)
"""For one pair of ends: the stronger guarantee holds at every change."""
pytestmark = pytest.mark.spark

PIPELINE = """\
metadata: {{name: {name}, tenant: acme}}
spec:
  source: {source}
  sinks:
    - {sink}
{more_sinks}  engine:
    run: {{idle_seconds: 1, lease_seconds: 20, renew_seconds: 1}}
    range: {{max_seconds: 3}}
    deliver: {{backoff_initial_seconds: 0.2, backoff_max_seconds: 0.5}}
"""
NEVER = '    - {{type: file, config: {{id: never, path: "{0}/never.txt/x"}}}}\n'
AHEAD = '    - {{type: file, config: {{id: ahead, path: "{0}/ahead.jsonl"}}}}\n'
LINES = '    - {{type: file, config: {{id: lines, path: "{0}/lines.jsonl"}}}}\n'


@dataclass
class World:
    """A database, a sink, and a pipeline between them.

    Attributes:
        folder: Where the pipeline file and the installation lie.
        sink: The sink; its control file for faults is `faults/sink`.
        text: The pipeline file.
    """

    name: str
    database: Database
    sink: Sink
    folder: Path
    text: str
    spark: SparkAddress
    stack: ExitStack
    feed: Feed

    def begin(self) -> None:
        """Open the installation, and fix where the pipeline starts if it is new."""
        path = self.folder / f"{self.name}.yaml"
        opened = opened_feed(self.database.shop, path, self.text, self.spark)
        self.feed = self.stack.enter_context(opened)

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
        rows = ", ".join(f"({number}, 'x')" for number in numbers(first, middle))
        self.database.shop.execute(f"INSERT INTO customers VALUES {rows}")
        for number in numbers(middle + 1, last):
            self.database.shop.execute(f"INSERT INTO customers VALUES ({number}, 'x')")

    def deliver(self, first: int, last: int) -> None:
        """Insert customers and deliver them; again where a busy server ended a run too early."""
        self.insert(first, last)
        for _ in range(5):
            outcome = self.feed.catch_up()
            assert self.checkpoint().last_error is None
            if (outcome.reason, outcome.capture_error) == ("caught up", None):
                return
        raise AssertionError(f"the last run ended with {outcome}")

    def lines(self, sink: str) -> list[int]:
        """Return the ids that a sink's file holds, in order."""
        return ids((self.folder / f"{sink}.jsonl").read_text().splitlines())

    def fault(self, sink: str) -> Path:
        """Return the file that makes a sink fail; not yet made."""
        return self.folder / "faults" / sink

    def checkpoint(self) -> CheckpointRow:
        """Return the sink's checkpoint."""
        return self.feed.store.checkpoints.read(self.name)["sink"]

    def reset(self, segment: int) -> None:
        """Let the sink go on after a segment."""
        self.feed.store.checkpoints.reset(self.name, "sink", segment)

    def error(self) -> str:
        """Return why the sink failed last."""
        return str(self.checkpoint().error_line)

    def position(self) -> SinkPosition:
        """Return the position that the sink keeps."""
        held = self.sink.position()
        assert held is not None
        return held

    @property
    def home(self) -> Path:
        """The installation's directory."""
        return self.folder / "home"


def numbers(first: int, last: int) -> list[int]:
    """Return the ids of the customers `first` to `last`."""
    return [*range(first, last + 1)]


def once(found: list[int]) -> list[int]:
    """Return the first arrivals."""
    return [*dict.fromkeys(found)]


MakeWorld = Callable[..., World]


@pytest.fixture
def make_world(
    request: pytest.FixtureRequest,
    ends: str,
    spark_server: SparkAddress,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[MakeWorld]:
    """Make a world whose pipeline has the given sinks beside its own; it has begun."""
    name = f"feed_{uuid.uuid4().hex[:8]}"
    (tmp_path / "never.txt").touch()
    (tmp_path / "faults").mkdir()
    monkeypatch.setenv("DELTAFORGE_SINK_FAULTS", str(tmp_path / "faults"))
    monkeypatch.setenv("DELTAFORGE_HOME", str(tmp_path / "home"))
    get = request.getfixturevalue

    def postgres_redis(*, may_stop: bool) -> tuple[Database, Sink]:
        start: StartRedis = get("start_redis")
        return PostgresDatabase(get("shop")), RedisStream(start({"appendonly": "no"}), name)

    def mysql_kafka(*, may_stop: bool) -> tuple[Database, Sink]:
        start: StartKafka = get("start_kafka")
        data = tmp_path / "kafka" if may_stop else None
        server = start({"log.dirs": str(data)}) if may_stop else get("kafka_server")
        return MysqlDatabase(get("mysql_dsn")), KafkaTopic(server, name, data)

    make_ends = {"postgres-redis": postgres_redis, "mysql-kafka": mysql_kafka}[ends]
    with ExitStack() as end, ExitStack() as stack:

        def make(
            more_sinks: str = "", *, exactly_once: bool = True, may_stop: bool = False
        ) -> World:
            database, sink = make_ends(may_stop=may_stop)
            end.enter_context(closing(sink))
            text = PIPELINE.format(
                name=name,
                source=database.source(name),
                sink=sink.sink(exactly_once=exactly_once),
                more_sinks=more_sinks.format(tmp_path),
            )
            world = World(
                name, database, sink, tmp_path, text, spark_server,
                stack, None,  # type: ignore[arg-type]
            )  # fmt: skip
            world.begin()
            return world

        yield make


@EVERYWHERE
def test_an_older_sink(make_world: MakeWorld) -> None:
    """A server that lost data gets it again from the journal, each change once, and it is said.

    Redis comes back with an older dump, Kafka with older files.
    """
    world = make_world(may_stop=True)
    world.deliver(1, 10)
    world.sink.keep()
    world.deliver(11, 20)
    world.sink.restore()
    assert world.sink.arrived() == numbers(1, 10)

    run = world.feed.live_run(until_caught_up=True)
    world.insert(21, 25)
    run.execute()

    assert world.sink.arrived() == numbers(1, 25)
    notice = world.checkpoint().notice
    assert notice is not None
    assert "had lost data" in notice
    assert run._observer.warnings == [f"sink sink: {notice}"]  # type: ignore[attr-defined]
    world.deliver(26, 30)
    assert (world.sink.arrived(), world.checkpoint().notice) == (numbers(1, 30), None)


@EVERYWHERE
def test_store_recreated(make_world: MakeWorld) -> None:
    """A new store and journal: what the sink has is skipped, and nothing else.

    PostgreSQL's slot holds the log for it; from MySQL a new pipeline begins now.
    """
    world = make_world(NEVER)
    world.deliver(1, 10)
    world.deliver(11, 20)
    before = world.position()
    world.end()
    shutil.rmtree(world.home)

    if world.database.holds_log:
        world.insert(21, 30)
        world.begin()
    else:
        world.begin()
        world.insert(21, 30)
    world.deliver(31, 35)

    assert world.sink.arrived() == numbers(1, 35)
    assert (world.position().uid != before.uid, world.position().source) == (True, before.source)


@EVERYWHERE
def test_store_recreated_when_the_source_has_forgotten(make_world: MakeWorld) -> None:
    """A new journal that begins after the sink's position stops, until someone has decided."""
    world = make_world()
    world.deliver(1, 10)
    world.end()
    shutil.rmtree(world.home)
    world.insert(11, 12)
    world.database.forget()

    if world.database.holds_log:
        world.insert(13, 15)
        world.begin()
    else:
        world.begin()
        world.insert(13, 15)
        world.feed.catch_up()

    assert "the journal begins later" in world.error()
    remedy = f"deltaforge checkpoint reset {world.name} --sink sink --to oldest|tail|range:N"
    assert remedy in world.error()
    assert world.sink.arrived() == numbers(1, 10)
    world.reset(0)
    world.feed.catch_up()
    assert world.sink.arrived() == [*numbers(1, 10), *numbers(13, 15)]


@CELLS
def test_store_restored_from_a_backup(make_world: MakeWorld, exactly_once: bool) -> None:
    """Segments captured again under the same numbers: what the sink has of them is skipped.

    At least once they come again, from the checkpoint of the backup on.
    """
    world = make_world(NEVER, exactly_once=exactly_once)
    world.deliver(1, 10)
    backup = world.folder / "backup.db"
    back_up(world.feed.store, backup)
    world.deliver(11, 20)
    world.deliver(21, 30)
    world.end()
    for file in world.home.glob("state.db*"):
        file.unlink()
    fresh = StateStore.open(f"sqlite:///{world.home}/state.db")
    restore(backup, fresh, force=False)
    fresh.close()

    world.insert(31, 40)
    world.begin()
    world.deliver(41, 45)

    repeated = [] if exactly_once else numbers(11, 30)
    assert world.sink.arrived() == [*numbers(1, 30), *repeated, *numbers(31, 45)]
    assert world.checkpoint().notice is None


@EVERYWHERE
def test_reset(make_world: MakeWorld) -> None:
    """A reset counts, whatever the sink holds: backwards delivers again, forwards skips."""
    world = make_world()
    world.deliver(1, 6)
    world.reset(0)
    world.deliver(7, 8)
    assert world.sink.arrived() == [*numbers(1, 6), *numbers(1, 8)]

    world.fault("sink").write_text("fail_before")
    world.insert(9, 12)
    world.feed.catch_up()
    row = world.feed.store.pipelines.get(world.name)
    assert row is not None
    world.reset(row.next_segment - 1)
    world.fault("sink").unlink()
    world.deliver(13, 14)
    assert world.sink.arrived() == [*numbers(1, 6), *numbers(1, 8), 13, 14]


@EVERYWHERE
def test_switched_on_off_and_on(make_world: MakeWorld) -> None:
    """Whenever it is switched, nothing is lost or repeated: an old position is outdated."""
    world = make_world(exactly_once=False)
    world.deliver(1, 4)
    assert world.sink.position() is None
    for first, exactly_once in ((5, True), (9, False), (13, True)):
        before = world.sink.position()
        world.configure(exactly_once=exactly_once)
        world.deliver(first, first + 3)
        assert (world.sink.position() == before) is not exactly_once

    assert world.sink.arrived() == numbers(1, 16)


@EVERYWHERE
def test_what_is_no_position_of_this_pipeline(make_world: MakeWorld) -> None:
    """Garbage, another source's position, or an event that is not there: a clear stop."""
    world = make_world()
    begun = world.feed.store.pipelines.get(world.name)
    assert begun is not None
    assert begun.start_position
    ours = SinkPosition("u", "l", 3, "s", 4, "e", begun.start_position, begun.start_position, "x")
    world.sink.store_position("garbage")
    world.insert(1, 2)
    world.feed.catch_up()
    assert world.sink.where in world.error()
    assert "what is stored there is not a position" in world.error()
    world.sink.store_position(ours.to_json())
    world.feed.catch_up()
    assert "is one of source 'x'" in world.error()
    world.fault("sink").write_text("fail_before")
    world.insert(3, 4)
    world.feed.catch_up()
    captured = world.feed.store.pipelines.get(world.name)
    assert captured is not None
    assert captured.captured_position
    inside = replace(ours, source=f"{world.name}-source", end=captured.captured_position)
    world.sink.store_position(inside.to_json())
    world.fault("sink").unlink()
    world.feed.catch_up()
    assert "the last event that the sink holds, e, is not in the journal" in world.error()
    assert world.sink.arrived() == []

    world.reset(0)
    world.sink.store_position("garbage")
    world.deliver(5, 6)
    assert world.sink.arrived() == numbers(1, 6)


@EVERYWHERE
@pytest.mark.parametrize("emptied", [False, True], ids=["forgotten", "emptied"])
def test_position_gone(make_world: MakeWorld, emptied: bool) -> None:
    """A sink that lost its position goes on after the checkpoint, and it is said.

    Redis was flushed or the key deleted; Kafka's topic deleted and created, or the offset expired.
    """
    world = make_world()
    world.deliver(1, 4)
    (world.sink.empty if emptied else world.sink.forget_position)()

    world.deliver(5, 8)

    first = 5 if emptied else 1
    assert world.sink.arrived() == numbers(first, 8)
    assert "the position that the sink kept is gone" in str(world.checkpoint().notice)
    world.deliver(9, 10)
    assert (world.sink.arrived(), world.checkpoint().notice) == (numbers(first, 10), None)


@CELLS
def test_journal_lost(make_world: MakeWorld, exactly_once: bool) -> None:
    """Sinks that are behind a lost journal stop and name the command; then they lack nothing.

    Exactly once nothing repeats; `lines` was behind, too, `ahead` was not.
    """
    world = make_world(LINES + AHEAD, exactly_once=exactly_once)
    world.deliver(1, 10)
    for sink in ("sink", "lines"):
        world.fault(sink).write_text("fail_before")
    world.insert(11, 20)
    world.feed.catch_up()
    shutil.rmtree(world.home / "journal")
    for sink in ("sink", "lines"):
        world.fault(sink).unlink()

    outcome = world.feed.catch_up()

    command = f"deltaforge journal rebuild {world.name}"
    assert outcome.sink_errors.keys() == {"sink", "lines"}
    assert all(command in error for error in outcome.sink_errors.values())
    assert command in world.error()
    result = CliRunner().invoke(app, command.split()[1:])
    assert result.exit_code == 0, result.output
    assert "the next run captures again from" in result.stdout
    world.deliver(21, 25)
    if exactly_once:
        assert world.sink.arrived() == numbers(1, 25)
    assert once(world.sink.arrived()) == numbers(1, 25)
    assert world.lines("lines") == numbers(1, 25)
    assert world.lines("ahead")[:20] == numbers(1, 20)
    assert sorted(set(world.lines("ahead"))) == numbers(1, 25)
