"""What is PostgreSQL's own about its source; the promises common to all are in the contract."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import psycopg
import pytest
from psycopg import conninfo

from deltaforge_dagster.config.columns import ColumnOptions
from deltaforge_dagster.config.engine import PostgresOptions
from deltaforge_dagster.errors import (
    DeltaforgeError,
    LeaseLost,
    PermissionMissing,
    PositionLost,
    SourceMisconfigured,
    SourceUnavailable,
    StartDelayed,
)
from deltaforge_dagster.positions import Position, format_lsn
from deltaforge_dagster.sources.base import ReadLimits
from deltaforge_dagster.sources.postgres.decode.pgoutput import HEARTBEAT
from deltaforge_dagster.sources.postgres.position import LsnPosition
from deltaforge_dagster.sources.postgres.source import PostgresSource
from deltaforge_dagster.sources.postgres.stream import slot_reader, slots
from deltaforge_dagster.tables import ColumnDetails
from deltaforge_dagster.testing.sources import (
    Taken,
    Versions,
    add,
    insert,
    inserts,
    is_quiet,
    take,
    whole,
)
from deltaforge_lab.servers.postgres import PostgresServer
from tests.e2e.deployment import eventually
from tests.fix_postgres import StartPostgres
from tests.sources.postgres.bench import PIPELINE, PostgresBench
from tests.sources.postgres.connection.test_server import (  # noqa: F401
    PASSWORD,
    everything_said,
    role,
    silencing_proxy,
)

pytestmark = pytest.mark.postgres


@pytest.fixture
def bench(postgres_dsn: str) -> Iterator[PostgresBench]:
    """A database with `orders`, `items` and `other`."""
    with PostgresBench(postgres_dsn) as made:
        yield made


def problem(error: pytest.ExceptionInfo[DeltaforgeError]) -> str:
    """Return the message, after checking that it is one line without the password."""
    assert PASSWORD not in everything_said(error.value)
    assert "\n" not in str(error.value)
    return str(error.value)


class TestStart:
    """`ensure_start`: what it makes, and where it says to begin."""

    def test_makes_a_publication_of_the_matching_tables(self, bench: PostgresBench) -> None:
        """Exactly the captured tables are published, in their database."""
        bench.source(tables=("public.o%",)).ensure_start()

        published = bench.connection.execute(
            "SELECT tablename FROM pg_publication_tables WHERE pubname = 'p' ORDER BY 1"
        ).fetchall()
        assert published == [("orders",), ("other",)]

    def test_earliest_is_what_an_existing_slot_holds(self, bench: PostgresBench) -> None:
        """Changes made between the slot's creation and ours are read."""
        bench.source().ensure_start()
        bench.execute(insert("orders", 1))

        start = bench.source(start_position="earliest").ensure_start()

        assert take(bench, start, whole(1)).changes == inserts("orders", 1)

    def test_latest_skips_what_an_existing_slot_holds(self, bench: PostgresBench) -> None:
        """Only changes made after the call are read."""
        bench.source().ensure_start()
        bench.execute(insert("orders", 1))

        start = bench.source(start_position="latest").ensure_start()
        bench.execute(insert("orders", 2))

        assert take(bench, start, whole(1)).changes == inserts("orders", 2)

    def test_an_lsn_within_the_slot_is_honoured(self, bench: PostgresBench) -> None:
        """Reading starts at the LSN that the file names."""
        bench.source().ensure_start()
        bench.execute(insert("orders", 1))
        lsn = bench.value("SELECT pg_current_wal_insert_lsn()::text")
        bench.execute(insert("orders", 2))

        start = bench.source(start_position={"lsn": lsn}).ensure_start()

        assert take(bench, start, whole(1)).changes == inserts("orders", 2)

    def test_an_lsn_that_no_slot_holds_is_refused(self, bench: PostgresBench) -> None:
        """An LSN of the past is an error before and after a slot exists."""
        bench.source().ensure_start()
        with pytest.raises(PositionLost) as after:
            bench.source(start_position={"lsn": "0/100"}).ensure_start()
        assert "use earliest or latest" in problem(after)

    @pytest.mark.parametrize("ahead", [-100, 0, 1 << 30])
    def test_a_position_without_a_slot_creates_nothing(
        self, bench: PostgresBench, ahead: int
    ) -> None:
        """A new slot begins later than where another reader was, even if that is the end of the log."""
        at = LsnPosition(bench.source().head().lsn + ahead)
        source = bench.source()
        begins: tuple[Callable[[], object], ...] = (
            lambda: source.ensure_start(at),
            lambda: source.await_start(at, waits=lambda _: None),
            bench.source(start_position={"lsn": format_lsn(at.lsn)}).ensure_start,
        )
        for begin in begins:
            with pytest.raises(PositionLost, match=f"there is no replication slot '{bench.slot}'"):
                begin()
        assert not bench.value(
            "SELECT count(*) FROM pg_replication_slots WHERE slot_name = %s", bench.slot
        )
        assert not bench.value("SELECT count(*) FROM pg_publication")

    @pytest.mark.parametrize("here", [True, False])
    def test_it_waits_for_open_transactions(self, bench: PostgresBench, here: bool) -> None:
        """Of any database: it names them, and begins where the slot does; nobody else takes what is half made for a slot."""
        dsn = bench.dsn if here else conninfo.make_conninfo(bench.dsn, dbname="postgres")
        said: list[str] = []
        with psycopg.connect(dsn) as other, ThreadPoolExecutor(2) as pool:
            other.execute("SELECT txid_current()")
            starts = [pool.submit(bench.source().await_start, waits=said.append) for _ in range(2)]
            blocker = f"process {other.info.backend_pid} (database {other.info.dbname}, role"
            eventually(lambda: [one for one in said if blocker in one], what="the wait")
            with pytest.raises(StartDelayed, match="is being made by process"):
                bench.source().ensure_start()
            other.rollback()
            assert {start.result(60) for start in starts} == {bench.confirmed()}
        bench.execute(insert("orders", 1))
        assert take(bench, bench.confirmed(), whole(1)).changes == inserts("orders", 1)

    def test_waiting_can_be_given_up(self, bench: PostgresBench) -> None:
        """The server drops what is half made."""
        with psycopg.connect(bench.dsn) as other:
            other.execute("SELECT txid_current()")

            def give_up(said: str) -> None:
                if f"process {other.info.backend_pid}" in said:
                    raise LeaseLost("lost")

            with pytest.raises(LeaseLost):
                bench.source().await_start(waits=give_up)
            assert not bench.value(
                "SELECT count(*) FROM pg_replication_slots WHERE slot_name = %s", bench.slot
            )

    def test_an_open_transaction_delays_it(
        self, bench: PostgresBench, patience: pytest.MonkeyPatch
    ) -> None:
        """It gives up after 5 seconds, names the transaction, leaves no slot, and works later."""
        patience.undo()
        with psycopg.connect(bench.dsn) as other:
            other.execute(insert("other", 1))
            began = time.monotonic()
            with pytest.raises(StartDelayed) as caught:
                bench.source().ensure_start()
            assert time.monotonic() - began < 30
            assert f"the oldest: process {other.info.backend_pid}" in problem(caught)
            assert not bench.value(
                "SELECT count(*) FROM pg_replication_slots WHERE slot_name = %s", bench.slot
            )
            other.rollback()

        assert bench.source().ensure_start() <= bench.source().head()

    def test_a_locked_table_delays_it(
        self, bench: PostgresBench, patience: pytest.MonkeyPatch
    ) -> None:
        """A table under an exclusive lock cannot be published in time; the message says so."""
        patience.undo()
        with psycopg.connect(bench.dsn) as other:
            other.execute("LOCK TABLE orders")
            with pytest.raises(SourceUnavailable, match="locked by another session"):
                bench.source().ensure_start()

    def test_an_absent_table_is_named(self, bench: PostgresBench) -> None:
        """A table that the file names and the database lacks stops the pipeline."""
        with pytest.raises(SourceMisconfigured) as caught:
            bench.source(tables=("public.orders", "shop.nothing")).ensure_start()

        assert "shop.nothing" in problem(caught)

    def test_patterns_that_match_nothing_are_refused(self, bench: PostgresBench) -> None:
        """A pipeline that could never capture anything does not start; views do not count."""
        bench.execute("CREATE VIEW v_orders AS SELECT * FROM orders")
        with pytest.raises(
            SourceMisconfigured,
            match=r"no table matches source.config.tables \(public.v_\*, shop.x%\)",
        ):
            bench.source(tables=("public.v_*", "shop.x%")).ensure_start()

    def test_a_table_whose_updates_would_fail_is_not_captured(self, bench: PostgresBench) -> None:
        """Publishing a table without replica identity would break its users' statements.

        The others are captured; it joins once it has one.
        """
        of_all = {"tables": ("public.*",)}
        bench.execute("CREATE TABLE bare (id int, v text)", insert("bare", 1))
        start = bench.source(**of_all).ensure_start()
        bench.execute("UPDATE bare SET v = 'still works'", insert("orders", 1))

        (finding,) = bench.source(**of_all).maintain(start)
        assert (finding.subject, finding.level) == ("replica identity", "warning")
        assert "not captured" in finding.text
        assert "public.bare" in finding.text
        assert finding.commands == ('ALTER TABLE "public"."bare" REPLICA IDENTITY FULL',)
        bench.execute(*finding.commands)
        assert bench.source(**of_all).maintain(start) == []
        bench.execute("UPDATE bare SET v = 'new'")

        taken = take(bench, start, whole(2), source=bench.source(**of_all))
        assert taken.changes[0] == inserts("orders", 1)[0]
        assert taken.rows[1]["before"] == '{"id":1,"v":"still works"}'
        assert taken.rows[1]["after"] == '{"id":1,"v":"new"}'

    def test_only_tables_whose_updates_would_fail_are_refused(self, bench: PostgresBench) -> None:
        """A pipeline that could capture nothing does not start; the message has the statement."""
        bench.execute("CREATE TABLE bare (id int, v text)")
        with pytest.raises(SourceMisconfigured, match=r"public\.bare; once published") as caught:
            bench.source(tables=("public.bare",)).ensure_start()
        assert 'run: ALTER TABLE "public"."bare" REPLICA IDENTITY FULL' in problem(caught)

    def test_a_slot_without_its_publication_is_refused(self, bench: PostgresBench) -> None:
        """PostgreSQL could not decode what was written before the publication."""
        bench.forget()
        with pytest.raises(SourceMisconfigured, match="pg_drop_replication_slot"):
            bench.source().ensure_start()

    def test_a_slot_of_another_database_is_refused(
        self, bench: PostgresBench, postgres_server: PostgresServer
    ) -> None:
        """Slots belong to the whole server; the message names plugin and database."""
        bench.execute("CREATE PUBLICATION p FOR TABLE orders, items")
        with PostgresBench(postgres_server.create_database()) as other:
            other.value("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", other.slot)
            other_name = other.value("SELECT current_database()")

            with pytest.raises(SourceMisconfigured) as caught:
                bench.source(slot=other.slot).ensure_start()

        assert f"of plugin 'pgoutput' in database {other_name!r}" in problem(caught)

    def test_a_role_without_rights_is_told_what_to_run(
        self,
        bench: PostgresBench,
        role: str,  # noqa: F811
    ) -> None:
        """First the publication's statement, then the role's attribute; no password anywhere."""
        dsn = conninfo.make_conninfo(bench.dsn, user=role, password=PASSWORD)
        with pytest.raises(PermissionMissing) as publication:
            bench.source(dsn=dsn).ensure_start()
        statement = problem(publication).partition("run: ")[2]
        bench.execute(statement)

        with pytest.raises(PermissionMissing) as replication:
            bench.source(dsn=dsn).ensure_start()
        statement = problem(replication).partition("run: ")[2]
        bench.execute(statement)

        start = bench.source(dsn=dsn).ensure_start()
        bench.execute(insert("orders", 1))
        taken = take(bench, start, whole(1), source=bench.source(dsn=dsn))
        assert taken.changes == inserts("orders", 1)

    def test_wal_level_is_checked(self, start_postgres: StartPostgres) -> None:
        """A server that writes no logical log names the statement that changes it."""
        server = start_postgres({"wal_level": ""})
        with (
            PostgresBench(server.dsn) as bench,
            pytest.raises(SourceMisconfigured, match="ALTER SYSTEM SET wal_level = logical"),
        ):
            bench.source().ensure_start()

    def test_a_server_without_free_slots_is_named(self, start_postgres: StartPostgres) -> None:
        """`max_replication_slots` reached is a setting to change."""
        server = start_postgres({"max_replication_slots": "1"})
        with PostgresBench(server.dsn) as bench:
            bench.source().ensure_start()
            with pytest.raises(SourceMisconfigured, match="max_replication_slots"):
                bench.source(slot="one_more").ensure_start()


