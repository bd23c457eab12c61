"""Sources whose connections are cut at random under load: nothing is missing, twice or out of order.

Rows count their own changes, so that what was read shows by itself whether it is complete.
"""

from __future__ import annotations

import json
import math
import random
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Protocol
from urllib.parse import urlsplit

import psycopg
import pymysql
import pytest

from deltaforge_dagster.errors import Retryable
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import ReadLimits, Source
from deltaforge_dagster.testing.sources import Versions
from deltaforge_lab.servers.mysql import connect as connect_mysql
from tests.faulty_proxy import FaultyProxy
from tests.sources.mysql.bench import MysqlBench
from tests.sources.postgres.bench import PostgresBench

WRITERS = 2
KEYS = 5
"""Rows that each writer counts up."""
SECONDS = 60.0
"""For all that was written to be read, once writing has ended."""


class Bench(Protocol):
    """A database with the tables `orders` and `items`."""

    dsn: str

    def source(self, **changed: Any) -> Source:
        """Return a new source."""
        ...


class _Cursor(Protocol):
    def execute(self, query: str, /) -> object: ...


@pytest.fixture(
    params=[
        pytest.param((PostgresBench, "postgres_dsn"), marks=pytest.mark.postgres, id="postgres"),
        pytest.param((MysqlBench, "mysql_dsn"), marks=pytest.mark.mysql, id="mysql"),
    ]
)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """One bench per kind of source."""
    kind, dsn = request.param
    with kind(request.getfixturevalue(dsn)) as made:
        yield made


def connect(dsn: str) -> pymysql.Connection | psycopg.Connection:
    """Return a connection of the writer's own that commits by itself."""
    return connect_mysql(dsn) if dsn.startswith("mysql") else psycopg.connect(dsn, autocommit=True)


class Writer(threading.Thread):
    """Counts its rows up, one step each time, in transactions of any size; some are rolled back.

    Attributes:
        counts: What was committed, by (table, id).
    """

    def __init__(self, dsn: str, number: int, transactions: int, seed: int) -> None:
        super().__init__(daemon=True)
        self.counts: dict[tuple[str, int], int] = {}
        self._random = random.Random(seed + number)
        self._dsn = dsn
        self._ids = range(number * KEYS, (number + 1) * KEYS)
        self._transactions = transactions

    def run(self) -> None:
        """Write."""
        connection = connect(self._dsn)
        with connection.cursor() as cursor:
            for _ in range(self._transactions):
                self._transaction(cursor)
                time.sleep(0.001)
        connection.close()

    def _transaction(self, cursor: _Cursor) -> None:
        counts = dict(self.counts)
        cursor.execute("BEGIN")
        for _ in range(self._random.choice([1, 1, 2, 5, 40])):
            table, id_ = self._random.choice(["orders", "items"]), self._random.choice(self._ids)
            counts[table, id_] = step = counts.get((table, id_), -1) + 1
            text = f"{step}:{'x' * self._random.choice([0, 10, 600])}"
            if step:
                cursor.execute(f"UPDATE {table} SET v = '{text}' WHERE id = {id_}")
            else:
                cursor.execute(f"INSERT INTO {table} VALUES ({id_}, '{text}')")
        if self._random.random() < 0.1:
            cursor.execute("ROLLBACK")
        else:
            cursor.execute("COMMIT")
            self.counts = counts


