"""Snapshots of MySQL's tables: what is MySQL's own about them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest

from deltaforge_dagster.errors import SourceUnavailable
from deltaforge_dagster.sources.mysql.snapshot import reader as snapshot
from deltaforge_dagster.sources.mysql.snapshot.read_view import PositionReadView
from deltaforge_dagster.sources.snapshot import Chunk, SnapshotSource
from tests.contracts.test_snapshot import (
    capturing,
    check_splices,
    connection_of,
    read_all,
    rows_of,
    run,
    snapshot_source,
)
from tests.fix_mysql import StartMysql
from tests.sources.mysql.bench import MysqlBench

pytestmark = pytest.mark.mysql


@pytest.fixture
def bench(mysql_dsn: str) -> Iterator[MysqlBench]:
    """A database of its own."""
    with MysqlBench(mysql_dsn) as made:
        yield made


def whole(source: SnapshotSource, bench: MysqlBench) -> Chunk:
    """Return the only chunk of `orders`."""
    (chunk,) = source.snapshots().plan([f"{bench.database}.orders"], 1000)
    return chunk


def test_a_commit_that_the_log_has_and_nobody_sees_is_not_visible(bench: MysqlBench) -> None:
    """While a group of commits waits to be synced the log has them, and they are captured, but a SELECT
    does not see them yet: then they are not visible.
    """  # noqa: D205 - one sentence
    bench.execute("INSERT INTO orders VALUES (1, 'old')")
    source = snapshot_source(bench)
    writer = connection_of(bench)
    with capturing(bench) as captured, source.snapshots().reader() as reader:
        chunk = whole(source, bench)
        rows_of(reader.read(chunk, "{}"))  # connected, for there is little time
        bench.run("SET GLOBAL binlog_group_commit_sync_delay = 1000000")
        try:
            update = "UPDATE orders SET v = 'new' WHERE id = 1"
            thread = threading.Thread(target=run, args=(writer, update))
            thread.start()
            captured.wait(lambda: captured.changes().num_rows == 1)
            read = reader.read(chunk, "{}")
            (row,) = rows_of(read)
            thread.join()
        finally:
            bench.run("SET GLOBAL binlog_group_commit_sync_delay = 0")
    writer.close()
    (not_visible,) = read.read_view.not_visible(captured.changes()).to_pylist()
    assert not_visible or json.loads(row["after"])["v"] == "new"
    assert captured.ended is not None
    assert read.read_view.covers(captured.ended) == (not not_visible)


@pytest.mark.soak("versions")
def test_a_server_without_gtids(start_mysql: StartMysql, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without GTIDs a table is locked while a read begins: it waits for who writes, for a time, and then
    sees the log exactly up to a place. With that a snapshot and the stream make the table.
    """  # noqa: D205 - two sentences
    monkeypatch.setattr(snapshot, "_LOCK_SECONDS", 1)
    server = start_mysql({"gtid_mode": "OFF", "enforce_gtid_consistency": "OFF"})
    with MysqlBench(server.create_database()) as bench:
        source = snapshot_source(bench)
        chunk = whole(source, bench)
        writer = connection_of(bench)
        run(writer, "BEGIN")
        run(writer, "INSERT INTO orders VALUES (100000, '1')")
        with source.snapshots().reader() as reader:
            with pytest.raises(SourceUnavailable, match="timeout"):
                reader.read(chunk, "{}")
            run(writer, "COMMIT")
            read = reader.read(chunk, "{}")
            assert [row["key"] for row in rows_of(read)] == ['{"id":100000}']
            assert isinstance(read.read_view, PositionReadView)
            run(writer, "DELETE FROM orders")
        writer.close()
        with capturing(bench) as captured:
            check_splices(bench, captured)


def test_tables_without_a_whole_key_are_read_in_one_piece(bench: MysqlBench) -> None:
    """A table without a primary key, or with the beginning of a text as its key, is not divided; without
    one its rows have no key, though an index of another name makes them unique.
    """  # noqa: D205 - one sentence
    bench.run(
        "CREATE TABLE bare (g int NOT NULL, UNIQUE (g))",
        "CREATE TABLE prefixed (k varchar(20), PRIMARY KEY (k(3)))",
        "INSERT INTO bare VALUES (1), (2)",
        "INSERT INTO prefixed VALUES ('abc'), ('abd'), ('b')",
    )
    tables = tuple(f"{bench.database}.{name}" for name in ("bare", "prefixed"))
    source = snapshot_source(bench, tables=tables)
    chunks = list(source.snapshots().plan(None, 1))
    assert [chunk.kind for chunk in chunks] == ["whole", "whole"]
    bare, prefixed = read_all(source, chunks)
    assert [row["key"] for row in bare] == [None, None]
    assert [row["key"] for row in prefixed] == [f'{{"k":"{k}"}}' for k in ("abc", "abd", "b")]


def test_outboxes_are_left_out(bench: MysqlBench) -> None:
    """Rows of an outbox are messages, which were sent when they were written."""
    tables = (f"{bench.database}.*",)
    outbox = {"tables": (f"{bench.database}.items",)}
    snapshots = snapshot_source(bench, tables=tables, outbox=outbox).snapshots()
    planned = [chunk.table for chunk in snapshots.plan(None, 10)]
    assert planned == [f"{bench.database}.{name}" for name in ("orders", "other")]


def test_a_broken_connection_is_recreated(bench: MysqlBench) -> None:
    """A chunk whose rows were not all taken is given up; the next one is read over another connection."""
    bench.execute(
        "INSERT INTO orders WITH RECURSIVE s (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s"
        " WHERE n < 12000) SELECT n, REPEAT('x', 1000) FROM s"
    )
    source = snapshot_source(bench)
    chunk = whole_of(source, bench)
    with source.snapshots().reader() as reader:
        next(reader.read(chunk, "{}").batches)
        assert len(rows_of(reader.read(chunk, "{}"))) == 12000
        read = reader.read(chunk, "{}")
        next(read.batches)
        for row in bench.rows("SHOW PROCESSLIST"):
            if row[3] == bench.database and str(row[7]).startswith("SELECT `id`"):
                bench.run(f"KILL {row[0]}")
        with pytest.raises(SourceUnavailable):
            list(read.batches)
        assert len(rows_of(reader.read(chunk, "{}"))) == 12000


def whole_of(source: SnapshotSource, bench: MysqlBench) -> Chunk:
    """Return a chunk of all of `orders`."""
    (chunk,) = source.snapshots().plan([f"{bench.database}.orders"], 1_000_000)
    return chunk
