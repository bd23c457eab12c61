"""Events of PostgreSQL beside plain rows, from a real server: truncates, messages, odd tables."""

from __future__ import annotations

import json
import logging
import resource
from collections.abc import Iterator

import psycopg
import pyarrow.compute as pc
import pytest

from deltaforge_dagster.sources.base import ReadLimits
from deltaforge_dagster.sources.postgres.decode.pgoutput import HEARTBEAT
from deltaforge_dagster.sources.postgres.position import LsnPosition, parse_lsn
from deltaforge_dagster.testing.sources import (
    Taken,
    Versions,
    insert,
    inserts,
    is_quiet,
    take,
    whole,
)
from tests.sources.postgres.bench import PostgresBench

pytestmark = pytest.mark.postgres


@pytest.fixture
def bench(postgres_dsn: str) -> Iterator[PostgresBench]:
    """A database with `orders`, `items` and `other`."""
    with PostgresBench(postgres_dsn) as made:
        yield made


def emit(content: str, *, transactional: bool, prefix: str = "audit") -> str:
    """Return the statement that writes a logical message."""
    return f"SELECT pg_logical_emit_message({transactional}, '{prefix}', '{content}')"


def summary(taken: Taken) -> list[tuple[object, object, object]]:
    """Return (table, op, after) of each row."""
    return [(row["table"], row["op"], row["after"]) for row in taken.rows]


def comparable(row: dict[str, object]) -> dict[str, object]:
    """Return what must be the same when a row is read again, with another registry.

    A message outside of transactions has no time but that of its sending.
    """
    changing = {"schema_version": None, "schema_sequence": None}
    return {**row, **changing, "ts_us": row["tx_id"] and row["ts_us"]}


def boundaries(bench: PostgresBench) -> list[tuple[LsnPosition, int]]:
    """Return every position between two transactions in the slot, and the events before it."""
    bench.wait_for_readers()
    sent = bench.connection.execute(
        "SELECT lsn::text, data FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL,"
        " 'proto_version', '1', 'publication_names', 'p', 'messages', 'true')",
        (bench.slot,),
    ).fetchall()
    found = []
    events = 0
    for lsn, data in sent:
        events += data[:1] in b"IM"
        if data[:1] == b"C" or data[:2] == b"M\0":
            found.append((LsnPosition(parse_lsn(lsn)), events))
    return found


class TestTruncate:
    """TRUNCATE is an event of each table."""

    def test_of_several_tables(self, bench: PostgresBench) -> None:
        """One event of each captured table, in the statement's order, between the rows around it."""
        start = bench.source().ensure_start()
        bench.execute(
            insert("orders", 1),
            "TRUNCATE items, other, orders RESTART IDENTITY",
            insert("orders", 2),
        )

        taken = take(bench, start, whole(4))

        assert [(row["op"], row["table"]) for row in taken.rows] == [
            ("c", "orders"),
            ("t", "items"),
            ("t", "orders"),
            ("c", "orders"),
        ]
        assert json.loads(str(taken.rows[1]["ddl"])) == {
            "sql": "TRUNCATE",
            "cascade": False,
            "restart_identity": True,
        }
        assert len({row["event_id"] for row in taken.rows}) == 4
        assert [row["tx_end"] for row in taken.rows] == [False, False, False, True]

    def test_cascade_reaches_tables_that_were_not_named(self, bench: PostgresBench) -> None:
        """A table that is emptied because it refers to another has its event."""
        bench.execute("ALTER TABLE items ADD FOREIGN KEY (id) REFERENCES orders")
        start = bench.source().ensure_start()
        bench.execute("TRUNCATE orders CASCADE")

        taken = take(bench, start, whole(2))

        assert [(row["op"], row["table"]) for row in taken.rows] == [
            ("t", "orders"),
            ("t", "items"),
        ]
        assert '"cascade":true' in str(taken.rows[0]["ddl"])

    def test_alone_it_is_worth_a_run(self, bench: PostgresBench) -> None:
        """`has_changes` sees a truncate."""
        start = bench.source().ensure_start()
        bench.execute("TRUNCATE orders")

        assert bench.source().has_changes(start)


