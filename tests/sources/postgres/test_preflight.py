"""What a look at a PostgreSQL server finds; a real server for each point that can be tried."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import psycopg
import pytest
from psycopg import conninfo

from deltaforge_dagster.config.engine import PostgresOptions, ValueOptions
from deltaforge_dagster.errors import PermissionMissing, SourceMisconfigured
from deltaforge_dagster.sources.base import ReadLimits
from deltaforge_dagster.sources.findings import Finding
from deltaforge_dagster.sources.postgres.position import LsnPosition
from deltaforge_dagster.sources.postgres.source import PostgresSource
from deltaforge_dagster.testing.sources import Versions
from tests.fix_postgres import StartPostgres
from tests.pipeline.changes import eventually
from tests.sources.postgres.bench import PostgresBench
from tests.sources.postgres.connection.test_server import (  # noqa: F401
    PASSWORD,
    role,
)

pytestmark = pytest.mark.postgres


@pytest.fixture
def bench(postgres_dsn: str) -> Iterator[PostgresBench]:
    """A database with `orders`, `items` and `other`."""
    with PostgresBench(postgres_dsn) as made:
        yield made


def preflight_of(
    bench: PostgresBench,
    position: LsnPosition | None = None,
    *,
    snapshot: bool = False,
    **config: object,
) -> dict[str, Finding]:
    """Return the worst finding per subject."""
    with closing(bench.source(**config)) as source:
        found = source.preflight(position, None, snapshot=snapshot)
    assert PASSWORD not in str(found)
    levels = ["ok", "note", "warning", "error"]
    return {one.subject: one for one in sorted(found, key=lambda one: levels.index(one.level))}


def errors(found: dict[str, Finding]) -> list[str]:
    """Return the subjects with an error."""
    return [subject for subject, one in found.items() if one.level == "error"]


def test_a_server_that_is_as_needed(bench: PostgresBench) -> None:
    """Before the first run it says what will be made, and makes nothing; afterwards that it is there."""
    before = preflight_of(bench)

    assert errors(before) == []
    assert "will be created" in before["slot"].text
    assert "will be created" in before["publication"].text
    own_slots = "SELECT FROM pg_replication_slots WHERE database = current_database()"
    assert not bench.connection.execute(own_slots).fetchall()

    after = preflight_of(bench, bench.source().ensure_start())
    assert errors(after) == []
    assert "is there" in after["slot"].text
    assert "publication 'p' sends the tables" in after["publication"].text


def test_patterns_that_match_nothing_are_named(bench: PostgresBench) -> None:
    """A person sees what was looked for."""
    found = preflight_of(bench, tables=("nowhere.%", "public.order_*"))["tables"]

    assert found.level == "error"
    assert found.text == "no table matches source.config.tables (nowhere.%, public.order_*)"


def test_a_pattern_that_matches_nothing_beside_others(bench: PostgresBench) -> None:
    """It is named, since it may be misspelt."""
    found = preflight_of(bench, tables=("public.orders", "public.order_*"))["tables"]

    assert found.level == "warning"
    assert found.text.startswith("no table matches public.order_* of source.config.tables")


def test_replica_identities_and_keys(bench: PostgresBench) -> None:
    """No identity stops the writers of a table, which is an error; keys only are a note."""
    bench.execute("CREATE TABLE keyless (a int)", "CREATE TABLE whole (a int)")
    bench.execute("ALTER TABLE whole REPLICA IDENTITY FULL", "CREATE TABLE bare (a int)")

    found = preflight_of(bench, tables=("public.keyless",))
    assert errors(found) == ["replica identity"]
    assert found["replica identity"].commands == (
        'ALTER TABLE "public"."keyless" REPLICA IDENTITY FULL',
    )

    found = preflight_of(bench, tables=("public.keyless", "public.bare"))
    assert found["replica identity"].commands == (
        'ALTER TABLE "public"."bare" REPLICA IDENTITY FULL',
        'ALTER TABLE "public"."keyless" REPLICA IDENTITY FULL',
    )
    assert str(found["keys"].remedy).count("ADD PRIMARY KEY") == 2

    found = preflight_of(bench, tables=("public.orders", "public.keyless"))
    assert found["replica identity"].level == "warning"
    assert "not captured" in found["replica identity"].text

    found = preflight_of(bench, tables=("public.orders", "public.whole"))
    assert found["replica identity"].level == "note"
    assert "public.orders" in found["replica identity"].text
    assert "public.whole" not in found["replica identity"].text
    assert "public.whole" in found["keys"].text


def test_a_role_that_may_not(bench: PostgresBench, role: str) -> None:  # noqa: F811
    """What the role may not do comes with the statement that grants it."""
    dsn = conninfo.make_conninfo(bench.dsn, user=role, password=PASSWORD)

    with closing(bench.source(dsn=dsn)) as source:
        found = source.preflight(None, None)

    assert [(one.subject, one.level) for one in found if one.remedy and one.bad] == [
        ("grants", "error"),
        ("publication", "error"),
    ]
    remedies = {command for one in found for command in one.commands}
    assert f'ALTER ROLE "{role}" REPLICATION' in remedies
    assert f'GRANT SELECT ON "public"."items", "public"."orders" TO "{role}"' in remedies
    (publication,) = [one for one in found if one.subject == "publication"]
    assert "lacks CREATE on the database, it does not own public.items" in publication.text
    assert publication.commands[0].startswith('CREATE PUBLICATION "p" FOR TABLE "public"."items"')


def test_an_owner_that_may_not_create_in_the_database(
    bench: PostgresBench,
    role: str,  # noqa: F811
) -> None:
    """The role that owns the tables lacks one right; with it, what is said comes true."""
    bench.execute(
        f"ALTER ROLE {role} REPLICATION",
        f"ALTER TABLE orders OWNER TO {role}",
        f"ALTER TABLE items OWNER TO {role}",
    )
    dsn = conninfo.make_conninfo(bench.dsn, user=role, password=PASSWORD)

    found = preflight_of(bench, dsn=dsn)
    assert errors(found) == ["publication"]
    assert "lacks CREATE on the database;" in found["publication"].text
    with pytest.raises(PermissionMissing):
        bench.source(dsn=dsn).ensure_start()

    database = conninfo.conninfo_to_dict(bench.dsn)["dbname"]
    bench.execute(f"GRANT CREATE ON DATABASE {database} TO {role}")
    found = preflight_of(bench, dsn=dsn)
    assert errors(found) == []
    assert "will be created" in found["publication"].text
    bench.source(dsn=dsn).ensure_start()


def test_tables_that_a_snapshot_may_not_read(bench: PostgresBench, role: str) -> None:  # noqa: F811
    """Whatever keeps a SELECT from seeing all of a table is an error once something reads it."""
    bench.execute(
        f"ALTER ROLE {role} REPLICATION",
        "CREATE PUBLICATION p FOR TABLE orders, items",
        f"GRANT SELECT ON orders, items TO {role}",
    )
    dsn = conninfo.make_conninfo(bench.dsn, user=role, password=PASSWORD)
    assert preflight_of(bench, dsn=dsn, snapshot=True)["grants"].level == "ok"

    bench.execute(
        f"REVOKE SELECT ON orders FROM {role}",
        f"GRANT SELECT (id) ON orders TO {role}",
        "ALTER TABLE items ENABLE ROW LEVEL SECURITY",
        "REVOKE USAGE ON SCHEMA public FROM PUBLIC",
    )
    noted, found = (
        preflight_of(bench, dsn=dsn)["grants"],
        preflight_of(bench, dsn=dsn, snapshot=True)["grants"],
    )

    assert (noted.level, found.level) == ("note", "error")
    assert "the stream works, snapshots do not" in noted.text
    assert "which the snapshot needs" in found.text
    assert found.remedy == noted.remedy
    assert found.commands == (
        f'GRANT USAGE ON SCHEMA "public" TO "{role}"',
        f'GRANT SELECT ON "public"."orders" TO "{role}"',
        f'ALTER ROLE "{role}" BYPASSRLS',
    )
    bench.execute(*found.commands)
    assert preflight_of(bench, dsn=dsn, snapshot=True)["grants"].level == "ok"


def test_tables_that_reselection_may_not_read(bench: PostgresBench, role: str) -> None:  # noqa: F811
    """`toast: reselect` reads tables while the stream goes on."""
    bench.execute(f"ALTER ROLE {role} REPLICATION", "CREATE PUBLICATION p FOR TABLE orders, items")
    dsn = conninfo.make_conninfo(bench.dsn, user=role, password=PASSWORD)
    source = PostgresSource(bench.config(dsn=dsn), "orders", ValueOptions(toast="reselect"))

    with closing(source):
        found = source.preflight(None, None)

    (refused,) = [one for one in found if one.level == "error"]
    assert "which engine.values.toast: reselect needs" in refused.text
    assert refused.commands == (f'GRANT SELECT ON "public"."items", "public"."orders" TO "{role}"',)


def test_heartbeats_that_may_not_be_written(bench: PostgresBench, role: str) -> None:  # noqa: F811
    """The log is read without them, so it is a warning; nobody needs the right who writes none."""
    dsn = conninfo.make_conninfo(bench.dsn, user=role, password=PASSWORD)
    options = PostgresOptions(heartbeat_seconds=10)
    assert preflight_of(bench, dsn=dsn, options=options)["heartbeat"].level == "ok"
    functions = (
        "SELECT string_agg(oid::regprocedure::text, ', ') FROM pg_proc"
        " WHERE proname = 'pg_logical_emit_message' AND proargtypes[2] = 'text'::regtype"
    )
    bench.execute(f"REVOKE EXECUTE ON FUNCTION {bench.value(functions)} FROM PUBLIC")

    found = preflight_of(bench, dsn=dsn, options=options)["heartbeat"]

    assert found.level == "warning"
    bench.execute(*found.commands)
    assert preflight_of(bench, dsn=dsn, options=options)["heartbeat"].level == "ok"
    assert "heartbeat" not in preflight_of(bench, dsn=dsn)


def test_what_the_file_asks_of_a_server_that_lacks_it(bench: PostgresBench) -> None:
    """Failover slots need a newer server; messages of an outbox need no right of ours."""
    if bench.connection.info.server_version >= 170000:
        pytest.xfail("this server has them")
    outbox = {"prefixes": ("outbox",)}

    found = preflight_of(bench, options=PostgresOptions(failover_slot=True), outbox=outbox)

    assert "needs PostgreSQL 17" in found["slot"].text
    assert errors(found) == ["slot"]
    assert found["outbox"].level == "ok"


def test_a_slot_that_is_gone(bench: PostgresBench) -> None:
    """A captured position without its slot is lost changes, and an error before a run says so."""
    start = bench.source().ensure_start()
    bench.connection.execute("SELECT pg_drop_replication_slot(%s)", (bench.slot,))

    found = preflight_of(bench, start)

    assert errors(found) == ["slot"]
    assert "Re-snapshot required" in found["slot"].text


def test_a_publication_that_lacks_something(bench: PostgresBench) -> None:
    """A table or a kind of change that is not sent comes with the statement that adds it."""
    start = bench.source().ensure_start()
    bench.execute("ALTER PUBLICATION p DROP TABLE items")
    found = preflight_of(bench, start)["publication"]
    assert found.level == "error"
    assert found.remedy == 'ALTER PUBLICATION "p" ADD TABLE "public"."items"'

    bench.execute("ALTER PUBLICATION p ADD TABLE items")
    bench.execute("ALTER PUBLICATION p SET (publish = 'insert, update')")
    found = preflight_of(bench, start)["publication"]
    assert found.level == "warning"
    assert "delete, truncate" in found.text
    bench.execute("ALTER PUBLICATION p SET (publish = 'insert, update, delete')")
    assert preflight_of(bench, start)["publication"].level == "note"


def test_log_that_a_slot_may_keep(start_postgres: StartPostgres) -> None:
    """A slot beyond its share of `max_slot_wal_keep_size` is about to be lost.

    It may be, while nothing of its tables changes, if the limit is below the log that wakes a pipeline.
    """
    server = start_postgres({"max_wal_size": "48MB"})
    with PostgresBench(server.create_database()) as bench:
        start = bench.source().ensure_start()
        assert preflight_of(bench, start)["retention"].level == "ok"
        for size in ("64MB", "32MB"):
            bench.connection.execute(f"ALTER SYSTEM SET max_slot_wal_keep_size = '{size}'")
            bench.connection.execute("SELECT pg_reload_conf()")

            def risky(size: str = size) -> bool:
                found = preflight_of(bench, start)["retention"]
                return (
                    found.level == "warning"
                    and f"of {size.removesuffix('MB')} (max_slot_wal_keep_size); while the captured tables"
                    in found.text
                    and found.commands[0] == "ALTER SYSTEM SET max_slot_wal_keep_size = '1024MB'"
                )

            eventually(risky, seconds=30)
        bench.execute(
            "INSERT INTO other SELECT i, repeat('x', 2000) FROM generate_series(1, 15000) AS i"
        )

        found = preflight_of(bench, start)["retention"]

        assert found.level == "error"
        assert "if the server's disk has room for 1,024 MB of log" in found.text
        for statement in found.commands:
            bench.connection.execute(statement.encode())
        eventually(lambda: preflight_of(bench, start)["retention"].level == "ok", seconds=30)


def test_a_setting_that_waits_for_a_restart(start_postgres: StartPostgres) -> None:
    """Once `wal_level` is changed, what is left to do is the restart, before and after a reload."""
    server = start_postgres({"wal_level": ""})
    with PostgresBench(server.create_database()) as bench:
        found = preflight_of(bench)["wal_level"]
        assert found.level == "error"
        assert "must be restarted" in found.text
        assert found.commands == ("ALTER SYSTEM SET wal_level = logical", "SELECT pg_reload_conf()")
        for statement in found.commands:
            bench.connection.execute(statement.encode())
            found = preflight_of(bench)["wal_level"]
            assert "is changed in its configuration" in found.text
            assert found.commands == ()
        with pytest.raises(SourceMisconfigured, match="must be restarted"):
            bench.source().ensure_start()
        dsn = bench.dsn
    server.restart()
    with psycopg.connect(dsn) as connection:
        assert connection.execute("SHOW wal_level").fetchone() == ("logical",)


def test_no_slot_or_sender_is_free(start_postgres: StartPostgres) -> None:
    """A server with all of them in use is an error before the first run."""
    server = start_postgres({"max_replication_slots": "2", "max_wal_senders": "1"})
    dsn = server.create_database()
    with PostgresBench(server.create_database()) as other, PostgresBench(dsn) as bench:
        reader = other.source()
        reading = reader.read(reader.ensure_start(), ReadLimits(), Versions())
        next(reading)

        found = preflight_of(bench)
        assert errors(found) == ["slot"]
        assert "could not be tried: PostgreSQL" in found["grants"].text
        assert "max_wal_senders=11) and restart the server" in found["slot"].text

        bench.connection.execute(
            "SELECT pg_create_logical_replication_slot('taken', 'test_decoding')"
        )
        found = preflight_of(bench)
        assert errors(found) == ["slot"]
        assert "max_replication_slots=12) and restart the server" in found["slot"].text
