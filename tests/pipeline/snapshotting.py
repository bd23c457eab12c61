"""A table that writers hammer while a snapshot reads it, and what the journal makes of it."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pymysql
from pymysql.constants import ER

from deltaforge_dagster.config.file.load import LoadedPipeline, load_pipeline
from deltaforge_dagster.pipeline.run_context import RunContext
from deltaforge_dagster.pipeline.snapshots.read import SnapshotRun
from deltaforge_dagster.sources.base import Source
from deltaforge_dagster.state.snapshot_records import SnapshotRow
from deltaforge_dagster.state.store import StateStore
from tests.e2e.conftest import Shop
from tests.pipeline.capturing import Stage

KEYS = 400

Row = dict[str, Any]
Key = tuple[int, str]

PIPELINE = """\
metadata: {name: p, tenant: acme}
spec:
  source:
    type: postgres
    config:
      {id: db, dsn: "postgres://u:p@localhost/d", slot: s, publication: p, tables: [public.hot],
       snapshot: {mode: never, chunk_size: 50, intra_table_parallel: true}}
  sinks: [{type: file, config: {id: s, path: /tmp/none}}]
"""


def fill(shop: Shop, table: str, rows: int = KEYS) -> None:
    """Make the table, with a key of two columns and rows of version 0."""
    values = ", ".join(f"({key}, 'k{key % 7}', 0, 'é {key}')" for key in range(rows))
    columns = "(a int, b varchar(20), v bigint, t text, PRIMARY KEY (a, b))"
    shop.execute(f"CREATE TABLE {table} {columns}", f"INSERT INTO {table} VALUES {values}")


class Writers:
    """Threads that insert, update, delete and move rows; each row's `v` only grows."""

    def __init__(self, shop: Shop, table: str, threads: int = 3) -> None:
        self.transactions = 0
        self._shop = shop
        self._table = table
        self._versions = itertools.count(1)
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(threads)
        self._count = threads

    @contextmanager
    def hammering(self) -> Iterator[None]:
        """Let them write meanwhile."""
        running: list[Future[None]] = [
            self._pool.submit(self._write, seed) for seed in range(self._count)
        ]
        try:
            yield
        finally:
            self._stop.set()
            for one in running:
                one.result()
            self._pool.shutdown()

    def _write(self, seed: int) -> None:
        chance = random.Random(seed)
        while not self._stop.is_set():
            # Threads have keys of their own, so that none waits for another's lock.
            key = chance.randrange(KEYS * 2 // self._count) * self._count + seed
            statements = self._statements(chance, key, KEYS * 3 + key)
            try:
                self._shop.execute(*statements)
            except pymysql.OperationalError as error:
                if error.args[0] != ER.LOCK_DEADLOCK:  # MySQL locks gaps between keys, too
                    raise
                continue  # nothing of it was written
            self.transactions += 1

    def _statements(self, chance: random.Random, key: int, other: int) -> list[str]:
        table, version = self._table, next(self._versions)
        delete = f"DELETE FROM {table} WHERE a = {key}"
        insert = f"INSERT INTO {table} VALUES ({key}, 'k{key % 7}', {version}, 'new')"
        update = f"UPDATE {table} SET v = {version}, t = 'ü {version}' WHERE a = {key}"
        away = f"UPDATE {table} SET a = {other}, v = {version} WHERE a = {key}"
        gone = f"DELETE FROM {table} WHERE a = {other}"
        choices = [[update], [update], [delete], [delete, insert], [gone, away], [gone]]
        return chance.choice(choices)


class Copy:
    """What somebody has who applies every change of a table in order."""

    def __init__(self, changes: Sequence[Row]) -> None:
        self.rows: dict[Key, Row] = {}
        self.ops: dict[str, int] = {}
        self.older: list[str] = []
        """Changes that bring an older version of a row than the copy had."""
        for change in changes:
            before, after = (
                None if change[image] is None else json.loads(change[image])
                for image in ("before", "after")
            )
            self._apply(change["op"], before, after)

    def _apply(self, op: str, before: Row | None, after: Row | None) -> None:
        self.ops[op] = self.ops.get(op, 0) + 1
        if op == "t":
            self.rows.clear()
        left: Row = {}
        if before is not None and (op == "d" or (op == "u" and after is not None)):
            left = self.rows.pop(_key(before), {})
        if after is None:
            return
        had = left or self.rows.get(_key(after), {})
        if had.get("v", 0) > after["v"]:
            self.older.append(f"{op} of {_key(after)}: {after['v']} over {had['v']}")
        # What an update leaves out stays as it was.
        kept = had if op == "u" else {}
        news = {name: value for name, value in after.items() if value != {"_unchanged": True}}
        self.rows[_key(after)] = {**kept, **news}


def _key(image: Row) -> Key:
    return image["a"], image["b"]


class Killed(BaseException):
    """What a reader dies of."""


class InProcess:
    """Spark sessions for jobs that run in this process: what a task does, without Spark's seconds.

    Args:
        dies_after: How many tasks there are before one is killed.
    """

    def __init__(self, dies_after: int | None = None) -> None:
        self._left = dies_after

    def session(self) -> Any:
        """Return itself: a session, a frame and its result at once."""
        return self

    elsewhere = False

    def lost(self, _: BaseException) -> bool:
        """Say that nothing is kept that could be lost."""
        return False

    def stop(self) -> None:
        """Nothing runs."""

    def close(self) -> None:
        """Nothing runs."""

    def range(self, *_: int) -> InProcess:
        """Return a frame of one number."""
        return self

    def mapInArrow(  # noqa: N802 - Spark's name
        self, task: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]], _: Any
    ) -> Any:
        """Return the frame that a task makes of the number."""
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise Killed

        class Result:
            def toArrow(self) -> pa.Table:  # noqa: N802 - Spark's name
                number = pa.RecordBatch.from_pydict({"id": [0]})
                return pa.Table.from_batches(list(task(iter([number]))))

        return Result()