class TestPublication:
    """Tables that a publication sends and the patterns want, and the other way round."""

    def test_a_named_table_that_is_not_sent_is_an_error(self, bench: PostgresBench) -> None:
        """The message has the statement, which fixes it."""
        bench.execute("CREATE PUBLICATION p FOR TABLE orders")
        with pytest.raises(SourceMisconfigured) as caught:
            bench.source().ensure_start()
        statement = problem(caught).partition("run: ")[2].partition(" (")[0]

        bench.execute(statement)

        assert bench.source().ensure_start() is not None

    def test_a_new_table_that_matches_a_wildcard_is_logged(
        self, bench: PostgresBench, caplog: pytest.LogCaptureFixture
    ) -> None:
        """In a publication of somebody else: not captured, said with the remedy; the others go on."""
        bench.execute("CREATE PUBLICATION p FOR TABLE orders, items, other")
        start = bench.source(tables=("public.*",)).ensure_start()
        bench.execute("CREATE TABLE newer (id int PRIMARY KEY, v text)", insert("newer", 1))
        bench.execute(insert("orders", 1))

        with caplog.at_level(logging.WARNING):
            taken = take(bench, start, whole(1), source=bench.source(tables=("public.*",)))

        assert taken.changes == inserts("orders", 1)
        assert 'ALTER PUBLICATION "p" ADD TABLE "public"."newer"' in caplog.text

    def test_our_own_gets_the_tables_that_come_later(self, bench: PostgresBench) -> None:
        """When a run begins, and whenever somebody looks; what was written before is not captured."""
        of_all = {"tables": ("public.*",)}
        start = bench.source(**of_all).ensure_start()
        bench.execute("CREATE TABLE newer (id int PRIMARY KEY, v text)", insert("newer", 1))
        take(bench, start, lambda _: True, source=bench.source(**of_all))
        bench.execute(insert("newer", 2))
        bench.execute(
            "CREATE TABLE newest (id int PRIMARY KEY, v text)", "CREATE TABLE bare (v int)"
        )
        (bare,) = bench.source(**of_all).maintain(start)
        assert "public.bare" in bare.text
        bench.execute(insert("newest", 3), "INSERT INTO bare VALUES (4)")
        bench.execute("UPDATE bare SET v = 5")

        taken = take(bench, start, whole(2), source=bench.source(**of_all))

        assert taken.changes == inserts("newer", 2) + inserts("newest", 3)

    def test_tables_join_a_stream_that_is_being_read(self, bench: PostgresBench) -> None:
        """New tables and partitions are captured by the reader at work, from the look that adds them on."""
        of_all = {"tables": ("public.*",)}
        bench.execute("CREATE TABLE parted (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)")
        start = bench.source(**of_all).ensure_start()
        look = bench.source(**of_all)
        added = threading.Event()

        def seen(taken: Taken) -> bool:
            if taken.rows and not added.is_set():
                bench.execute(
                    "CREATE TABLE newer (id int PRIMARY KEY, v text)",
                    "CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (0) TO (10)",
                )
                assert look.maintain(None) == []
                bench.execute(insert("newer", 1), insert("parted", 2))
                added.set()
            return whole(3)(taken)

        bench.execute(insert("orders", 1))
        taken = take(bench, start, seen, source=bench.source(**of_all))

        assert taken.changes == [
            *inserts("orders", 1),
            *inserts("newer", 1),
            *inserts("parted", 2),
        ]

    def test_a_table_recreated_leaves_a_publication_of_others(self, bench: PostgresBench) -> None:
        """A look says so, with the statement, also beside a reader; once it was run, nothing is missing."""
        bench.execute("CREATE PUBLICATION p FOR TABLE orders, items")
        start = bench.source().ensure_start()
        bench.execute("DROP TABLE orders", "CREATE TABLE orders (id int PRIMARY KEY, v text)")

        (finding,) = bench.source().maintain(start)
        assert (finding.subject, finding.level) == ("publication", "error")
        assert "public.orders" in finding.text
        assert finding.remedy == 'ALTER PUBLICATION "p" ADD TABLE "public"."orders"'
        assert bench.source().maintain(None) == [finding]
        bench.execute(*finding.commands)
        assert bench.source().maintain(start) == []

    def test_numbers_of_columns(self, bench: PostgresBench) -> None:
        """They are those of the time of the rows, although the catalog is ahead of the log; in another run as well."""
        of_all = {"tables": ("public.*",)}
        versions = Versions()
        start: Position = bench.source(**of_all).ensure_start()

        def numbers(*statements: str) -> list[dict[str, int | None]]:
            nonlocal start
            for one in statements:
                bench.execute(one)
            count = sum(one.startswith("INSERT") for one in statements)
            known = len(versions.registered)
            start = take(
                bench, start, whole(count), source=bench.source(**of_all), versions=versions
            ).end
            return [
                {column.name: column.number for column in table.columns}
                for table, _ in versions.registered[known:]
            ]

        rename, drop = "ALTER TABLE orders RENAME COLUMN", "ALTER TABLE orders DROP COLUMN"
        assert numbers(insert("orders", 1)) == [{"id": 1, "v": 2}]
        assert numbers(f"{rename} v TO w", insert("orders", 2)) == [{"id": 1, "w": 2}]
        swap = f"{rename} id TO x; {rename} w TO id; {rename} x TO w"
        assert numbers(swap, "INSERT INTO orders VALUES (4, '4')") == [{"w": 1, "id": 2}]
        more = "ALTER TABLE orders ADD COLUMN more int"
        ahead = f"{rename} more TO later", f"{rename} id TO y"
        assert numbers(f"{rename} w TO x", more, insert("orders", 5), *ahead) == [
            {"x": 1, "id": 2, "more": 3}
        ]
        assert numbers(insert("orders", 6)) == [{"x": 1, "y": 2, "later": 3}]
        again = "ALTER TABLE orders ADD COLUMN later int"
        assert numbers(insert("orders", 7), f"{drop} later", again, insert("orders", 8)) == [
            {"x": 1, "y": 2, "later": 3}, {"x": 1, "y": 2, "later": 4},
        ]  # fmt: skip
        # The log describes the table in the same way before and after.
        assert numbers(f"{drop} later", again, insert("orders", 9)) == [
            {"x": 1, "y": 2, "later": 5}
        ]
        assert numbers(f"{rename} y TO z", insert("orders", 10), f"{drop} z", f"{rename} later TO z") == [
            {"x": 1, "z": 2, "later": 5}
        ]  # fmt: skip
        bench.execute("DROP TABLE orders", "CREATE TABLE orders (x int PRIMARY KEY, z text)")
        bench.source(**of_all).maintain(start)
        assert numbers(insert("orders", 1)) == [{"x": 1, "z": 2}]

    def test_what_older_rows_have_in_added_columns(self, bench: PostgresBench) -> None:
        """The catalog says it, as row images do, until the rows are rewritten; what differs from row to row is in the rows."""
        versions = Versions()
        start: Position = bench.source().ensure_start()

        def fills(*definitions: str, then: Sequence[str] = ()) -> dict[str, str | None]:
            nonlocal start
            count = len(versions.registered)
            names = [f"c{count}_{number}" for number, _ in enumerate(definitions)]
            for name, definition in zip(names, definitions, strict=True):
                bench.execute(f"ALTER TABLE orders ADD COLUMN {name} {definition}")
            bench.execute(*then, insert("orders", count + 10))
            start = take(bench, start, whole(1), versions=versions).end
            table, _ = versions.registered[-1]
            known = {column.name: column.fill for column in table.columns}
            return {
                definition: known[name] for definition, name in zip(definitions, names, strict=True)
            }

        bench.execute("CREATE TYPE mood AS ENUM ('ok', 'it''s')")
        assert fills() == {}
        expected = {
            "int": "null",
            "int DEFAULT 7": "7",
            "numeric DEFAULT 1.50": '"1.50"',
            "text DEFAULT 'a \"b\" \\ {c,d} ü'": r'"a \"b\" \\ {c,d} ü"',
            "text NOT NULL DEFAULT ''": '""',
            "timestamptz DEFAULT '2026-01-02 03:04:05+00'": '"2026-01-02 03:04:05+00"',
            "jsonb DEFAULT '{\"a\": [1, null]}'": '{"a":[1,null]}',
            "int[] DEFAULT '{{1,2},{3,NULL}}'": "[[1,2],[3,null]]",
            "mood DEFAULT 'it''s'": '"it\'s"',
            "bool DEFAULT true": "true",
        }
        assert fills(*expected) == expected
        assert fills("float8 DEFAULT random()") == {"float8 DEFAULT random()": None}
        rewritten = ("CLUSTER orders USING orders_pkey",)
        assert fills("int DEFAULT 5", then=rewritten) == {"int DEFAULT 5": None}

        # Read late: the row from before is described by a catalog that has the column already.
        bench.execute(
            "UPDATE orders SET v = 'x'", "ALTER TABLE orders ADD COLUMN late int DEFAULT 5"
        )
        bench.execute(*rewritten, insert("orders", 1000))
        take(bench, start, whole(2), versions=versions)
        late, _ = versions.registered[-1]
        assert late.columns[-1].fill is None

    def test_an_identity_that_was_taken_away(self, bench: PostgresBench) -> None:
        """Its users' statements fail as long as it is published: an error with the statement."""
        start = bench.source().ensure_start()
        bench.execute("ALTER TABLE orders REPLICA IDENTITY NOTHING")
        (finding,) = bench.source().maintain(start)
        assert (finding.subject, finding.level) == ("replica identity", "error")
        assert finding.commands == ('ALTER TABLE "public"."orders" REPLICA IDENTITY FULL',)

    def test_a_table_that_cannot_be_added_now_stops_nothing(
        self, bench: PostgresBench, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A locked table is tried again the next time."""
        of_all = {"tables": ("public.*",)}
        start = bench.source(**of_all).ensure_start()
        bench.execute("CREATE TABLE newer (id int PRIMARY KEY, v text)", insert("orders", 1))
        with psycopg.connect(bench.dsn) as other:
            other.execute("LOCK TABLE newer")
            taken = take(bench, start, whole(1), source=bench.source(**of_all))
        assert taken.changes == inserts("orders", 1)
        assert "does not get public.newer" in caplog.text

        take(bench, start, lambda _: True, source=bench.source(**of_all))
        bench.execute(insert("newer", 2))
        end = take(bench, taken.end, whole(1), source=bench.source(**of_all))
        assert end.changes == inserts("newer", 2)

    def test_a_wider_publication_captures_no_more(self, bench: PostgresBench) -> None:
        """Tables that the publication sends beyond the patterns are passed over."""
        bench.execute("CREATE PUBLICATION p FOR ALL TABLES")
        start = bench.source().ensure_start()
        bench.execute(insert("other", 1))
        assert is_quiet(bench, start)
        bench.execute(insert("other", 2), insert("orders", 1), insert("other", 3))
        assert bench.source().has_changes(start)

        taken = take(bench, start, whole(1))

        assert taken.changes == inserts("orders", 1)
        assert taken.rows[0]["tx_end"] is True

    def test_rows_of_partitions_carry_the_name_of_their_table(self, bench: PostgresBench) -> None:
        """A partitioned table is captured as itself."""
        bench.execute(
            "CREATE TABLE parted (id int, v text, PRIMARY KEY (id)) PARTITION BY RANGE (id)",
            "CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (0) TO (10)",
            "CREATE TABLE parted_2 PARTITION OF parted FOR VALUES FROM (10) TO (20)",
        )
        of_all = ("public.*",)
        start = bench.source(tables=of_all).ensure_start()
        bench.execute(insert("parted", 1, 11))

        taken = take(bench, start, whole(2), source=bench.source(tables=of_all))

        assert taken.changes == inserts("parted", 1, 11)

    def test_partitions_may_be_sent_as_themselves(
        self, bench: PostgresBench, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A publication without publish_via_partition_root serves patterns that match partitions.

        It cannot serve one that names the partitioned table: its rows come under other names.
        """
        bench.execute(
            "CREATE TABLE parted (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
            "CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (0) TO (10)",
            "CREATE PUBLICATION p FOR TABLE parted, orders, items, other",
        )
        start = bench.source(tables=("public.*",)).ensure_start()
        bench.execute(insert("parted", 1))

        taken = take(bench, start, whole(1), source=bench.source(tables=("public.*",)))

        assert taken.changes == inserts("parted_1", 1)
        assert not caplog.text
        bench.execute(
            "ALTER PUBLICATION p DROP TABLE parted", "ALTER PUBLICATION p ADD TABLE parted_1"
        )
        bench.execute("CREATE TABLE parted_2 PARTITION OF parted FOR VALUES FROM (10) TO (20)")
        bench.source(tables=("public.*",)).ensure_start()
        assert 'ADD TABLE "public"."parted_2"' in caplog.text
        with pytest.raises(SourceMisconfigured, match="publish_via_partition_root"):
            bench.source(tables=("public.parted",)).ensure_start()

    def test_a_publication_that_is_gone_stops_the_pipeline(self, bench: PostgresBench) -> None:
        """What was written without it cannot be decoded."""
        start = bench.source().ensure_start()
        bench.execute("DROP PUBLICATION p")

        with pytest.raises(PositionLost, match="publication 'p' is gone"):
            take(bench, start, whole(1))
        with pytest.raises(PositionLost, match="publication 'p' is gone"):
            bench.source().maintain(start)

    def test_log_from_before_the_publication_stops_the_pipeline(self, bench: PostgresBench) -> None:
        """An error inside the stream is translated as well."""
        start = bench.source().ensure_start()
        bench.execute("DROP PUBLICATION p")
        bench.execute(insert("orders", 1))
        bench.execute("CREATE PUBLICATION p FOR TABLE orders, items")

        with pytest.raises(PositionLost, match="did not exist when this part of the log"):
            take(bench, start, whole(1))
        with pytest.raises(PositionLost, match="did not exist when this part of the log"):
            bench.source().has_changes(start)

        (dropped,) = bench.source().reset(dry_run=True)
        assert "from before publication 'p' was made" in dropped
        assert bench.source().reset(dry_run=False) == [dropped]
        start = bench.source().ensure_start()
        bench.execute(insert("orders", 2))
        assert take(bench, start, whole(1)).changes == inserts("orders", 2)


class TestSlot:
    """Who reads the slot, and where it stands."""

    def test_a_slot_that_is_gone_is_lost(self, bench: PostgresBench) -> None:
        """Reading and asking for changes both say so."""
        start = bench.source().ensure_start()
        bench.drop_slot()

        for call in (
            lambda: take(bench, start, whole(1)),
            lambda: bench.source().has_changes(start),
        ):
            with pytest.raises(PositionLost) as caught:
                call()
            assert f"replication slot {bench.slot!r} is gone" in problem(caught)

    def test_an_older_reader_of_the_pipeline_is_ended(
        self, bench: PostgresBench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """After a run was killed its reader may still hold the slot; the new one takes it."""
        monkeypatch.setattr(slots, "_WAIT_SECONDS", 0.5)
        start = bench.source().ensure_start()
        reading = bench.source().read(start, ReadLimits(), Versions())
        next(reading)
        bench.execute(insert("orders", 1))

        assert take(bench, start, whole(1)).changes == inserts("orders", 1)

    def test_a_reader_that_takes_nothing_is_ended(
        self, bench: PostgresBench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The rest of a row fills the connection, so that its walsender cannot say good-bye.

        Such is a run that was stopped (SIGSTOP) amid a transaction, and whose lease another has.
        """
        monkeypatch.setattr(slots, "_WAIT_SECONDS", 0.0)
        start = bench.source().ensure_start()
        bench.execute(insert("orders", 1))
        reading = bench.source().read(start, ReadLimits(), Versions())
        next(batch for batch in reading if batch.rows is not None)
        bench.execute("INSERT INTO orders VALUES (2, repeat('x', 32000000))")
        eventually(lambda: bench.reader_waits_for("WalSenderWriteData"))

        taken = take(bench, start, whole(2))

        assert [row["table"] for row in taken.rows] == ["orders", "orders"]

    def test_the_server_ends_a_reader_that_says_nothing(
        self, bench: PostgresBench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also a server that is told to wait for ever; then the slot is free for anybody."""
        database = conninfo.conninfo_to_dict(bench.dsn)["dbname"]
        bench.execute(f"ALTER DATABASE {database} SET wal_sender_timeout = 0")
        monkeypatch.setattr(slot_reader, "SILENCE_SECONDS", 2.0)
        start = bench.source().ensure_start()
        with silencing_proxy(bench.dsn) as (dsn, silence):
            reading = bench.source(dsn=dsn).read(start, ReadLimits(), Versions())
            next(reading)
            assert bench.reader() is not None

            silence.set()

            eventually(lambda: bench.reader() is None)

    def test_a_slot_for_prepared_transactions_is_refused(self, bench: PostgresBench) -> None:
        """It would send what may be rolled back."""
        bench.execute("CREATE PUBLICATION p FOR TABLE orders, items")
        bench.value(
            "SELECT pg_create_logical_replication_slot(%s, 'pgoutput', false, true)", bench.slot
        )

        with pytest.raises(SourceMisconfigured, match="made with two_phase"):
            bench.source().ensure_start()

    def test_an_old_server_has_no_failover_slots(self, bench: PostgresBench) -> None:
        """The option is refused before anything is made."""
        if bench.connection.info.server_version >= 170000:
            pytest.xfail("this server has them")
        with pytest.raises(SourceMisconfigured, match="needs PostgreSQL 17"):
            bench.source(options=PostgresOptions(failover_slot=True)).ensure_start()

    def test_log_that_is_about_to_go_is_warned_of_and_then_lost(
        self, start_postgres: StartPostgres, caplog: pytest.LogCaptureFixture
    ) -> None:
        """`unreserved` is a warning; after the next checkpoint the slot is invalidated."""
        server = start_postgres({"max_slot_wal_keep_size": "1MB", "min_wal_size": "32MB"})
        with PostgresBench(server.dsn) as bench:
            start = bench.source().ensure_start()
            bench.execute(insert("orders", 1))
            for _ in range(3):
                bench.value("SELECT pg_switch_wal()::text")
                bench.execute(insert("other", bench.value("SELECT count(*) FROM other")))
            status = "SELECT wal_status FROM pg_replication_slots"
            assert bench.value(status) in {"unreserved", "extended"}
            if bench.value(status) == "unreserved":
                take(bench, start, whole(1))
                assert "removes at its next checkpoint" in caplog.text
            bench.execute("CHECKPOINT")

            with pytest.raises(PositionLost) as caught:
                take(bench, start, whole(1))

        assert "was invalidated" in problem(caught)

    def test_heartbeats_move_the_slot(self, bench: PostgresBench) -> None:
        """They come back as progress that can be confirmed, and as no change."""
        start = bench.source().ensure_start()
        reader = bench.source(options=PostgresOptions(heartbeat_seconds=0.2))
        ends = 0
        for batch in reader.read(start, ReadLimits(), Versions()):
            assert batch.rows is None
            if isinstance(batch.end, LsnPosition) and batch.end.tx_id is not None:
                ends += 1
                reader.confirm(batch.end)
            if ends > 2 and bench.confirmed() > start:
                break
        reader.close()
        bench.execute(f"SELECT pg_logical_emit_message(true, '{HEARTBEAT}', '')")

        end = bench.confirmed()
        assert is_quiet(bench, end)  # whatever the reader left unread when it was closed
        bench.execute(insert("orders", 1))
        assert bench.source().has_changes(end)

    def test_a_reader_that_is_not_ours_is_named(
        self, bench: PostgresBench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Somebody else's process is never ended."""
        monkeypatch.setattr(slots, "_WAIT_SECONDS", 0.5)
        start = bench.source().ensure_start()
        other = PostgresSource(bench.config(), "another-pipeline")
        with closing(other):
            reading = other.read(start, ReadLimits(), Versions())
            next(reading)
            pid = bench.reader()

            with pytest.raises(SourceUnavailable) as caught:
                take(bench, start, whole(1))

            assert f"in use by process {pid} (deltaforge/another-pipeline)" in problem(caught)
            assert bench.reader() == pid

    def test_a_slot_in_use_is_worth_a_look(self, bench: PostgresBench) -> None:
        """`has_changes` does not fail beside a reader."""
        start = bench.source().ensure_start()
        reader = bench.source()
        reading = reader.read(start, ReadLimits(), Versions())
        next(reading)
        bench.execute(insert("orders", 1))

        assert bench.source().has_changes(start)

    def test_much_log_is_worth_a_run(
        self, bench: PostgresBench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Log of others that piles up starts a run, whose idle progress lets the server forget it."""
        monkeypatch.setattr(slots, "MAX_UNCONFIRMED_BYTES", 1 << 20)
        start = bench.source().ensure_start()
        bench.execute(
            "INSERT INTO other SELECT n, repeat('x', 100) FROM generate_series(1, 20000) n"
        )
        assert bench.source().has_changes(start)

        reader = bench.source()
        for batch in reader.read(start, ReadLimits(), Versions()):
            if batch.end is not None:
                reader.confirm(batch.end)
            if reader.head().lsn - bench.confirmed().lsn < 1 << 20:
                break
        reader.close()

        assert is_quiet(bench, start)

    def test_changes_behind_unconfirmed_ones_are_told_apart(self, bench: PostgresBench) -> None:
        """A sink that is behind holds the slot back; what was captured already is no news."""
        start = bench.source().ensure_start()
        bench.execute(insert("orders", 1))
        captured = take(bench, start, whole(1)).end

        assert is_quiet(bench, captured)
        bench.execute(insert("orders", 2))
        assert bench.source().has_changes(captured)


class TestStream:
    """The stream as PostgreSQL sends it."""

    def test_a_busy_consumer_keeps_its_connection(self, bench: PostgresBench) -> None:
        """Keepalives are answered while the consumer sleeps for longer than wal_sender_timeout."""
        start = bench.source().ensure_start()
        bench.execute(
            "INSERT INTO orders SELECT n, repeat('x', 200) FROM generate_series(1, 50000) n"
        )
        reader = bench.source(dsn=bench.with_options("-c wal_sender_timeout=4000"))
        taken = Taken([], start, [])
        reading = reader.read(start, ReadLimits(max_events=1000), Versions())
        add(taken, next(reading))
        pid = bench.reader()
        for _ in range(2):
            time.sleep(4.5)
            add(taken, next(reading))
        while not whole(50000)(taken):
            add(taken, next(reading))

        assert bench.reader() == pid
        assert [row["tx_end"] for row in taken.rows].count(True) == 1

    def test_settings_of_the_role_do_not_reach_values(
        self,
        bench: PostgresBench,
        role: str,  # noqa: F811
    ) -> None:
        """Times, floats and bytes arrive in one form, whatever the role sets."""
        bench.execute(
            "CREATE TABLE odd (id int PRIMARY KEY, t timestamptz, f float8, b bytea, d date)",
            "CREATE PUBLICATION p FOR TABLE odd",
            f"ALTER ROLE {role} REPLICATION",
            f"ALTER ROLE {role} SET TimeZone = 'Asia/Tokyo'",
            f"ALTER ROLE {role} SET DateStyle = 'German'",
            f"ALTER ROLE {role} SET extra_float_digits = -5",
            f"ALTER ROLE {role} SET bytea_output = 'escape'",
            f"ALTER ROLE {role} SET client_encoding = 'LATIN1'",
        )
        dsn = conninfo.make_conninfo(bench.dsn, user=role, password=PASSWORD)
        changed = {"tables": ("odd",), "dsn": dsn}
        start = bench.source(**changed).ensure_start()
        bench.execute(
            "INSERT INTO odd VALUES (1, '2026-03-01 12:00+00', 0.1, '\\xff', '2026-03-01')"
        )

        taken = take(bench, start, whole(1), source=bench.source(**changed))

        assert taken.changes[0][2] == {
            "id": 1,
            "t": "2026-03-01 12:00:00+00",
            "f": 0.1,
            "b": {"_base64": "/w=="},
            "d": "2026-03-01",
        }

    def test_a_transaction_before_the_start_is_not_repeated(self, bench: PostgresBench) -> None:
        """A transaction counts by its commit: one that began before another ended comes after it."""
        start = bench.source().ensure_start()
        with psycopg.connect(bench.dsn) as slow:
            slow.execute(insert("orders", 1))
            bench.execute(insert("orders", 2))
            first = take(bench, start, whole(1))
            slow.commit()

        second = take(bench, first.end, whole(1))

        assert first.changes == inserts("orders", 2)
        assert second.changes == inserts("orders", 1)

    def test_a_server_that_stops_ends_the_stream(self, start_postgres: StartPostgres) -> None:
        """A shutdown is retryable, and the stream goes on once the server is back."""
        server = start_postgres()
        with PostgresBench(server.dsn) as bench:
            start = bench.source().ensure_start()
            bench.execute(insert("orders", 1))
            reader = bench.source()
            ended: list[DeltaforgeError] = []

            def read() -> None:
                try:
                    for _ in reader.read(start, ReadLimits(), Versions()):
                        pass
                except DeltaforgeError as error:
                    ended.append(error)

            thread = threading.Thread(target=read)
            thread.start()
            while bench.reader() is None:
                time.sleep(0.05)
            bench.connection.close()
            server.restart()
            thread.join(120)
            bench.connection = psycopg.connect(server.dsn, autocommit=True)

            assert isinstance(ended[0], SourceUnavailable)
            assert take(bench, start, whole(1)).changes == inserts("orders", 1)

    def test_closing_leaves_the_slot_free(self, bench: PostgresBench) -> None:
        """Many short streams, one after another, need no waiting for each other."""
        start = bench.source().ensure_start()
        began, threads = time.monotonic(), threading.active_count()
        for _ in range(10):
            take(bench, start, lambda _: True)

        assert time.monotonic() - began < 45  # after 5 s each, readers would be ended
        assert threading.active_count() < threads + 10

    def test_a_closed_source_reads_no_more(self, bench: PostgresBench) -> None:
        """A source closed before its stream began ends at once."""
        start = bench.source().ensure_start()
        reader = bench.source()
        reader.close()

        with pytest.raises(SourceUnavailable):
            next(reader.read(start, ReadLimits(), Versions()))
        assert bench.reader() is None


def test_tables_and_schema_come_from_the_catalog(bench: PostgresBench) -> None:
    """`tables` are those that match, `schema` has columns in order and the primary key."""
    reader = bench.source(tables=("public.*",))

    assert reader.tables() == ["public.items", "public.orders", "public.other"]
    schema = reader.schema("public.orders")
    assert [(column.name, column.data_type, column.nullable) for column in schema.columns] == [
        ("id", "integer", False),
        ("v", "text", True),
    ]
    assert schema.primary_key == ("id",)
    with pytest.raises(SourceMisconfigured, match=r"there is no table public\.nothing"):
        reader.schema("public.nothing")


def test_details_come_from_the_catalog(bench: PostgresBench) -> None:
    """What the log does not say: NOT NULL, domains' as well, defaults, and how values are made."""
    bench.execute(
        "CREATE DOMAIN state AS text NOT NULL DEFAULT 'new'",
        "CREATE TABLE many (a int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,"
        " b int GENERATED BY DEFAULT AS IDENTITY, c serial, d text NOT NULL DEFAULT 'x', e state,"
        " f int, g int GENERATED ALWAYS AS (f + 1) STORED, h text DEFAULT 'geheim')",
        "ALTER TABLE many ADD gone int DEFAULT 1",
        "ALTER TABLE many DROP gone",
    )
    rules = ColumnOptions.model_validate({"mask": {"many.h": "x"}})
    source = PostgresSource(bench.config(tables=("public.many",)), PIPELINE, columns=rules)

    details = source.details("public.many")

    assert details.columns == {
        "a": ColumnDetails(False, None, "GENERATED ALWAYS AS IDENTITY"),
        "b": ColumnDetails(False, None, "GENERATED BY DEFAULT AS IDENTITY"),
        "c": ColumnDetails(False, "nextval('public.many_c_seq'::regclass)", ""),
        "d": ColumnDetails(False, "'x'::text", ""),
        "e": ColumnDetails(False, "'new'::text", ""),
        "f": ColumnDetails(True, None, ""),
        "g": ColumnDetails(True, None, "STORED GENERATED"),
        "h": ColumnDetails(True, None, ""),  # values of it are hidden
    }
    assert (details.engine, details.charset, details.collation) == (None, None, None)
    assert source.database() == bench.dsn.rpartition("/")[2]
    with pytest.raises(SourceMisconfigured, match=r"there is no table public\.nothing"):
        source.details("public.nothing")


def test_the_start_is_a_position(bench: PostgresBench) -> None:
    """Positions are LSNs, ordered, and text and back."""
    start = bench.source().ensure_start()

    assert isinstance(start, LsnPosition)
    assert start < LsnPosition(start.lsn + 1)
