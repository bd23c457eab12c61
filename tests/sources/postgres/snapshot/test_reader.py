"""Snapshots of PostgreSQL's tables: what is PostgreSQL's own about them."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from deltaforge_dagster.errors import PermissionMissing, SourceUnavailable
from deltaforge_dagster.sources.postgres.position import LsnPosition
from deltaforge_dagster.sources.postgres.snapshot import reader as snapshot
from deltaforge_dagster.sources.snapshot import Chunk, SnapshotSource
from deltaforge_lab.servers.postgres import PostgresServer
from tests.contracts.test_snapshot import Journal, capturing, read_all, rows_of, snapshot_source
from tests.fix_postgres import StartPostgres
from tests.sources.postgres.bench import PostgresBench

pytestmark = pytest.mark.postgres

ORDERS = "public.orders"


@pytest.fixture
def bench(postgres_server: PostgresServer) -> Iterator[PostgresBench]:
    """A database of its own."""
    with PostgresBench(postgres_server.create_database()) as made:
        yield made


def not_visible_ids(read_view: Any, captured: Journal) -> dict[int, bool]:
    """Return for each captured row of `orders` whether a read did not see its change."""
    changes = captured.changes()
    return {
        json.loads(row["key"])["id"]: not_visible
        for row, not_visible in zip(
            changes.to_pylist(), read_view.not_visible(changes).to_pylist(), strict=True
        )
        if row["key"] is not None
    }


def whole(source: SnapshotSource) -> Chunk:
    """Return the only chunk of `orders`."""
    (chunk,) = source.snapshots().plan([ORDERS], 1000)
    return chunk


def test_transactions_open_at_the_watermark_are_waited_for(
    bench: PostgresBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transaction that was open when the snapshot began may be committed in the log before it: a read
    that does not see it would have to look through all of the journal. It is not read before that ends.
    """  # noqa: D205 - two sentences
    source = snapshot_source(bench)
    with psycopg.connect(bench.dsn) as open_, source.snapshots().reader() as reader:
        open_.execute("INSERT INTO orders VALUES (1, 'a')")
        watermark = source.snapshots().watermark()
        with monkeypatch.context() as patch:
            patch.setattr(snapshot, "_OPEN_SECONDS", 0.2)
            with pytest.raises(SourceUnavailable, match=r"not ended \(the oldest: process \d+"):
                reader.read(whole(source), watermark)
        open_.commit()
        assert [row["key"] for row in rows_of(reader.read(whole(source), watermark))] == [
            '{"id":1}'
        ]


def test_what_an_open_transaction_changes_is_not_visible(bench: PostgresBench) -> None:
    """Changes of a transaction that is open during the read are not visible once it is committed, those in
    subtransactions as well; what was committed before is not.
    """  # noqa: D205 - one sentence
    source = snapshot_source(bench)
    with capturing(bench) as captured, psycopg.connect(bench.dsn) as open_:
        snapshots = source.snapshots()
        watermark = snapshots.watermark()
        open_.execute("INSERT INTO orders VALUES (1, 'a')")
        with open_.transaction():
            open_.execute("INSERT INTO orders VALUES (2, 'a')")
        bench.execute("INSERT INTO orders VALUES (3, 'a')")
        with snapshots.reader() as reader:
            read = reader.read(whole(source), watermark)
            assert [row["key"] for row in rows_of(read)] == ['{"id":3}']
            open_.commit()
            bench.execute("INSERT INTO orders VALUES (4, 'a')")
            captured.wait(lambda: captured.changes().num_rows == 4)
            assert not_visible_ids(read.read_view, captured) == {
                1: True,
                2: True,
                3: False,
                4: True,
            }
            again = reader.read(whole(source), watermark)
            assert len(rows_of(again)) == 4
            assert not any(not_visible_ids(again.read_view, captured).values())
        assert again.read_view.covers(LsnPosition(0))
        assert captured.ended is not None
        assert not read.read_view.covers(captured.ended)


def test_a_commit_that_waits_for_a_standby_is_not_visible(start_postgres: StartPostgres) -> None:
    """A commit that waits for a synchronous standby stands in the log, and is captured, before any SELECT
    sees it: it is not visible, though its position is before the read's. No read begins with a watermark of
    that time before it has ended.
    """  # noqa: D205 - one sentence
    server = start_postgres({})
    with PostgresBench(server.create_database()) as bench:
        bench.execute("INSERT INTO orders VALUES (1, '0'), (2, '0')")
        source = snapshot_source(bench)
        snapshots = source.snapshots()
        with (
            capturing(bench) as captured,
            psycopg.connect(bench.dsn, autocommit=True) as stalled,
            snapshots.reader() as reader,
        ):
            watermark = snapshots.watermark()
            value, thread = stalled_update(bench, stalled)
            captured.wait(lambda: captured.changes().num_rows == value)
            read = reader.read(whole(source), watermark)
            rows = {row["key"]: json.loads(row["after"])["v"] for row in rows_of(read)}
            assert rows == {'{"id":1}': str(value - 1), '{"id":2}': "0"}
            newest = max(
                b.end for b in captured.batches if b.rows is not None and b.end is not None
            )
            assert newest <= read.position
            changes = captured.changes()
            assert read.read_view.not_visible(changes).to_pylist() == [False] * (value - 1) + [True]
            waiting = threading.Thread(
                target=lambda: rows.update(
                    {row["key"]: row["after"] for row in rows_of(reader.read(whole(source), late))}
                )
            )
            late = snapshots.watermark()
            waiting.start()
            stalled.cancel()
            thread.join()
            waiting.join()
            assert json.loads(rows['{"id":1}'])["v"] == str(value)


