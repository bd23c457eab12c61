"""What is MySQL's own about its source; the promises common to all are in the contract."""

from __future__ import annotations

import dataclasses
import itertools
import json
import resource
import time
from collections.abc import Iterator
from urllib.parse import urlsplit, urlunsplit

import pytest

from deltaforge_dagster.errors import (
    AuthFailed,
    DeltaforgeError,
    PermissionMissing,
    PositionLost,
    SourceMisconfigured,
    SourceUnavailable,
    UnsupportedEvent,
)
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import ParkedEvent, ReadLimits
from deltaforge_dagster.sources.mysql import source
from deltaforge_dagster.sources.mysql.position import BinlogPosition, GtidSet
from deltaforge_dagster.sources.mysql.stream import dump, log_scan
from deltaforge_dagster.sources.postgres.position import LsnPosition
from deltaforge_dagster.sources.registry import parse_position
from deltaforge_dagster.testing.sources import (
    Taken,
    Versions,
    add,
    insert,
    inserts,
    is_quiet,
    read_into,
    take,
    whole,
)
from deltaforge_lab.servers.mysql import MysqlServer, execute
from tests.fix_mysql import FAST, MysqlVersion, StartMysql
from tests.sources.mysql.bench import MysqlBench

pytestmark = pytest.mark.mysql

PASSWORD = "geheim"


@pytest.fixture
def bench(mysql_dsn: str) -> Iterator[MysqlBench]:
    """A database with `orders`, `items` and `other`."""
    with MysqlBench(mysql_dsn) as made:
        yield made


@pytest.fixture(scope="module")
def plain_server() -> Iterator[MysqlServer]:
    """A server of this module's own, without GTIDs; it may be paused and restarted."""
    settings = {**FAST, "gtid_mode": "OFF", "enforce_gtid_consistency": "OFF"}
    with MysqlServer.start(settings=settings) as server:
        yield server


@pytest.fixture
def plain_bench(plain_server: MysqlServer) -> Iterator[MysqlBench]:
    """A database on the server without GTIDs."""
    with MysqlBench(plain_server.create_database()) as made:
        yield made


def as_user(bench: MysqlBench, *grants: str, password: str = PASSWORD) -> str:
    """Make a user with these privileges on everything; return the DSN with `password`."""
    name = f"u{bench.database[-12:]}"
    bench.run(f"CREATE USER '{name}'@'%' IDENTIFIED BY '{PASSWORD}'")
    bench.run(*(f"GRANT {grant} ON *.* TO '{name}'@'%'" for grant in grants))
    parts = urlsplit(bench.dsn)
    where = f"{name}:{password}@{parts.hostname}:{parts.port}"
    return urlunsplit(parts._replace(netloc=where, path="/"))