class Reader:
    """Reads whole transactions, as a run does, and begins again after the last one when it is cut.

    Attributes:
        rows: Everything up to `end`.
        cuts: How often a stream was cut.
    """

    def __init__(self, bench: Bench, dsn: str, start: Position, registry: Versions) -> None:
        self.rows: list[dict[str, Any]] = []
        self.end = start
        self.cuts = 0
        self._bench = bench
        self._dsn = dsn
        self._registry = registry

    def read(self, writers: list[Writer]) -> None:
        """Read until the writers have ended and everything they wrote is there."""
        deadline = None
        while deadline is None or time.monotonic() < deadline:
            try:
                if self._stream(writers):
                    return
            except Retryable:
                self.cuts += 1
            if deadline is None and not any(writer.is_alive() for writer in writers):
                deadline = time.monotonic() + SECONDS

    def _stream(self, writers: list[Writer]) -> bool:
        source = self._bench.source(dsn=self._dsn)
        unfinished: list[dict[str, Any]] = []
        try:
            for batch in source.read(self.end, ReadLimits(max_wait=0.05), self._registry):
                if batch.rows is not None:
                    unfinished += batch.rows.to_pylist()
                if batch.end is not None:
                    self.rows += unfinished
                    self.end = batch.end
                    unfinished = []
                    source.confirm(self.end)
                if not any(writer.is_alive() for writer in writers):
                    expected = sum(sum(w.counts.values()) + len(w.counts) for w in writers)
                    if len(self.rows) >= expected:
                        return True
        finally:
            source.close()
        return False


def check(rows: list[dict[str, Any]], writers: list[Writer]) -> None:
    """Each row counted up from 0 to what was committed, by one, and each id is there once."""
    seen: dict[tuple[str, int], list[int]] = defaultdict(list)
    for row in rows:
        image = json.loads(row["after"])
        seen[row["table"], image["id"]].append(int(image["v"].partition(":")[0]))
    committed = {key: count for writer in writers for key, count in writer.counts.items()}

    assert {key: steps[-1] for key, steps in seen.items()} == committed
    for key, steps in seen.items():
        assert steps == list(range(len(steps))), key
    assert len({row["event_id"] for row in rows}) == len(rows)


def load(bench: Bench, transactions: int, mean_bytes: int, *, most_cuts: int, seed: int) -> Reader:
    """Write so much while a reader is cut; return it once everything was read, and checked."""
    source, registry = bench.source(), Versions()
    start = source.ensure_start()
    registry.define(source.definitions(start), start)
    with FaultyProxy.of(bench.dsn, mean_bytes, most_cuts, seed) as proxy:
        writers = [Writer(bench.dsn, number, transactions, seed) for number in range(WRITERS)]
        for writer in writers:
            writer.start()
        reader = Reader(bench, proxy.through(bench.dsn), start, registry)
        reader.read(writers)
    check(reader.rows, writers)
    return reader


def test_a_reader_that_is_cut_reads_everything_once(bench: Bench) -> None:
    """Cuts in handshakes, between messages and in the middle of rows, while two writers count."""
    reader = load(bench, 150, mean_bytes=100_000, most_cuts=20, seed=1)

    assert reader.cuts >= 3
    assert len(reader.rows) > 200


@pytest.mark.soak("faults")
@pytest.mark.parametrize("mean_bytes", [100_000, 1_000_000])
def test_for_long(bench: Bench, mean_bytes: int, seed: int) -> None:
    """The same for minutes, with rare and frequent cuts."""
    reader = load(bench, 30_000, mean_bytes, most_cuts=300, seed=seed)

    assert reader.cuts >= 3


@pytest.mark.soak("managed")
def test_idle_connections_are_cut(bench: Bench) -> None:
    """A service cuts what is idle for a minute: not the log, on which something passes, and no later question fails."""
    source, registry = bench.source(), Versions()
    start = source.ensure_start()
    registry.define(source.definitions(start), start)
    source.close()
    parts = urlsplit(bench.dsn)
    assert parts.hostname is not None
    assert parts.port is not None
    with FaultyProxy((parts.hostname, parts.port), 1, 0, 0, most_idle=60.0) as proxy:
        source = bench.source(dsn=proxy.through(bench.dsn))
        assert source.head() >= start
        read: list[dict[str, Any]] = []
        began = time.monotonic()
        for batch in source.read(start, ReadLimits(max_wait=1.0), registry):
            read += batch.rows.to_pylist() if batch.rows is not None else []
            if read:
                break
            if time.monotonic() > began + 130.0:
                began = math.inf
                with connect(bench.dsn) as connection, connection.cursor() as cursor:
                    cursor.execute("INSERT INTO orders VALUES (1, 'late')")
        assert [json.loads(row["after"])["id"] for row in read] == [1]
        assert source.maintain(None) == []
        assert source.head() > start
        source.close()
