"""Servers that take each other's place: a promoted replica, another cluster, an older copy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from deltaforge_dagster.config.engine import PostgresOptions
from deltaforge_dagster.errors import PositionLost
from deltaforge_dagster.sources.postgres.position import LsnPosition
from deltaforge_dagster.testing.sources import (
    LIMITS,
    Versions,
    insert,
    inserts,
    take,
    whole,
)
from deltaforge_lab.servers.postgres import PostgresServer
from tests.fix_postgres import StartPostgres
from tests.pipeline.changes import eventually
from tests.sources.postgres.bench import PostgresBench

pytestmark = pytest.mark.postgres


@pytest.fixture
def bench(postgres_dsn: str) -> Iterator[PostgresBench]:
    """A database with `orders`, `items` and `other`."""
    with PostgresBench(postgres_dsn) as made:
        yield made


def test_a_server_is_its_cluster_and_timeline(bench: PostgresBench) -> None:
    """Two numbers, the same each time, also for a role that may do little."""
    system, timeline = bench.source().identity().split("/")

    assert system == bench.value("SELECT system_identifier::text FROM pg_control_system()")
    assert int(timeline) == 1
    assert bench.source().identity() == f"{system}/{timeline}"


def test_another_cluster_goes_on_where_its_slot_begins(bench: PostgresBench) -> None:
    """Without a slot, or with one that is behind, the position is lost."""
    start = bench.source().ensure_start()
    here = bench.source()
    before = LsnPosition(start.lsn - 1000)

    assert here.relocate(before, "123/1") == start
    with pytest.raises(PositionLost, match="positions must not go back"):
        here.relocate(LsnPosition(start.lsn + 1), "123/1")
    bench.drop_slot()
    with pytest.raises(PositionLost, match="position lost after failover: it is another cluster"):
        here.relocate(before, "123/1")


def test_a_slot_that_was_made_again_is_lost(bench: PostgresBench) -> None:
    """It begins behind what was captured, and would leave out what lies between."""
    start = bench.source().ensure_start()
    bench.execute(insert("orders", 1))
    bench.forget()

    with pytest.raises(PositionLost, match="was it recreated"):
        take(bench, start, whole(1))


def test_a_log_that_ends_before_the_position_is_lost(bench: PostgresBench) -> None:
    """A server that was restored from an older copy would send other changes at the same place."""
    start = bench.source().ensure_start()

    with pytest.raises(PositionLost, match="restored from an older copy"):
        next(bench.source().read(LsnPosition(start.lsn + (1 << 40)), LIMITS, Versions()))


def test_the_schema_is_what_the_log_would_describe(bench: PostgresBench) -> None:
    """Names, types with their length, and the identity's key are those of registered versions."""
    bench.execute(
        "CREATE TABLE many (b varchar(7) NOT NULL, a int, g int GENERATED ALWAYS AS (a + 1) STORED,"
        " n numeric(10,2), t timestamp(3)[], PRIMARY KEY (a, b))",
        "CREATE UNIQUE INDEX by_b ON many (b)",
    )
    changed = {"tables": ("many",), "publication": "q"}
    start = bench.source(**changed).ensure_start()
    for statement in ("SELECT 1", "ALTER TABLE many REPLICA IDENTITY USING INDEX by_b"):
        bench.execute(statement, "DELETE FROM many")
        bench.execute("INSERT INTO many (a, b) VALUES (1, 'x')")
        versions = Versions()
        reader = bench.source(**changed)
        for batch in reader.read(start, LIMITS, versions):
            if batch.rows is not None and batch.end is not None:
                assert isinstance(batch.end, LsnPosition)
                start = batch.end
                break
        reader.close()
        registered, _ = versions.registered[-1]
        now = bench.source(**changed).schema("public.many")

        assert [(c.name, c.data_type) for c in now.columns] == [
            (c.name, c.data_type) for c in registered.columns
        ]
        assert set(now.primary_key) == set(registered.primary_key)


def promote(server: PostgresServer) -> None:
    """Let the server come back as a replica of nobody, and promote it: a new timeline begins."""
    with psycopg.connect(server.dsn) as connection:
        row = connection.execute("SHOW data_directory").fetchone()
    assert row is not None
    Path(row[0], "standby.signal").touch()
    server.restart()
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        connection.execute("SELECT pg_promote()")


class TestPromotion:
    """A replica of the server takes its place."""

    def test_goes_on_before_the_promotion_and_stops_behind_it(
        self, start_postgres: StartPostgres
    ) -> None:
        """What was read of the old timeline until it was left is also the new one's."""
        server = start_postgres({"wal_level": "logical"})
        with PostgresBench(server.dsn) as bench:
            bench.source().ensure_start()
            bench.execute(insert("orders", 1))
            known = bench.source().identity()
            shared = bench.source().head()
            bench.connection.close()
            promote(server)
            bench.connection = psycopg.connect(server.dsn, autocommit=True)
            bench.execute(insert("orders", 2))

            reader = bench.source()
            assert reader.identity() == known.replace("/1", "/2")
            assert reader.relocate(shared, known) == shared
            with pytest.raises(PositionLost, match="position lost after failover: timeline 1"):
                reader.relocate(reader.head(), known)
            with pytest.raises(PositionLost, match="no part of this server's history"):
                reader.relocate(shared, known.replace("/1", "/7"))

    @pytest.mark.soak("managed")
    def test_a_slot_that_became_a_failover_slot_outlives_its_primary(
        self, start_postgres: StartPostgres
    ) -> None:
        """A real standby has a copy of it, and is promoted when the primary has crashed."""
        primary = start_postgres({"synchronized_standby_slots": "standby"}, version=18)
        settings = {"sync_replication_slots": "on", "synchronized_standby_slots": ""}
        with primary.standby(settings) as standby, PostgresBench(primary.dsn) as bench:
            start = bench.source().ensure_start()
            before = bench.source().identity()
            bench.execute(insert("orders", 1))
            upgrading = bench.source(options=PostgresOptions(failover_slot=True))
            taken = take(bench, start, whole(1), source=upgrading)
            assert taken.changes == inserts("orders", 1)

            def on_standby(query: str, *parameters: object) -> bool:
                with psycopg.connect(standby.dsn) as connection:
                    return bool(connection.execute(query.encode(), parameters).fetchall())

            def copied() -> bool:
                """Return whether the standby has the slot, which first has to move a bit."""
                bench.value("SELECT pg_log_standby_snapshot()::text")
                advance = "SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())::text"
                try:
                    bench.value(advance, bench.slot)
                except psycopg.errors.ObjectInUse:  # its reader's connection ends only now
                    return False
                slot = "SELECT FROM pg_replication_slots WHERE slot_name = %s AND NOT temporary"
                return on_standby(slot, bench.slot)

            eventually(copied, seconds=120)
            position = bench.confirmed()
            bench.execute(insert("orders", 2))
            eventually(lambda: on_standby("SELECT FROM orders WHERE id = 2"), seconds=120)
            bench.connection.close()
            primary.stop(immediate=True)
            with psycopg.connect(standby.dsn, autocommit=True) as connection:
                connection.execute("SELECT pg_promote()")
            bench.dsn = standby.dsn
            bench.connection = psycopg.connect(bench.dsn, autocommit=True)
            bench.execute(insert("orders", 3))

            assert bench.source().relocate(position, before) == position
            assert take(bench, position, whole(2)).changes == inserts("orders", 2, 3)