class TestMessages:
    """Logical messages."""

    def test_a_transactional_one_stands_among_the_changes(self, bench: PostgresBench) -> None:
        """In its place, with its transaction, and gone with it when that is rolled back."""
        start = bench.source().ensure_start()
        bench.execute("BEGIN", emit('{"n":0}', transactional=True), "ROLLBACK")
        bench.execute(insert("orders", 1), emit('{"n": 1}', transactional=True), insert("items", 2))

        taken = take(bench, start, whole(3))

        assert summary(taken)[1] == ("audit", "c", '{"n":1}')
        assert [row["schema"] for row in taken.rows] == ["public", "__wal_message", "public"]
        assert len({row["tx_id"] for row in taken.rows}) == 1

    def test_others_come_where_they_stand_in_the_log(self, bench: PostgresBench) -> None:
        """Before the commit of the transaction that wrote them, whether it commits or not."""
        start = bench.source().ensure_start()
        bench.execute("BEGIN", emit("[1]", transactional=False), "ROLLBACK")
        with psycopg.connect(bench.dsn) as slow:
            slow.execute(insert("orders", 1))
            slow.execute(emit("[2]", transactional=False))
            bench.execute(insert("orders", 2))
            slow.execute(emit("[3]", transactional=False))

        taken = take(bench, start, whole(5))

        assert summary(taken) == [
            ("audit", "c", "[1]"),
            ("audit", "c", "[2]"),
            ("orders", "c", '{"id":2,"v":"2"}'),
            ("audit", "c", "[3]"),
            ("orders", "c", '{"id":1,"v":"1"}'),
        ]
        assert all(row["tx_end"] for row in taken.rows)

    def test_reading_on_from_any_of_them_neither_repeats_nor_loses(
        self, bench: PostgresBench
    ) -> None:
        """Between two messages, or a message and a commit, that touch each other in the log."""
        start = bench.source().ensure_start()
        with psycopg.connect(bench.dsn) as slow:
            slow.execute(insert("orders", 100))
            bench.execute(insert("orders", 1), emit("[1]", transactional=False))
            slow.execute(emit('"slow"', transactional=False))
            bench.execute(
                *(emit(f"[{n}]", transactional=n % 3 == 0) for n in range(5)), insert("items", 2)
            )
        bench.execute(insert("orders", 3))
        once = [comparable(row) for row in take(bench, start, whole(11)).rows]
        places = boundaries(bench)

        assert len(once) == 11
        assert [events for _, events in places] == [1, 2, 3, 4, 5, 6, 9, 10, 11]
        for position, events in places[:-1]:
            rest = take(bench, position, whole(len(once) - events)).rows
            assert [comparable(row) for row in rest] == once[events:]

    def test_each_is_worth_a_run_once(self, bench: PostgresBench) -> None:
        """`has_changes` sees a message of either kind until it was read."""
        start = bench.source().ensure_start()
        for transactional in (False, True):
            bench.execute(emit("{}", transactional=transactional))
            bench.execute("CREATE TABLE IF NOT EXISTS flush ()")  # flushes the log up to here
            assert bench.source().has_changes(start)
            end = take(bench, start, whole(1)).end
            assert isinstance(end, LsnPosition)
            assert is_quiet(bench, end)
            start = end

    def test_a_message_right_behind_the_captured_one_is_seen(self, bench: PostgresBench) -> None:
        """The log record that begins where the last transaction ended is news."""
        start = bench.source().ensure_start()
        bench.execute(insert("orders", 1))
        bench.execute(emit("{}", transactional=False), emit("{}", transactional=False))
        bench.execute("CREATE TABLE flush ()")
        (commit, _), (first, _), (second, _) = boundaries(bench)

        assert bench.source().has_changes(start)
        assert bench.source().has_changes(commit)
        assert bench.source().has_changes(first)
        assert is_quiet(bench, second)

    def test_no_json_is_passed_with_a_warning(
        self, bench: PostgresBench, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Its content stays out of the log; the position passes it."""
        start = bench.source().ensure_start()
        bench.execute(emit("secret", transactional=True))
        with caplog.at_level(logging.WARNING):
            passed = take(bench, start, lambda taken: taken.end != start)
        bench.execute(insert("orders", 1))

        assert passed.rows == []
        assert "prefix 'audit'" in caplog.text
        assert "secret" not in caplog.text
        assert take(bench, passed.end, whole(1)).changes == inserts("orders", 1)

    def test_our_heartbeats_are_no_news(self, bench: PostgresBench) -> None:
        """They never become events, whatever else stands between them."""
        start = bench.source().ensure_start()
        bench.execute(insert("orders", 1))
        bench.execute(emit("", transactional=True, prefix=HEARTBEAT))
        bench.execute(insert("orders", 2))

        taken = take(bench, start, whole(2))
        bench.execute(emit("", transactional=True, prefix=HEARTBEAT))

        assert taken.changes == inserts("orders", 1, 2)
        assert is_quiet(bench, taken.end)
        bench.execute(insert("orders", 3))
        assert bench.source().has_changes(taken.end)


def test_savepoints_that_were_rolled_back_leave_nothing(bench: PostgresBench) -> None:
    """Interleaved transactions come whole, in the order of their commits, without what was undone."""
    start = bench.source().ensure_start()
    with psycopg.connect(bench.dsn) as first, psycopg.connect(bench.dsn) as second:
        first.execute(insert("orders", 1))
        second.execute(insert("items", 1))
        first.execute("SAVEPOINT a")
        first.execute(insert("orders", 2))
        first.execute("SAVEPOINT b")
        first.execute(insert("orders", 3))
        first.execute("ROLLBACK TO SAVEPOINT a")
        second.execute(insert("items", 2))
        first.execute(insert("orders", 4))
        first.execute("RELEASE SAVEPOINT a")
        second.commit()
        first.commit()

    taken = take(bench, start, whole(4))

    assert taken.changes == inserts("items", 1, 2) + inserts("orders", 1, 4)


@pytest.mark.soak("large")
@pytest.mark.timeout(1800)
def test_five_million_rows_in_one_transaction(bench: PostgresBench) -> None:
    """They come in pieces, one after another, and memory does not grow with them."""
    rows = 5_000_000
    start = bench.source().ensure_start()
    bench.execute(f"INSERT INTO orders SELECT n, repeat('x', 50) FROM generate_series(1, {rows}) n")
    reader = bench.source()
    count = ends = 0
    most: list[int] = []
    for batch in reader.read(start, ReadLimits(), Versions()):
        if batch.rows is not None:
            first = json.loads(str(batch.rows.column("key")[0]))
            assert first == {"id": count + 1}
            count += batch.rows.num_rows
            ends += pc.sum(batch.rows.column("tx_end")).as_py()
            most.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        if batch.end is not None and count:
            break
    reader.close()

    assert (count, ends) == (rows, 1)
    assert most[-1] - most[len(most) // 10] < 100 << 10  # KiB