def unversioned(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return rows without what the registry of the test says of their tables."""
    return [
        {name: value for name, value in row.items() if not name.startswith("schema_")}
        for row in rows
    ]


def problem(error: pytest.ExceptionInfo[DeltaforgeError]) -> str:
    """Return the message, after checking that it is one line without the password."""
    assert PASSWORD not in str(error.value)
    assert "\n" not in str(error.value)
    return str(error.value)


def some_held(taken: Taken) -> bool:
    """Enough: an event that is to be kept back, and its transaction's end."""
    return any(batch.parked for batch in taken.batches) and taken.batches[-1].end is not None


def first_held(taken: Taken) -> ParkedEvent:
    """Return the first event that is to be kept back."""
    return next(event for batch in taken.batches for event in batch.parked)


class TestPositions:
    """What positions say, and that any of them is good to start from."""

    def test_reading_from_every_position_gives_the_same_rows(self, bench: MysqlBench) -> None:
        """Rows, ids and later positions do not depend on where a reader begins."""
        rows = self.check_every_position(bench)

        assert all(row["tx_id"] for row in rows)

    def test_also_without_gtids(self, plain_bench: MysqlBench) -> None:
        """File and offset do as well on a server that has no GTIDs."""
        rows = self.check_every_position(plain_bench)

        assert not any(row["tx_id"] for row in rows)

    def check_every_position(self, bench: MysqlBench) -> list[dict[str, object]]:
        """Read while writing, then again from every end that there was."""
        start = bench.source().ensure_start()
        every = Taken([], start, [])
        ends: list[tuple[int, Position]] = [(0, start)]
        reader = bench.source()
        reading = reader.read(start, ReadLimits(max_wait=0.05), Versions())
        for id_ in range(1, 7):
            bench.execute(insert("orders", id_), insert("items", id_, id_ + 100))
            until(reading, every, 3 * id_)
            ends.append((3 * id_, every.end))
            if id_ % 2 == 0:
                bench.run("FLUSH BINARY LOGS")
                bench.execute(insert("other", id_))
                head = bench.source().head()
                while every.end != head:
                    add(every, next(reading))
                ends.append((3 * id_, every.end))
        bench.run("DELETE FROM items")
        until(reading, every, 30)
        reader.close()

        for read, place in ends:
            taken = take(bench, parse_position(place.to_json()), whole(30 - read))

            assert unversioned(taken.rows) == unversioned(every.rows[read:])
            assert taken.end.to_json() == every.end.to_json()
        assert len({row["event_id"] for row in every.rows}) == 30
        assert len(set(ends)) == 10
        return every.rows

    def test_a_gtid_counts_when_its_transaction_ends(self, bench: MysqlBench) -> None:
        """No end, and no version's position, claims a transaction of which rows are to come."""
        start = bench.source().ensure_start()
        bench.execute("INSERT INTO orders WITH RECURSIVE s (n) AS (SELECT 1 UNION ALL"
                      " SELECT n + 1 FROM s WHERE n < 30000) SELECT n, repeat('x', 300) FROM s")  # fmt: skip
        bench.run("TRUNCATE TABLE other")
        versions = Versions()
        taken = Taken([], start, [])
        reader = bench.source()
        for batch in reader.read(start, ReadLimits(max_bytes=1 << 16), versions):
            add(taken, batch)
            if batch.end is not None and len(taken.rows) < 30000:
                assert batch.end == start or batch.end.to_json() == start.to_json()
            if len(taken.rows) == 30000 and batch.end is not None:
                break
        reader.close()

        assert isinstance(taken.end, BinlogPosition)
        (_, registered), *_ = versions.registered
        assert isinstance(registered, BinlogPosition)
        assert registered.gtid_set == start.gtid_set
        assert registered < taken.end
        gtid = str(taken.rows[0]["tx_id"])
        server, _, number = gtid.partition(":")
        assert GtidSet.parse(taken.end.gtid_set or "").contains(server, int(number))
        assert not GtidSet.parse(start.gtid_set or "").contains(server, int(number))

    def test_a_position_without_gtids_gains_them(self, bench: MysqlBench) -> None:
        """From file and offset, the set is what the file says of those before, and what was read."""
        bench.execute(insert("orders", 1))
        start = bench.head()
        bench.execute(insert("orders", 2))

        taken = take(bench, start, whole(1))

        assert taken.changes == inserts("orders", 2)
        assert isinstance(taken.end, BinlogPosition)
        ((executed,),) = bench.rows("SELECT @@GLOBAL.gtid_executed")
        assert taken.end.gtid_set == str(GtidSet.parse(executed))

    def test_the_head_is_reached_without_changes(self, bench: MysqlBench) -> None:
        """A new log file, and changes of others, are passed: an idle reader arrives at the head."""
        start = bench.source().ensure_start()
        bench.run("FLUSH BINARY LOGS")
        bench.execute(insert("other", 1))
        bench.run("FLUSH BINARY LOGS")
        head = bench.source().head()

        taken = take(bench, start, lambda taken: taken.end == head)

        assert taken.rows == []
        assert taken.end == head

    def test_rows_say_where_they_stand(self, bench: MysqlBench) -> None:
        """File, end of the event, GTID, place in the transaction, database without a schema."""
        start = bench.source().ensure_start()
        bench.execute(insert("orders", 1, 2))
        head = bench.source().head()

        first, second = take(bench, start, whole(2)).rows

        assert first["file"] == second["file"] == head.file
        assert start.pos < int(str(first["pos"])) == int(str(second["pos"])) < head.pos
        assert (first["row"], second["row"]) == (0, 1)
        assert (first["db"], first["schema"]) == (bench.database, None)
        server, _, number = str(first["tx_id"]).partition(":")
        assert GtidSet.parse(head.gtid_set or "").contains(server, int(number))
        assert abs(int(str(first["ts_us"])) / 1e6 - time.time()) < 60

    def test_a_position_of_another_kind_is_refused(self, bench: MysqlBench) -> None:
        """A PostgreSQL position in a MySQL pipeline is an error, not a place."""
        with pytest.raises(DeltaforgeError, match="not a MySQL position"):
            take(bench, LsnPosition(1), whole(1))


class TestTables:
    """Which tables are captured, and how their columns are known."""

    def test_no_pattern_is_every_table_of_users(self, bench: MysqlBench) -> None:
        """Without `tables` all databases but the server's own are captured."""
        start = bench.source().ensure_start()
        as_user(bench)  # writes to mysql.user
        bench.execute(insert("other", 1))

        assert take(bench, start, whole(1), source=bench.source(tables=())).changes == inserts(
            "other", 1
        )
        assert f"{bench.database}.other" in bench.source(tables=()).tables()
        assert bench.source().tables() == [f"{bench.database}.items", f"{bench.database}.orders"]

    def test_a_bare_name_is_that_table_in_any_database(self, bench: MysqlBench) -> None:
        """`orders` matches without a database."""
        start = bench.source().ensure_start()
        bench.execute(insert("items", 1), insert("orders", 1))

        reader = bench.source(tables=("orders",))

        assert take(bench, start, whole(1), source=reader).changes == inserts("orders", 1)

    @pytest.mark.parametrize("metadata", ["FULL", "MINIMAL"])
    def test_a_new_column_is_a_new_version(self, bench: MysqlBench, metadata: str) -> None:
        """Reading at the tail, an ALTER TABLE shows from its first row on, whoever names columns."""
        bench.run(f"SET GLOBAL binlog_row_metadata = {metadata}")
        try:
            start = bench.source().ensure_start()
            versions = Versions()
            reader = bench.source()
            taken = Taken([], start, [])
            reading = reader.read(start, ReadLimits(max_wait=0.05), versions)
            bench.execute(insert("orders", 1))
            until(reading, taken, 1)
            bench.run("ALTER TABLE orders ADD COLUMN w int FIRST")
            bench.execute("INSERT INTO orders (id, v, w) VALUES (2, '2', 7)")
            until(reading, taken, 2)
            reader.close()
        finally:
            bench.run("SET GLOBAL binlog_row_metadata = MINIMAL")

        assert [json.loads(str(row["after"])) for row in taken.rows] == [
            {"id": 1, "v": "1"},
            {"w": 7, "id": 2, "v": "2"},
        ]
        (before, at), (after, later) = versions.registered
        assert [column.name for column in before.columns] == ["id", "v"]
        assert [column.name for column in after.columns] == ["w", "id", "v"]
        assert before.primary_key == after.primary_key == ("id",)
        assert at < later

    def test_rows_before_a_change_of_their_table_are_not_misread(self, bench: MysqlBench) -> None:
        """Today's catalog is not used for rows that are older than its last change."""
        start = bench.source().ensure_start()
        bench.execute(insert("orders", 1))
        bench.run("ALTER TABLE orders RENAME COLUMN v TO x")

        taken = take(bench, start, some_held)

        assert taken.rows == []
        assert "with binlog_row_metadata = FULL" in first_held(taken).reason
        assert first_held(taken).table == f"{bench.database}.orders"

    def test_with_full_metadata_they_have_their_own_columns(self, bench: MysqlBench) -> None:
        """The log names the columns that a row had when it was written."""
        bench.run("SET GLOBAL binlog_row_metadata = FULL")
        try:
            start = bench.source().ensure_start()
            bench.execute(insert("orders", 1))
            bench.run("ALTER TABLE orders RENAME COLUMN v TO x", "DROP TABLE items")
            bench.execute("INSERT INTO orders VALUES (2, '2')")
            taken = take(bench, start, whole(2))
        finally:
            bench.run("SET GLOBAL binlog_row_metadata = MINIMAL")

        images = [json.loads(str(row["after"])) for row in taken.rows]
        assert images == [{"id": 1, "v": "1"}, {"id": 2, "x": "2"}]

    @pytest.mark.parametrize("metadata", ["MINIMAL", "FULL"])
    def test_what_statements_do_to_columns(self, bench: MysqlBench, metadata: str) -> None:
        """It is recorded before the version of the rows behind it, and a version is registered again after it."""
        bench.run(f"SET GLOBAL binlog_row_metadata = {metadata}")
        try:
            versions = Versions()
            start: Position = bench.source().ensure_start()
            bench.execute(insert("orders", 1))
            start = take(bench, start, whole(1), versions=versions).end
            bench.run("ALTER TABLE orders RENAME COLUMN v TO w")
            bench.execute(insert("items", 1))
            start = take(bench, start, whole(1), versions=versions).end
            bench.run("ALTER TABLE orders ADD COLUMN v int, CHANGE w x longtext")
            bench.execute("INSERT INTO orders (id, x) VALUES (2, '2')")
            start = take(bench, start, whole(1), versions=versions).end
            # The log describes the table as before.
            bench.run("ALTER TABLE orders DROP COLUMN v", "ALTER TABLE orders ADD v int AFTER x")
            bench.execute("INSERT INTO orders (id, x) VALUES (3, '3')")
            take(bench, start, whole(1), versions=versions)
        finally:
            bench.run("SET GLOBAL binlog_row_metadata = MINIMAL")
        found: list[tuple[Position, object]] = [
            (position, [column.name for column in table.columns])
            for table, position in versions.registered
            if table.table == "orders"
        ]
        found += [
            (position, (dict(changes.renamed), set(changes.added), set(changes.dropped)))
            for table, changes, position in versions.alterations
            if table.table == "orders"
        ]
        assert [what for _, what in sorted(found, key=lambda one: one[0])] == [
            ["id", "v"],
            ({"w": "v"}, set(), set()),
            ({"x": "w"}, {"v"}, set()),
            ["id", "x", "v"],
            ({}, set(), {"v"}),
            ({}, {"v"}, set()),
            ["id", "x", "v"],
        ]

    def test_a_harmless_statement_stops_nothing(self, bench: MysqlBench) -> None:
        """An index, a partition or another table's change leaves rows before it readable."""
        start = bench.source().ensure_start()
        bench.execute(insert("orders", 1))
        bench.run(
            "ALTER TABLE orders ADD INDEX by_v (v(10))",
            "CREATE INDEX v2 ON orders (v(5))",
            "DROP TABLE other",
            "CREATE TABLE fresh (id int PRIMARY KEY)",
            "ANALYZE TABLE orders",
        )

        assert take(bench, start, whole(1)).changes == inserts("orders", 1)

    def test_statements_are_in_order_with_rows(self, bench: MysqlBench) -> None:
        """TRUNCATE of a captured table, and DDL, where they stand in the log."""
        start = bench.source().ensure_start()
        bench.execute(insert("orders", 1))
        bench.run("TRUNCATE TABLE other", "TRUNCATE items", "CREATE TABLE fresh (id int)")
        bench.execute(insert("items", 2))
        taken = take(bench, start, whole(3))
        rows = [row for batch in taken.batches if batch.rows for row in batch.rows.to_pylist()]

        assert [(row["op"], row["table"]) for row in rows] == [
            ("c", "orders"),
            ("t", "items"),
            ("ddl", "_ddl"),
            ("c", "items"),
        ]
        assert [json.loads(str(row["ddl"])) for row in rows[1:3]] == [
            {"sql": "TRUNCATE items", "database": bench.database},
            {"sql": "CREATE TABLE fresh (id int)", "database": bench.database},
        ]
        assert all(row["tx_end"] and row["tx_id"] for row in rows)


class TestXa:
    """Prepared transactions of a real server."""

    def test_rows_come_when_they_are_committed(self, bench: MysqlBench) -> None:
        """Whoever reads when: at once, from between, or from long after, in another file."""
        start = bench.source().ensure_start()
        xid = f"'{bench.database}','b',3"
        bench.run(f"XA START {xid}", insert("orders", 1, 2), f"XA END {xid}", f"XA PREPARE {xid}")
        bench.reconnect()  # which holds no session of its own any more
        bench.execute(insert("items", 3))
        before = take(bench, start, whole(1))
        bench.run("FLUSH BINARY LOGS", "FLUSH BINARY LOGS")
        assert is_quiet(bench, before.end)
        bench.run(f"XA COMMIT {xid}")
        assert bench.source().has_changes(before.end)
        at_once = take(bench, start, whole(3))
        later = take(bench, before.end, whole(2))

        assert before.changes == inserts("items", 3)
        assert at_once.changes == inserts("items", 3) + inserts("orders", 1, 2)
        assert unversioned(later.rows) == unversioned(at_once.rows[1:])
        assert later.end.to_json() == at_once.end.to_json()

    def test_a_rolled_back_one_is_never_seen(self, bench: MysqlBench) -> None:
        """Its rows are in the log, and nobody gets them; one phase is a commit."""
        start = bench.source().ensure_start()
        xid = f"'{bench.database}'"
        for way in ("PREPARE", "ROLLBACK", "COMMIT {} ONE PHASE"):
            if way == "ROLLBACK":
                bench.run(f"XA ROLLBACK {xid}")
                continue
            last = f"XA {way.format(xid)}" if "{" in way else f"XA {way} {xid}"
            bench.run(f"XA START {xid}", insert("orders", 1), f"XA END {xid}", last)
        taken = take(bench, start, whole(1))

        assert taken.changes == inserts("orders", 1)
        assert taken.end == bench.source().head()

    def test_its_rows_may_be_gone(self, bench: MysqlBench) -> None:
        """Committed after the server forgot that part of the log: a position that is lost."""
        xid = f"'{bench.database}'"
        bench.run(f"XA START {xid}", insert("orders", 1), f"XA END {xid}", f"XA PREPARE {xid}")
        bench.reconnect()
        start = bench.source().head()
        bench.forget()
        bench.run(f"XA COMMIT {xid}")

        with pytest.raises(PositionLost, match="the rows of the XA transaction"):
            take(bench, start, whole(1))


def test_checksums_begin_and_end(bench: MysqlBench) -> None:
    """`binlog_checksum` may change while we read; each file says what it has."""
    start = bench.source().ensure_start()
    bench.execute(insert("orders", 1))
    bench.run("SET GLOBAL binlog_checksum = NONE")
    try:
        bench.execute(insert("orders", 2))
    finally:
        bench.run("SET GLOBAL binlog_checksum = CRC32")
    bench.execute(insert("orders", 3))

    assert take(bench, start, whole(3)).changes == inserts("orders", 1, 2, 3)


def until(reading: Iterator[object], taken: Taken, rows: int) -> None:
    """Read on until there are so many rows, and no transaction is open."""
    deadline = time.monotonic() + 90
    while len(taken.rows) < rows or taken.batches[-1].end is None:
        add(taken, next(reading))  # type: ignore[arg-type]
        assert time.monotonic() < deadline


def read_all(bench: MysqlBench, start: BinlogPosition, taken: Taken) -> None:
    """Read until an error, for 30 seconds at most."""
    deadline = time.monotonic() + 90
    for batch in bench.source().read(start, ReadLimits(max_wait=0.05), Versions()):
        add(taken, batch)
        assert time.monotonic() < deadline


class TestRefusals:
    """What stops a pipeline: one clear line, with what to do."""

    def test_a_wrong_password(self, bench: MysqlBench) -> None:
        """Named as such, for the user, without the password."""
        dsn = as_user(bench, "REPLICATION SLAVE", password="geheim-and-wrong")

        with pytest.raises(AuthFailed, match="wrong password for user"):
            bench.source(dsn=dsn).head()

    @pytest.mark.parametrize("granted", ["SELECT", "REPLICATION CLIENT", "REPLICATION SLAVE"])
    def test_a_missing_grant_is_named(self, bench: MysqlBench, granted: str) -> None:
        """Both privileges are asked for before anything is read, in one statement to run."""
        reader = bench.source(dsn=as_user(bench, granted))

        with pytest.raises(PermissionMissing) as caught:
            reader.ensure_start()

        assert "GRANT REPLICATION SLAVE, REPLICATION CLIENT ON *.* TO" in problem(caught)

    def test_a_table_that_we_may_not_select_is_named(self, bench: MysqlBench) -> None:
        """Without SELECT the catalog hides a table; with MINIMAL metadata that must not pass."""
        start = bench.source().ensure_start()
        bench.execute(insert("orders", 1))
        dsn = as_user(bench, "REPLICATION SLAVE", "REPLICATION CLIENT")

        event = first_held(take(bench, start, some_held, source=bench.source(dsn=dsn)))
        assert event.table == f"{bench.database}.orders"
        assert "grant SELECT on it" in event.reason

    def test_the_grants_of_the_documentation_are_enough(self, bench: MysqlBench) -> None:
        """No other privilege is needed, for anything that a pipeline does."""
        dsn = as_user(bench, "REPLICATION SLAVE", "REPLICATION CLIENT", "SELECT")
        start = bench.source(dsn=dsn).ensure_start()
        bench.execute(insert("orders", 1))

        assert bench.source(dsn=dsn).has_changes(start)
        assert take(bench, start, whole(1), source=bench.source(dsn=dsn)).changes == inserts(
            "orders", 1
        )

    @pytest.mark.parametrize(
        ("setting", "value", "before"),
        [
            ("binlog_format", "STATEMENT", "ROW"),
        ],
    )
    def test_a_setting_is_named(
        self, bench: MysqlBench, setting: str, value: str, before: str
    ) -> None:
        """A setting that leaves changes, or parts of them, out of the log stops at the preflight."""
        start = bench.source().ensure_start()
        bench.run(f"SET GLOBAL {setting} = '{value}'")
        try:
            with pytest.raises(SourceMisconfigured) as caught:
                bench.source().ensure_start()
            with pytest.raises(SourceMisconfigured):
                take(bench, start, whole(1))
        finally:
            bench.run(f"SET GLOBAL {setting} = '{before}'")

        assert f"run: SET PERSIST {setting} = " in problem(caught)

    def test_a_server_without_a_log(self, start_mysql: StartMysql) -> None:
        """`log_bin` cannot be switched on while it runs; the message says how."""
        server = start_mysql({"skip_log_bin": "ON", "gtid_mode": "OFF"})

        with (
            MysqlBench(server.create_database()) as bench,
            pytest.raises(SourceMisconfigured, match="start the server with --log-bin"),
        ):
            bench.source().ensure_start()

    def test_a_statement_in_the_log_stops_the_pipeline(self, bench: MysqlBench) -> None:
        """A change that a session logged as a statement is not skipped."""
        start = bench.source().ensure_start()
        bench.run(
            "SET SESSION binlog_format = 'STATEMENT'",
            insert("orders", 1),
            "SET SESSION binlog_format = 'ROW'",
        )

        with pytest.raises(UnsupportedEvent, match=r"binlog\.0"):
            take(bench, start, whole(1))

    def test_a_server_that_is_not_there(self, bench: MysqlBench) -> None:
        """Nobody listens: try again later."""
        parts = urlsplit(bench.dsn)
        dsn = urlunsplit(parts._replace(netloc="u:geheim@127.0.0.1:1"))

        with pytest.raises(SourceUnavailable, match=r"MySQL 127\.0\.0\.1:1"):
            bench.source(dsn=dsn).head()


class TestLostPositions:
    """A position that the log no longer has is never read from."""

    def test_purged_gtids(self, bench: MysqlBench) -> None:
        """Also when somebody only asks whether there are changes."""
        start = bench.source().ensure_start()
        bench.execute(insert("orders", 1))
        bench.forget()

        with pytest.raises(PositionLost, match="was purged"):
            bench.source().has_changes(start)

    def test_a_purged_file(self, bench: MysqlBench) -> None:
        """A position without GTIDs needs its file."""
        start = bench.head()
        bench.execute(insert("orders", 1))
        bench.forget()

        with pytest.raises(PositionLost, match=rf"{start.file} was purged"):
            take(bench, start, whole(1))

    def test_an_offset_beyond_the_file(self, bench: MysqlBench) -> None:
        """The server lost the end of its log, or it is another server."""
        head = bench.head()

        with pytest.raises(PositionLost, match="ends before position"):
            take(bench, BinlogPosition(head.file, head.pos + 1_000_000), whole(1))

    def test_gtids_that_the_server_never_executed(
        self, bench: MysqlBench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Restored from a backup, the server would number other transactions like those we have."""
        monkeypatch.setattr(
            "deltaforge_dagster.sources.mysql.connection.server_log._EXECUTED_SECONDS", 0.3
        )
        head = bench.source().head()
        seen = GtidSet.parse(head.gtid_set or "")
        seen.add("3e11fa47-71ca-11e1-9e33-c80aa9429562", 1, 5)

        with pytest.raises(PositionLost, match="restored from a backup"):
            take(bench, BinlogPosition(head.file, head.pos, str(seen)), whole(1))

    def test_gtids_switched_off(self, plain_bench: MysqlBench) -> None:
        """A GTID set means nothing to a server without GTIDs."""
        head = plain_bench.head()

        with pytest.raises(SourceMisconfigured, match="gtid_mode is not ON"):
            take(plain_bench, BinlogPosition(head.file, head.pos, ""), whole(1))

    def test_gtids_switched_off_step_by_step(self, start_mysql: StartMysql) -> None:
        """A GTID set waits for gtid_mode ON; what was logged without GTIDs meanwhile stops it."""
        with MysqlBench(start_mysql(None).create_database()) as bench:
            start = bench.source().ensure_start()
            bench.execute(insert("orders", 1))
            bench.run("SET GLOBAL gtid_mode = ON_PERMISSIVE")
            bench.execute(insert("orders", 2))
            with pytest.raises(SourceMisconfigured, match="gtid_mode is not ON"):
                take(bench, start, whole(2))
            bench.run("SET GLOBAL gtid_mode = ON")
            between = take(bench, start, whole(2))
            assert between.changes == inserts("orders", 1, 2)

            bench.run(
                "SET GLOBAL gtid_mode = ON_PERMISSIVE", "SET GLOBAL gtid_mode = OFF_PERMISSIVE"
            )
            bench.execute(insert("orders", 3))
            with pytest.raises(SourceMisconfigured, match="gtid_mode is not ON"):
                take(bench, between.end, whole(1))
            bench.run("SET GLOBAL gtid_mode = ON_PERMISSIVE", "SET GLOBAL gtid_mode = ON")
            with pytest.raises(PositionLost, match="without GTID after the position"):
                take(bench, between.end, whole(1))
            with pytest.raises(PositionLost, match="without GTID after the position"):
                bench.source().has_changes(between.end)


class TestBrokenStreams:
    """Connections end, servers restart, readers meet: reading goes on from the last end."""

    def test_a_restarted_server(self, plain_server: MysqlServer, plain_bench: MysqlBench) -> None:
        """The stream ends with SourceUnavailable; the log goes on in a new file."""
        bench = plain_bench
        start = bench.source().ensure_start()
        taken = Taken([], start, [])
        reading = bench.source().read(start, ReadLimits(max_wait=0.05), Versions())
        bench.execute(insert("orders", 1))
        until(reading, taken, 1)

        plain_server.restart()
        with pytest.raises(SourceUnavailable):
            read_into(taken, itertools.islice(reading, 400))
        bench.reconnect()
        bench.execute(insert("orders", 2))
        more = take(bench, taken.end, whole(1))

        assert taken.changes + more.changes == inserts("orders", 1, 2)
        assert taken.end < more.end

    def test_a_second_reader_takes_over(self, bench: MysqlBench) -> None:
        """The server ends the older reader with one server id; it may try again."""
        start = bench.source().ensure_start()
        first = bench.source().read(start, ReadLimits(max_wait=0.05), Versions())
        next(first)
        bench.execute(insert("orders", 1))

        assert take(bench, start, whole(1)).changes == inserts("orders", 1)
        with pytest.raises(SourceUnavailable):
            for _ in itertools.islice(first, 400):
                pass

    def test_looking_for_changes_ends_no_reader(self, bench: MysqlBench) -> None:
        """`has_changes` reads under a server id of its own."""
        start = bench.source().ensure_start()
        reader = bench.source()
        taken = Taken([], start, [])
        reading = reader.read(start, ReadLimits(max_wait=0.05), Versions())
        next(reading)
        bench.execute(insert("orders", 1))

        assert bench.source().has_changes(start)
        until(reading, taken, 1)

    def test_a_silent_server_is_given_up(
        self,
        plain_server: MysqlServer,
        plain_bench: MysqlBench,
        monkeypatch: pytest.MonkeyPatch,
        patience: pytest.MonkeyPatch,
    ) -> None:
        """A server that sends no heartbeat any more is taken for dead; the head does not hang."""
        bench = plain_bench
        start = bench.source().ensure_start()
        patience.undo()
        monkeypatch.setattr(source, "SILENCE_SECONDS", 3.0)
        reading = bench.source().read(start, ReadLimits(max_wait=0.05), Versions())
        next(reading)

        plain_server.pause()
        try:
            with pytest.raises(SourceUnavailable, match="said nothing for 3 s"):
                for _ in itertools.islice(reading, 400):
                    pass
            began = time.monotonic()
            with pytest.raises(SourceUnavailable):
                bench.source().head()
            assert time.monotonic() - began < 30
        finally:
            plain_server.resume()

    def test_heartbeats_keep_an_idle_stream(
        self, bench: MysqlBench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Between changes the server's heartbeats show that it lives."""
        settings = [one.replace("15000000000", "200000000") for one in dump.SETTINGS]
        monkeypatch.setattr(dump, "SETTINGS", settings)
        monkeypatch.setattr(source, "SILENCE_SECONDS", 3.0)
        start = bench.source().ensure_start()
        deadline = time.monotonic() + 4.5

        for _ in bench.source().read(start, ReadLimits(max_wait=0.05), Versions()):
            if time.monotonic() > deadline:
                break


class TestLookingForChanges:
    """`has_changes`: a look at the log that decodes nothing."""

    def test_rows_larger_than_a_packet_are_passed(self, bench: MysqlBench) -> None:
        """An event that fills several packets hides nothing behind it."""
        start = bench.source().ensure_start()
        bench.execute("INSERT INTO other VALUES (1, repeat('x', 17000000)), (2, repeat('y', 100))")
        assert is_quiet(bench, start)

        bench.execute(insert("orders", 1))
        assert bench.source().has_changes(start)

    def test_much_log_is_worth_a_run(
        self, bench: MysqlBench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """So that a run moves the position on, and the next look is a short one."""
        start = bench.source().ensure_start()
        bench.execute("INSERT INTO other VALUES (1, repeat('x', 1000000))")
        assert is_quiet(bench, start)

        monkeypatch.setattr(log_scan, "MAX_UNREAD_BYTES", 500_000)
        assert bench.source().has_changes(start)

    def test_a_place_without_gtids_will_do(self, plain_bench: MysqlBench) -> None:
        """A server without GTIDs is asked by file and offset."""
        start = plain_bench.source().ensure_start()
        plain_bench.run("FLUSH BINARY LOGS")
        plain_bench.execute(insert("other", 1))
        assert is_quiet(plain_bench, start)

        plain_bench.execute(insert("items", 1))
        assert plain_bench.source().has_changes(start)


def test_memory_does_not_grow_with_a_transaction(bench: MysqlBench) -> None:
    """A transaction of 200 MB comes in pieces; what is held at once is a few of them."""
    warmed = bench.source().ensure_start()
    bench.execute("INSERT INTO orders VALUES (0, repeat('x', 1000))")
    start = take(bench, warmed, whole(1)).end  # what is compiled at first needs memory, too
    bench.execute(
        "INSERT INTO orders WITH RECURSIVE s (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s"
        " WHERE n < 200000) SELECT n, repeat('x', 1000) FROM s"
    )
    reader = bench.source()
    count = pieces = 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for batch in reader.read(start, ReadLimits(), Versions()):
        if batch.rows is not None:
            pieces += 1
            count += batch.rows.num_rows
            assert batch.rows.nbytes < 64 << 20
        if batch.end is not None and count:
            break
    reader.close()

    assert count == 200_000
    assert pieces > 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 150_000, "kilobytes"


def test_log_around_the_positions(bench: MysqlBench) -> None:
    """What is before the captured one is room; what is after it, or after the confirmed one, is counted to the log's end."""
    source = bench.source()
    confirmed = source.head()
    bench.execute(insert("orders", *range(100)))
    bench.run("FLUSH BINARY LOGS")
    captured = source.head()
    bench.execute(insert("orders", *range(100, 200)))

    found = source.retained_log(captured, confirmed)

    assert found is not None
    assert found.end == dataclasses.replace(source.head(), gtid_set=None)
    assert found.end.file == captured.file  # type: ignore[attr-defined]
    assert found.bytes == found.end.pos - captured.pos > 1000  # type: ignore[attr-defined]
    assert (found.unconfirmed or 0) > found.bytes + 1000
    rows = bench.rows("SHOW BINARY LOGS")
    assert found.room == sum(row[1] for row in rows) - found.bytes
    assert (found.retained, found.limit) == (None, None)
    seconds = bench.rows("SELECT @@GLOBAL.binlog_expire_logs_seconds")[0][0]
    assert found.kept_seconds == seconds > 0
    assert found.limited_by == "binlog_expire_logs_seconds"


def test_reading_goes_on_after_a_failover(bench: MysqlBench, start_mysql: StartMysql) -> None:
    """On another server with the same transactions: its files differ, and nothing is read twice."""
    second = start_mysql({"gtid_mode": "ON", "server_id": "2"})
    start = bench.source().ensure_start()
    bench.run("FLUSH BINARY LOGS", "FLUSH BINARY LOGS", "FLUSH BINARY LOGS")
    bench.execute(insert("orders", 1))
    before = take(bench, start, whole(1))
    assert isinstance(before.end, BinlogPosition)

    # As a replica would have it: the same GTIDs executed, the same tables, another log.
    name = bench.database
    execute(
        second.dsn,
        "RESET MASTER",
        f"SET GLOBAL gtid_purged = '{before.end.gtid_set}'",
        f"CREATE DATABASE {name}",
    )
    with MysqlBench(urlunsplit(urlsplit(second.dsn)._replace(path=f"/{name}"))) as promoted:
        promoted.execute(insert("orders", 2))
        after = take(promoted, before.end, whole(1))
        again = take(promoted, after.end, lambda taken: len(taken.batches) > 3)

    assert before.changes + after.changes == inserts("orders", 1, 2)
    assert again.rows == []
    assert isinstance(after.end, BinlogPosition)
    assert int(after.end.file.rpartition(".")[2]) < int(before.end.file.rpartition(".")[2])
    assert before.end < after.end


@pytest.mark.soak("versions")
def test_a_log_of_mysql_9(mysql_version: MysqlVersion) -> None:
    """Compressed, tagged and prepared transactions, read at once and from every end between."""
    with MysqlBench(mysql_version("9.7").create_database()) as bench:
        start = bench.source().ensure_start()
        xid = f"'{bench.database}'"
        bench.run("SET SESSION binlog_transaction_compression = ON")
        bench.execute(insert("orders", 1, 2), insert("items", 3))
        bench.run("SET gtid_next = 'AUTOMATIC:batch'")
        bench.execute(insert("orders", 4))
        bench.run("SET gtid_next = 'AUTOMATIC'")
        bench.run(f"XA START {xid}", insert("orders", 5), f"XA END {xid}", f"XA PREPARE {xid}")
        bench.reconnect()
        bench.run("FLUSH BINARY LOGS", f"XA COMMIT {xid}")
        bench.run("SET SESSION binlog_transaction_compression = ON")
        bench.execute(
            "INSERT INTO other WITH RECURSIVE s (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s"
            " WHERE n < 500) SELECT n, repeat('x', 100000) FROM s"
        )
        bench.execute(insert("items", 6))
        taken = take(bench, start, whole(6))
        ends = {batch.end.to_json() for batch in taken.batches if batch.end is not None}

        assert [row["after"] for row in taken.rows] == [
            f'{{"id":{id_},"v":"{id_}"}}' for id_ in (1, 2, 3, 4, 5, 6)
        ]
        assert ":batch:1" in str(taken.end.to_json())
        for end in ends - {taken.end.to_json()}:
            again = take(bench, parse_position(end), lambda one: one.end == taken.end)

            expected = taken.rows[len(taken.rows) - len(again.rows) :]
            assert unversioned(again.rows) == unversioned(expected)
