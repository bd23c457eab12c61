"""Servers of services: which one it is, what it refuses, and what its users do instead."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from psycopg import conninfo
from pydantic import SecretStr

from deltaforge_dagster.errors import PermissionMissing, SourceUnavailable
from deltaforge_dagster.sources.findings import Finding
from deltaforge_dagster.sources.postgres.connection.service import (
    SELF_MANAGED,
    SERVICES,
    recognized,
)
from deltaforge_dagster.sources.postgres.position import LsnPosition, parse_lsn
from deltaforge_dagster.sources.postgres.source import PostgresSource
from deltaforge_dagster.sources.postgres.source_type import PostgresSourceConfig
from deltaforge_dagster.testing.sources import insert, inserts, take, whole
from deltaforge_lab.servers import postgres_service
from deltaforge_lab.servers.postgres_service import PostgresServiceServer, ServiceProfile
from tests.fix_postgres import FAST
from tests.sinks.certificates import certificate
from tests.sources.postgres.bench import PostgresBench
from tests.sources.postgres.connection.test_server import (  # noqa: F401
    PASSWORD,
    role,
)

pytestmark = pytest.mark.postgres

LOG_FUNCTIONS = (
    "pg_control_system()",
    "pg_current_wal_flush_lsn()",
    "pg_current_wal_insert_lsn()",
    "pg_current_wal_lsn()",
    "pg_walfile_name(pg_lsn)",
)


@pytest.fixture
def bench(postgres_dsn: str) -> Iterator[PostgresBench]:
    """A database with `orders`, `items` and `other`."""
    with PostgresBench(postgres_dsn) as made:
        yield made


def test_a_server_of_its_own_superuser_is_self_managed(bench: PostgresBench, role: str) -> None:  # noqa: F811
    """Also if a dump of roles from a service was restored there: whoever is a superuser may do everything."""
    assert recognized(bench.connection) is SELF_MANAGED
    try:
        bench.execute("CREATE ROLE rds_superuser")
        assert recognized(bench.connection) is SELF_MANAGED
        dsn = conninfo.make_conninfo(bench.dsn, user=role, password=PASSWORD)
        with psycopg.connect(dsn, autocommit=True) as connection:
            assert recognized(connection).name == "Amazon RDS for PostgreSQL"
    finally:
        bench.execute("DROP ROLE rds_superuser")


def test_row_level_security_where_nobody_is_a_superuser(bench: PostgresBench, role: str) -> None:  # noqa: F811
    """Members of a table's owner read all of it; where it holds for them too, there is no statement."""
    bench.execute(
        f"ALTER ROLE {role} REPLICATION",
        "CREATE PUBLICATION p FOR TABLE orders, items",
        f"GRANT SELECT ON orders, items TO {role}",
        "CREATE ROLE rds_superuser",
        "ALTER TABLE orders OWNER TO rds_superuser",
        "ALTER TABLE orders ENABLE ROW LEVEL SECURITY",
    )
    dsn = conninfo.make_conninfo(bench.dsn, user=role, password=PASSWORD)

    def refused() -> list[Finding]:
        with closing(bench.source(dsn=dsn)) as source:
            return [one for one in source.preflight(None, None, snapshot=True) if one.bad]

    try:
        (finding,) = refused()
        assert finding.commands == (f'GRANT "rds_superuser" TO "{role}"',)
        bench.execute(*finding.commands)
        assert refused() == []

        bench.execute("ALTER TABLE orders FORCE ROW LEVEL SECURITY")
        (finding,) = refused()
        assert "forced on public.orders: only BYPASSRLS passes it" in finding.text
        assert finding.commands == ()
    finally:
        bench.execute("ALTER TABLE orders OWNER TO CURRENT_USER", "DROP ROLE rds_superuser")


def test_no_service_is_told_what_it_refuses() -> None:
    """Every sentence names the setting that it changes; none is a statement for superusers."""
    for service in SERVICES:
        for name in ("wal_level", "max_slot_wal_keep_size", "max_replication_slots"):
            sentence = service.change(name, "7", restarts=True)
            assert "{" not in sentence
            assert "ALTER SYSTEM" not in sentence
            if name != "wal_level":
                assert name in sentence
                assert "7" in sentence
        text, commands = service.replication('we"ird')
        assert service.managed
        assert text
        assert all('"we""ird"' in command for command in commands)


