"""What the catalogs of a real server answer."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from deltaforge_dagster.sources.postgres.connection import catalog
from deltaforge_dagster.sources.postgres.connection.catalog import PostgresCatalog
from deltaforge_dagster.sources.postgres.connection.server import PostgresSourceServer
from deltaforge_dagster.sources.postgres.decode.types import CatalogType
from deltaforge_dagster.sources.tables import TablePatterns
from tests.fix_postgres import StartPostgres

pytestmark = pytest.mark.postgres


@pytest.fixture
def connection(postgres_dsn: str) -> Iterator[psycopg.Connection]:
    """An ordinary connection to an empty database."""
    with psycopg.connect(postgres_dsn, autocommit=True) as opened:
        yield opened


def oid_of(connection: psycopg.Connection, name: str, kind: str) -> int:
    """Return the OID of a table (`regclass`) or type (`regtype`)."""
    row = connection.execute(f"SELECT %s::{kind}::oid::int8", (name,)).fetchone()
    assert row is not None
    return int(row[0])


def test_a_primary_key_has_its_own_order(connection: psycopg.Connection, postgres_dsn: str) -> None:
    """Columns come in the key's order, without those an index only includes."""
    connection.execute("CREATE TABLE k (a int, b int, c int, PRIMARY KEY (c, a) INCLUDE (b))")
    connection.execute("CREATE TABLE u (a int UNIQUE)")
    asked = PostgresCatalog(PostgresSourceServer.from_dsn(postgres_dsn, "t").query)

    assert asked.primary_key(oid_of(connection, "k", "regclass")) == ("c", "a")
    assert asked.primary_key(oid_of(connection, "u", "regclass")) == ()
    assert asked.primary_key(1) == ()


def test_types_are_described_as_the_decoder_needs_them(
    connection: psycopg.Connection, postgres_dsn: str
) -> None:
    """Names are qualified the same way for every role; arrays know element and delimiter."""
    connection.execute("CREATE TYPE mood AS ENUM ('sad', 'ok')")
    connection.execute("CREATE DOMAIN small AS int")
    mood = oid_of(connection, "mood", "regtype")
    box = oid_of(connection, "box", "regtype")
    asked = PostgresCatalog(PostgresSourceServer.from_dsn(postgres_dsn, "t").query)

    def described(name: str) -> CatalogType | None:
        return asked.type(oid_of(connection, name, "regtype"))

    assert described("mood") == CatalogType("public.mood", "e", 0, ",")
    assert described("mood[]") == CatalogType("public.mood[]", "b", mood, ",")
    assert described("small") == CatalogType("public.small", "d", 0, ",", base=23)
    assert described("box[]") == CatalogType("box[]", "b", box, ";")
    assert described("point") == CatalogType("point", "b", 0, ",")
    assert asked.type(1) is None


def test_only_tables_of_users_are_listed(connection: psycopg.Connection) -> None:
    """No views, temporary, unlogged or system tables; partitions know their root."""
    for statement in (
        "CREATE SCHEMA shop",
        "CREATE TABLE shop.plain (a int)",
        "CREATE VIEW v AS SELECT 1",
        "CREATE TEMPORARY TABLE brief (a int)",
        "CREATE UNLOGGED TABLE unlogged (a int)",
        "CREATE TABLE parted (a int, b int) PARTITION BY RANGE (a)",
        "CREATE TABLE half PARTITION OF parted FOR VALUES FROM (0) TO (9) PARTITION BY RANGE (b)",
        "CREATE TABLE leaf PARTITION OF half FOR VALUES FROM (0) TO (9)",
        "CREATE TABLE child () INHERITS (shop.plain)",
    ):
        connection.execute(statement)
    root = oid_of(connection, "parted", "regclass")

    found = catalog.tables(connection)

    assert [(table.full_name, table.root) for table in found] == [
        ("public.child", None),
        ("public.half", root),
        ("public.leaf", root),
        ("public.parted", None),
        ("shop.plain", None),
    ]


def test_partitions_are_captured_with_their_root(connection: psycopg.Connection) -> None:
    """A partition is chosen by itself only when its partitioned table is not."""
    connection.execute("CREATE TABLE parted (a int) PARTITION BY RANGE (a)")
    connection.execute("CREATE TABLE part_1 PARTITION OF parted FOR VALUES FROM (0) TO (9)")

    def captured(*patterns: str) -> list[str]:
        matcher = TablePatterns(patterns, unqualified="public", system=catalog.SYSTEM_SCHEMAS)
        return [table.name for table in catalog.captured(catalog.tables(connection), matcher)]

    assert captured("public.*") == ["parted"]
    assert captured("part_1") == ["part_1"]


def test_names_with_odd_characters_are_quoted(connection: psycopg.Connection) -> None:
    """Schema and table go into statements as identifiers."""
    connection.execute('CREATE SCHEMA "Odd ""one"')
    connection.execute('CREATE TABLE "Odd ""one"."a.b" (a int)')

    (table,) = catalog.tables(connection)

    assert table.identifier.as_string(connection) == '"Odd ""one"."a.b"'


def test_a_slot_that_lost_its_log_says_so(start_postgres: StartPostgres) -> None:
    """A slot beyond max_slot_wal_keep_size is lost after a checkpoint."""
    server = start_postgres({"max_slot_wal_keep_size": "1MB", "min_wal_size": "32MB"})
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        connection.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
        held = catalog.slot(connection, "s")
        for _ in range(3):
            connection.execute("SELECT pg_switch_wal()")
            connection.execute("CREATE TABLE IF NOT EXISTS t (a int)")
            connection.execute("INSERT INTO t VALUES (1)")
            connection.execute("CHECKPOINT")

        lost = catalog.slot(connection, "s")

    assert held is not None
    assert not held.lost
    assert held.plugin == "pgoutput"
    assert lost is not None
    assert lost.lost


def test_facts_describe_the_server(connection: psycopg.Connection, postgres_dsn: str) -> None:
    """Version, log level and the end of the log, in one query."""
    facts = catalog.facts(connection, PostgresSourceServer.from_dsn(postgres_dsn, "t"))

    assert facts.version == connection.info.server_version
    assert facts.wal_level == "logical"
    assert not facts.standby
    assert facts.flushed_lsn > 0
    assert facts.sender_timeout == 60.0


@pytest.mark.parametrize(
    ("version", "level", "standby", "decodes"),
    [
        (180006, "logical", False, True),
        (180006, "replica", False, False),
        (180006, "logical", True, False),
        (190000, "replica", False, True),
        (190000, "minimal", False, False),
        (200000, "logical", False, True),
    ],
)
def test_where_a_log_can_be_decoded(
    version: int, level: str, *, standby: bool, decodes: bool
) -> None:
    """From PostgreSQL 19 on the first logical slot raises the level, but not from `minimal`."""
    assert catalog.ServerSettings(version, level, standby, 0, 60.0).decodes is decodes
