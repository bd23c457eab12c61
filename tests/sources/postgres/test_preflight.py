"""What a look at a PostgreSQL server finds; a real server for each point that can be tried."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from psycopg import conninfo

from deltaforge_dagster.positions import LsnPosition
from deltaforge_dagster.sources.findings import Finding
from tests.fix_postgres import StartPostgres
from tests.sources.postgres.bench import PostgresBench
from tests.sources.postgres.test_connection import PASSWORD, role  # noqa: F401

pytestmark = pytest.mark.postgres


@pytest.fixture
def bench(postgres_dsn: str) -> Iterator[PostgresBench]:
    """A database with `orders`, `items` and `other`."""
    with PostgresBench(postgres_dsn) as made:
        yield made


def look(
    bench: PostgresBench, position: LsnPosition | None = None, **config: object
) -> dict[str, Finding]:
    """Return the worst finding per subject."""
    with closing(bench.source(**config)) as source:
        found = source.preflight(position, None)
    assert PASSWORD not in str(found)
    levels = ["ok", "note", "warning", "error"]
    return {one.subject: one for one in sorted(found, key=lambda one: levels.index(one.level))}


def errors(found: dict[str, Finding]) -> list[str]:
    """Return the subjects with an error."""
    return [subject for subject, one in found.items() if one.level == "error"]


def test_a_server_that_is_as_needed(bench: PostgresBench) -> None:
    """Before the first run it says what will be made, and makes nothing; afterwards that it is there."""
    before = look(bench)

    assert errors(before) == []
    assert "will be created" in before["slot"].text
    assert "will be created" in before["publication"].text
    own_slots = "SELECT FROM pg_replication_slots WHERE database = current_database()"
    assert not bench.connection.execute(own_slots).fetchall()

    after = look(bench, bench.source().ensure_start())
    assert errors(after) == []
    assert "is there" in after["slot"].text
    assert "publication 'p' sends the tables" in after["publication"].text


def test_patterns_that_match_nothing_are_named(bench: PostgresBench) -> None:
    """A person sees what was looked for."""
    found = look(bench, tables=("nowhere.%", "public.order_*"))["tables"]

    assert found.level == "error"
    assert found.text == "no table matches source.config.tables (nowhere.%, public.order_*)"


def test_replica_identities_and_keys(bench: PostgresBench) -> None:
    """No identity stops the writers of a table, which is an error; keys only are a note."""
    bench.execute("CREATE TABLE keyless (a int)", "CREATE TABLE whole (a int)")
    bench.execute("ALTER TABLE whole REPLICA IDENTITY FULL", "CREATE TABLE bare (a int)")

    found = look(bench, tables=("public.keyless",))
    assert errors(found) == ["replica identity"]
    assert found["replica identity"].mend == 'ALTER TABLE "public"."keyless" REPLICA IDENTITY FULL'

    found = look(bench, tables=("public.keyless", "public.bare"))
    assert found["replica identity"].mend == (
        'ALTER TABLE "public"."bare" REPLICA IDENTITY FULL; '
        'ALTER TABLE "public"."keyless" REPLICA IDENTITY FULL'
    )
    assert str(found["keys"].mend).count("ADD PRIMARY KEY") == 2

    found = look(bench, tables=("public.orders", "public.keyless"))
    assert found["replica identity"].level == "warning"
    assert "not captured" in found["replica identity"].text

    found = look(bench, tables=("public.orders", "public.whole"))
    assert found["replica identity"].level == "note"
    assert "public.orders" in found["replica identity"].text
    assert "public.whole" not in found["replica identity"].text
    assert "public.whole" in found["keys"].text


def test_a_role_that_may_not(bench: PostgresBench, role: str) -> None:  # noqa: F811
    """What the role may not do comes with the statement that grants it."""
    dsn = conninfo.make_conninfo(bench.dsn, user=role, password=PASSWORD)

    found = look(bench, dsn=dsn)

    assert errors(found) == ["grants", "publication"]
    with closing(bench.source(dsn=dsn)) as source:
        mends = [one.mend for one in source.preflight(None, None) if one.subject == "grants"]
    assert mends == [
        f'ALTER ROLE "{role}" REPLICATION',
        f'GRANT SELECT ON "public"."items", "public"."orders" TO "{role}"',
    ]


def test_a_slot_that_is_gone(bench: PostgresBench) -> None:
    """A captured position without its slot is lost changes, and an error before a run says so."""
    start = bench.source().ensure_start()
    bench.connection.execute("SELECT pg_drop_replication_slot(%s)", (bench.slot,))

    found = look(bench, start)

    assert errors(found) == ["slot"]
    assert "Re-snapshot required" in found["slot"].text


def test_a_publication_that_lacks_something(bench: PostgresBench) -> None:
    """A table or a kind of change that is not sent comes with the statement that adds it."""
    start = bench.source().ensure_start()
    bench.execute("ALTER PUBLICATION p DROP TABLE items")
    assert "ALTER PUBLICATION" in str(look(bench, start)["publication"].mend)

    bench.execute("ALTER PUBLICATION p ADD TABLE items")
    bench.execute("ALTER PUBLICATION p SET (publish = 'insert, update')")
    found = look(bench, start)["publication"]
    assert found.level == "warning"
    assert "delete, truncate" in found.text


def test_log_that_a_slot_may_keep(start_postgres: StartPostgres) -> None:
    """A slot beyond its share of `max_slot_wal_keep_size` is about to be lost."""
    server = start_postgres({"max_slot_wal_keep_size": "32MB", "max_wal_size": "48MB"})
    with PostgresBench(server.create_database()) as bench:
        start = bench.source().ensure_start()
        assert look(bench, start)["retention"].level == "ok"
        bench.execute(
            "INSERT INTO other SELECT i, repeat('x', 2000) FROM generate_series(1, 15000) AS i"
        )

        found = look(bench, start)["retention"]

        assert found.level == "error"
        assert found.mend == "ALTER SYSTEM SET max_slot_wal_keep_size = -1"


def test_no_slot_is_free(start_postgres: StartPostgres) -> None:
    """A server with all slots in use, or without a log for us, is an error before the first run."""
    server = start_postgres({"max_replication_slots": "1"})
    with PostgresBench(server.create_database()) as bench:
        bench.connection.execute(
            "SELECT pg_create_logical_replication_slot('taken', 'test_decoding')"
        )
        assert errors(look(bench)) == ["slot"]