def test_functions_of_the_log_that_are_refused(bench: PostgresBench, role: str) -> None:  # noqa: F811
    """The server answers a replication connection instead: all that capture and snapshots ask of it."""
    bench.execute(
        f"ALTER ROLE {role} REPLICATION",
        "CREATE PUBLICATION p FOR TABLE orders, items",
        f"GRANT SELECT ON orders, items TO {role}",
        *(f"REVOKE EXECUTE ON FUNCTION {name} FROM PUBLIC" for name in LOG_FUNCTIONS),
    )
    dsn = conninfo.make_conninfo(bench.dsn, user=role, password=PASSWORD)
    ours = bench.source(dsn=dsn)
    start = ours.ensure_start()
    assert ours.identity() == bench.source().identity()
    bench.execute(insert("orders", 1))
    written = parse_lsn(bench.value("SELECT pg_current_wal_flush_lsn()::text"))

    assert ours.head().lsn >= written
    with closing(ours.log_ends(30)) as ends:
        assert next(ends) <= next(ends)
        assert next(ends).lsn >= written
    assert ours.retained_log(start, None).bytes >= written - start.lsn
    assert ours.has_changes(start)
    assert [one.line for one in ours.preflight(start, None) if one.level == "error"] == []
    taken = take(bench, start, whole(1), source=bench.source(dsn=dsn))
    assert taken.changes == inserts("orders", 1)

    snapshots = ours.snapshots()
    watermark = snapshots.watermark()
    with snapshots.reader() as reader:
        (chunk,) = snapshots.plan(["public.orders"], 1000)
        chunk_read = reader.read(chunk, watermark)
        assert sum(batch.num_rows for batch in chunk_read.batches) == 1
    assert isinstance(chunk_read.position, LsnPosition)
    assert chunk_read.position.lsn >= written


PROFILES = [
    pytest.param(
        made,
        marks=() if made is postgres_service.AURORA else pytest.mark.soak("managed"),
        id=made.name,
    )
    for made in vars(postgres_service).values()
    if isinstance(made, ServiceProfile)
]
"""All profiles of the lab; in each run Aurora, which takes most away."""


def source_of(service: PostgresServiceServer) -> PostgresSource:
    """Return a source over the database `shop`, as the role `df`."""
    return PostgresSource(
        PostgresSourceConfig(
            id="shop",
            dsn=SecretStr(service.dsn("shop", "df", "secret")),
            slot="shop",
            publication="shop",
            tables=("public.orders",),
        ),
        "shop",
    )


def found(service: PostgresServiceServer, position: LsnPosition | None) -> list[Finding]:
    """Return what a look at the server finds, but for what is as it should be."""
    with closing(source_of(service)) as source:
        findings = source.preflight(position, None, snapshot=True)
    return [finding for finding in findings if finding.level != "ok"]


def do(service: PostgresServiceServer, finding: Finding) -> None:
    """Do what a finding says: its statements as the administrator, and its parameter in the console."""
    service.execute(*finding.commands, database="shop")
    parameter = re.search(r"(\w+(?:\.\w+)?) ?= ?(\w+)", finding.text)
    if not finding.commands and parameter:
        service.set_parameters({parameter[1]: parameter[2]})


@pytest.mark.parametrize("profile", PROFILES)
def test_a_service_is_recognized_and_told_its_own_remedies(
    profile: ServiceProfile, tmp_path: Path
) -> None:
    """What is printed before anything is prepared is accepted from its administrator, and afterwards all is well."""
    # A plain server before 16 lets only superusers hand on attributes, which these services changed.
    version = None if profile.replicators else 17
    files = certificate(tmp_path)
    with PostgresServiceServer.start(profile, *files, FAST, version=version) as service:
        service.create_database("shop")
        service.execute("CREATE ROLE df LOGIN PASSWORD 'secret'")
        service.execute("CREATE TABLE orders (id int PRIMARY KEY, v text)", database="shop")
        with closing(source_of(service)) as source:
            (connection, *_) = source.preflight(None, None)
        assert connection.text.endswith(f", {profile.name}")

        before = found(service, None)
        assert [finding.subject for finding in before if finding.bad] == [
            *(["wal_level"] if profile.logical else []),
            *("grants", "publication", "grants"),
        ]
        for finding in before:
            do(service, finding)
        if profile.name == "Neon":  # what its console does for a role that is made there
            service.execute("ALTER ROLE df REPLICATION")
        assert [finding.line for finding in found(service, None) if finding.bad] == []

        with closing(source_of(service)) as source:
            start = source.ensure_start()
        service.set_parameters({"max_slot_wal_keep_size": "64"})
        (short,) = [one for one in found(service, start) if one.subject == "retention"]
        assert short.level == "warning"
        assert short.commands == ()
        do(service, replace(short, text=short.text.rpartition("; ")[2]))
        assert "retention" not in [finding.subject for finding in found(service, start)]

        service.demote()
        (standby,) = found(service, start)
        assert standby.line.startswith(
            "server: this is a standby; changes are read from the primary"
        )
        with (
            closing(source_of(service)) as source,
            pytest.raises(SourceUnavailable, match="standby"),
        ):
            source.has_changes(start)


def test_a_role_that_may_not_replicate_is_told_what_the_service_does(
    bench: PostgresBench,
    role: str,  # noqa: F811
) -> None:
    """Also where a run finds out: the slot is made by a function that needs the right."""
    bench.execute("CREATE PUBLICATION p FOR TABLE orders, items")
    dsn = conninfo.make_conninfo(bench.dsn, user=role, password=PASSWORD)
    try:
        bench.execute("CREATE ROLE rds_superuser")
        with pytest.raises(PermissionMissing) as caught:
            bench.source(dsn=dsn).ensure_start()
    finally:
        bench.execute("DROP ROLE rds_superuser")

    assert caught.value.remedy == (f'GRANT rds_replication TO "{role}"',)
    assert "the master user grants it" in str(caught.value)
