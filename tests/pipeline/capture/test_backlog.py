"""Backlogs of a real MySQL log, read by Spark's tasks beside each other, against one reader."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql.connect.session import SparkSession

from deltaforge_dagster.frame import CAPTURED
from deltaforge_dagster.journal.hashing import ContentHash
from deltaforge_dagster.pipeline.capture.capture import Capture
from deltaforge_dagster.pipeline.failpoints import VARIABLE
from deltaforge_dagster.sources.registry import parse_position
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.testing.sources import insert
from tests.fix_spark import SparkAddress
from tests.pipeline.backlog_run import LIMITS, SMALL, Sessions
from tests.pipeline.capturing import Stage
from tests.pipeline.changes import eventually
from tests.sources.mysql.bench import MysqlBench
from tests.state.make import expire

pytestmark = [pytest.mark.spark, pytest.mark.mysql]

ROWS = 2_000


@pytest.fixture
def bench(mysql_dsn: str) -> Iterator[MysqlBench]:
    """A database with `orders`, `items` and `other`."""
    with MysqlBench(mysql_dsn) as made:
        yield made


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little log is a backlog, and the log is looked at in small pieces."""
    for name, value in SMALL.items():
        monkeypatch.setattr(name, value)


def fill(bench: MysqlBench, first: int, rows: int) -> None:
    """Write rows in small transactions, and begin a new file of the log now and then."""
    for number in range(first, first + rows, 20):
        bench.execute(insert("orders", *range(number, number + 18)))
        bench.execute(insert("items", number), insert("other", number, number + 1))
        bench.execute(f"UPDATE orders SET v = repeat('x', 40) WHERE id = {number}")
        if number % 1_000 == 0:
            bench.run("FLUSH BINARY LOGS")


def having(rows: int) -> Callable[[Capture], bool]:
    """Return what says whether a run has captured so many rows."""
    return lambda capture: capture.rows >= rows


def content(stage: Stage) -> tuple[int, str]:
    """Return how many rows the journal has, and the hash of all they say."""
    found = ContentHash(CAPTURED)
    batches: list[pa.RecordBatch] = []
    end = stage.start
    for number, segment in enumerate(stage.store.segments.read("p"), start=1):
        assert segment.segment == number
        assert parse_position(segment.start_position) == end
        end = parse_position(segment.end_position)
        stage.journal.verify(segment)
        batches += stage.journal.batches(segment)
    rows = pa.Table.from_batches(batches).select(CAPTURED.names).cast(CAPTURED)
    found.update(rows.unify_dictionaries())
    return rows.num_rows, found.hexdigest()


def events(stage: Stage) -> int:
    """Return how many events are kept back."""
    return sum(hold.events for hold in stage.store.holds.read("p"))


def files(stage: Stage) -> set[str]:
    """Return the files of the journal, below its folder."""
    folder = Path(stage.journal.url.removeprefix("file://"))
    return {str(path.relative_to(folder)) for path in folder.rglob("*.parquet")}


@dataclass
class Pair:
    """Two journals of one log: of one reader, and of many."""

    one: Stage
    many: Stage
    sessions: Sessions

    def capture(self, until: Callable[[Capture], bool]) -> int:
        """Let many readers capture until it is enough; return segments of tasks."""
        backlog = self.many.capture(until, LIMITS, sessions=self.sessions)
        assert backlog is not None
        return backlog.segments

    def check(self, rows: int) -> int:
        """Capture everything with both, and prove that it is the same; return segments of tasks."""
        self.one.capture(lambda capture: capture.rows >= rows, LIMITS)
        segments = self.capture(lambda _: len(self.many.rows()) >= rows)
        self.compare(rows)
        return segments

    def compare(self, rows: int) -> None:
        """Prove that both journals are the same, and that there is no other file in them."""
        assert content(self.many) == content(self.one)
        assert content(self.many)[0] == rows
        assert events(self.many) == events(self.one)
        known = {segment.path for segment in self.many.store.segments.read("p")}
        eventually(lambda: files(self.many) == known)


@pytest.fixture
def pair(bench: MysqlBench, spark: SparkSession, tmp_path: Path) -> Iterator[Pair]:
    """Both journals, empty, begun at the same place."""
    one, many = (
        Stage(
            bench,
            StateStore.open(f"sqlite:///{tmp_path}/{name}.db"),
            tmp_path / name,
            knows_tables=True,
        )
        for name in ("one", "many")
    )
    yield Pair(one, many, Sessions(spark))
    one.store.close()
    many.store.close()