class Snapshots:
    """Snapshots of a stage's pipeline `p`, read in this process."""

    def __init__(self, stage: Stage, folder: Path) -> None:
        self.stage = stage
        self.store: StateStore = stage.store
        path = folder / "p.yaml"
        path.write_text(PIPELINE)
        self.loaded: LoadedPipeline = load_pipeline(path)

    def request(self, *tables: str, condition: str | None = None) -> SnapshotRow:
        """Ask for a snapshot."""
        return self.store.snapshots.request(
            "p", tables=tables, condition=condition, cause="command"
        )

    def read(
        self, only: Collection[tuple[str, int]] | None = None, *, dies_after: int | None = None
    ) -> SnapshotRow:
        """Read what is missing of it; with `dies_after`, so many tasks of it."""
        context = RunContext(
            store=self.store,
            journal=self.stage.journal,
            sessions=lambda _id, _remember: InProcess(),
            replay_sessions=lambda: contextlib.nullcontext(InProcess(dies_after)),
            build_source=self._source,
            build_sink=_no_sink,
        )
        return SnapshotRun(
            self.loaded, context, warn=lambda _: None, progress=lambda _: None, only=only
        ).execute()

    def newest(self) -> SnapshotRow:
        """Return the newest snapshot."""
        return self.store.snapshots.read("p", newest=1)[0]

    def complete(self) -> bool:
        """Whether all of it is in the journal."""
        return self.newest().state == "complete"

    def copy(self, table: str = "hot") -> Copy:
        """Return what the journal makes of a table."""
        return Copy([row for row in self.stage.rows() if row["table"] == table])

    def _source(self) -> Source:
        source: Source = self.stage.bench.source()
        return source


def _no_sink(_: str) -> Any:
    raise AssertionError("no sink is asked for")