def stalled_update(
    bench: PostgresBench, stalled: psycopg.Connection
) -> tuple[int, threading.Thread]:
    """Let a commit wait for a standby that never comes; return the row's new value, and who waits.

    The server takes a moment to notice that it has to wait.
    """
    bench.connection.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
    bench.connection.execute("SELECT pg_reload_conf()")
    stalled.execute("SET synchronous_commit = on")
    pid = stalled.info.backend_pid
    for value in itertools.count(1):
        update = f"UPDATE orders SET v = '{value}' WHERE id = 1"
        thread = threading.Thread(target=stalled.execute, args=(update,))
        thread.start()
        while thread.is_alive():
            waits_for = bench.value("SELECT wait_event FROM pg_stat_activity WHERE pid = %s", pid)
            if waits_for == "SyncRep":
                return value, thread
    raise AssertionError


def test_tables_without_a_key_are_read_by_blocks(bench: PostgresBench) -> None:
    """Each row of a table without a primary key is in one chunk, also where the table grows after the
    plan; one that was empty then has one chunk, without an end.
    """  # noqa: D205 - one sentence
    grow = "INSERT INTO bare SELECT g, repeat('x', 1000) FROM generate_series({}, {}) g"
    bench.execute(
        "CREATE TABLE bare (g int, v text)",
        "CREATE TABLE late (g int)",
        "ALTER TABLE bare REPLICA IDENTITY FULL",
        "ALTER TABLE late REPLICA IDENTITY FULL",
        grow.format(1, 100),
    )
    source = snapshot_source(bench, tables=("public.bare", "public.late"))
    chunks = list(source.snapshots().plan(None, 100))
    bench.execute(grow.format(101, 300), "INSERT INTO late VALUES (1)")
    if bench.connection.info.server_version >= 140000:
        assert {chunk.kind for chunk in chunks} == {"ctid"}
        assert len(chunks) > 10
    found = read_all(source, chunks)

    ids = sorted(
        json.loads(row["after"])["g"]
        for rows in found
        for row in rows
        if row["table"] == "bare" and row["key"] is None
    )
    assert ids == list(range(1, 301))
    assert [row["after"] for row in found[-1]] == ['{"g":1}']
    assert len({row["event_id"] for rows in found for row in rows}) == 301


def test_rows_are_what_the_publication_sends(bench: PostgresBench) -> None:
    """Rows and columns that the publication leaves out are not read; of a partitioned table come the rows
    of its partitions, of one with children just its own; a key of types with operators of two schemas is not divided.
    """  # noqa: D205 - one sentence
    if bench.connection.info.server_version < 150000:
        pytest.fail("needs a server with row filters")
    bench.execute(
        "CREATE EXTENSION citext",
        "CREATE TABLE few (id int PRIMARY KEY, v text, w text, g int GENERATED ALWAYS AS (id) STORED)",
        "CREATE TABLE parts (id citext, n int, PRIMARY KEY (id, n)) PARTITION BY RANGE (n)",
        "CREATE TABLE part1 PARTITION OF parts FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE part2 PARTITION OF parts FOR VALUES FROM (10) TO (20)",
        "CREATE TABLE parent (id int PRIMARY KEY)",
        "CREATE TABLE child (x int) INHERITS (parent)",
        "CREATE PUBLICATION p FOR TABLE few (id, v) WHERE (id > 1), parts, ONLY parent"
        " WITH (publish_via_partition_root = true)",
        "INSERT INTO few VALUES (1, 'a', 'b'), (2, 'a', 'b')",
        "INSERT INTO parts VALUES ('a', 1), ('A', 11)",
        "INSERT INTO parent VALUES (1)",
        "INSERT INTO child VALUES (2, 2)",
    )
    source = snapshot_source(bench, tables=("public.few", "public.parts", "public.parent"))
    chunks = list(source.snapshots().plan(None, 1))
    found = read_all(source, chunks)
    images = sorted(row["after"] for rows in found for row in rows)
    assert images == ['{"id":"A","n":11}', '{"id":"a","n":1}', '{"id":1}', '{"id":2,"v":"a"}']
    assert {chunk.kind for chunk in chunks if chunk.table == "public.parts"} == {"whole"}


def test_a_role_that_may_not_read(bench: PostgresBench) -> None:
    """Without SELECT on a table the error has the statement that grants it."""
    bench.source().ensure_start()
    bench.execute(f"CREATE ROLE r_{bench.slot} LOGIN PASSWORD 'p' REPLICATION")
    parts = psycopg.conninfo.make_conninfo(bench.dsn, user=f"r_{bench.slot}", password="p")
    snapshots = bench.source(dsn=parts).snapshots()
    try:
        with pytest.raises(PermissionMissing, match=r'GRANT SELECT ON "public"\."items" TO "r_s_'):
            list(snapshots.plan(None, 10))
    finally:
        bench.execute(f"DROP ROLE r_{bench.slot}")


def test_a_table_whose_stream_has_another_key(bench: PostgresBench) -> None:
    """It is divided by blocks: a row may leave its range of the primary key, and the log does not say so."""
    bench.execute(
        "CREATE TABLE coded (id int PRIMARY KEY, code text NOT NULL UNIQUE, filler text)",
        "ALTER TABLE coded REPLICA IDENTITY USING INDEX coded_code_key",
        "INSERT INTO coded SELECT n, 'c' || n, repeat('x', 500) FROM generate_series(1, 100) n",
    )
    source = snapshot_source(bench, tables=("public.coded",))

    chunks = list(source.snapshots().plan(["public.coded"], 20))

    assert {chunk.kind for chunk in chunks} == {"ctid"}
    assert len(chunks) > 1
    keys = [row["key"] for rows in read_all(source, chunks) for row in rows]
    assert sorted(keys) == sorted(f'{{"code":"c{n}"}}' for n in range(1, 101))