def test_many_readers_capture_what_one_does(bench: MysqlBench, pair: Pair) -> None:
    """Rows, order, ids, positions and versions are the same, and segments have no gap."""
    fill(bench, 0, ROWS)

    assert pair.check(ROWS) > 10


def test_a_definition_ends_the_parallel_part(bench: MysqlBench, pair: Pair) -> None:
    """Rows before an ALTER and behind it have the versions of their time; both parts are read as sections."""
    fill(bench, 0, ROWS // 2)
    bench.run("ALTER TABLE orders ADD COLUMN n int DEFAULT 7 FIRST, RENAME COLUMN v TO w")
    bench.run("ALTER TABLE orders RENAME COLUMN w TO v", "ALTER TABLE orders DROP COLUMN n")
    fill(bench, ROWS // 2, ROWS // 2)

    assert pair.check(ROWS + 3) > 10


def test_what_is_held_is_left_to_the_one_reader(bench: MysqlBench, pair: Pair) -> None:
    """A table that is held from the middle on is kept back event by event, the others go on."""
    fill(bench, 0, ROWS // 2)
    bench.run("SET sql_log_bin = 0", "ALTER TABLE items ADD COLUMN n int", "SET sql_log_bin = 1")
    bench.run("FLUSH TABLES")
    for number in range(ROWS, ROWS + 200, 10):
        bench.execute(f"INSERT INTO items (id, v) VALUES ({number}, 'x')")
        bench.execute(insert("orders", *range(number, number + 10)))
    bench.run("SET sql_log_bin = 0", "ALTER TABLE items DROP COLUMN n", "SET sql_log_bin = 1")

    assert pair.check(ROWS // 2 + 200) > 5
    assert events(pair.many) == 20


def test_without_spark_one_reader_does_it(bench: MysqlBench, pair: Pair) -> None:
    """A Spark that is not there changes nothing but the speed, and is not an error."""
    fill(bench, 0, ROWS)
    pair.sessions.limit = 0

    assert pair.check(ROWS) == 0


def test_where_tasks_fail_the_one_reader_goes_on(bench: MysqlBench, pair: Pair) -> None:
    """What was read behind a log section that failed is dropped, and its files are removed."""
    fill(bench, 0, ROWS)
    pair.sessions.limit = 8

    assert 0 < pair.check(ROWS) < 8


def test_a_run_that_ends_leaves_whole_segments(bench: MysqlBench, pair: Pair) -> None:
    """The next one goes on where the last segment ends, whoever wrote it."""
    fill(bench, 0, ROWS)
    pair.one.capture(lambda capture: capture.rows >= ROWS, LIMITS)

    runs = captured = 0
    while captured < ROWS:  # a run that ends also waits for what its tasks are reading
        enough = min(ROWS // 8, ROWS - captured)
        pair.capture(having(enough))
        assert len(pair.many.rows()) >= captured + enough
        captured = len(pair.many.rows())
        runs += 1

    assert runs > 1
    pair.compare(ROWS)


@pytest.mark.parametrize(
    "failpoint",
    [
        "segment-file-written:6",
        pytest.param("segment-row-written:9", marks=pytest.mark.soak("kills")),
    ],
)
def test_a_run_that_is_killed_loses_and_repeats_nothing(
    bench: MysqlBench, pair: Pair, spark_server: SparkAddress, tmp_path: Path, failpoint: str
) -> None:
    """Between the file and its row, and behind it; what tasks still write then is an orphan."""
    fill(bench, 0, ROWS)
    command = [sys.executable, "-m", "tests.pipeline.backlog_run", bench.dsn, str(tmp_path)]
    child = subprocess.run(
        [*command, spark_server.remote],
        env={**os.environ, VARIABLE: failpoint},
        timeout=250,
        check=False,
    )

    assert child.returncode == -signal.SIGKILL
    before = len(pair.many.store.segments.read("p"))
    assert before in {5, 9}
    expire(pair.many.store)  # of the one that was killed
    pair.one.capture(lambda capture: capture.rows >= ROWS, LIMITS)
    pair.capture(lambda _: len(pair.many.rows()) >= ROWS)
    known = {segment.path for segment in pair.many.store.segments.read("p")}
    assert content(pair.many) == content(pair.one)
    assert content(pair.many)[0] == ROWS
    row = pair.many.store.pipelines.get("p")
    assert row is not None
    orphans = files(pair.many) - known
    swept = pair.many.journal.sweep("p", row.uid, known, epoch=99, older_than=0.0)
    assert orphans <= set(swept)
