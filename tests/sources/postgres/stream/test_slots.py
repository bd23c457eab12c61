"""Where the server restarts decoding, on a server that can be asked to note it (16 and later)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from psycopg import conninfo

from deltaforge_dagster.sources.base import ReadLimits
from deltaforge_dagster.sources.findings import Finding
from deltaforge_dagster.sources.postgres.position import parse_lsn
from deltaforge_dagster.sources.postgres.source import PostgresSource
from deltaforge_dagster.testing.sources import Versions, insert
from deltaforge_lab.servers.postgres import PostgresServer
from tests.e2e.deployment import eventually
from tests.sources.postgres.bench import PostgresBench
from tests.sources.postgres.connection.test_server import (  # noqa: F401
    PASSWORD,
    role,
)

pytestmark = pytest.mark.postgres


@pytest.fixture
def postgres_dsn(postgres_version: Callable[[int], PostgresServer]) -> str:
    """DSN of an empty database, its superuser's."""
    return postgres_version(18).create_database()


@pytest.fixture
def bench(postgres_dsn: str, role: str) -> Iterator[PostgresBench]:  # noqa: F811
    """A database whose slot and publication exist, and a role that may read them."""
    with PostgresBench(postgres_dsn) as made:
        made.source().ensure_start()
        made.execute(f'ALTER ROLE "{role}" REPLICATION')
        yield made


def restart(bench: PostgresBench) -> int:
    """Return from where the server decodes when the slot is read."""
    query = "SELECT restart_lsn::text FROM pg_replication_slots WHERE slot_name = %s"
    return parse_lsn(bench.value(query, bench.slot))


def notes(source: PostgresSource) -> list[Finding]:
    """Return what `check` notes about the slot."""
    found = source.preflight(None, None)
    return [one for one in found if (one.subject, one.level) == ("slot", "note")]


def read_one(bench: PostgresBench, source: PostgresSource) -> None:
    """Read and confirm a row that is committed after the stream has begun."""
    with closing(source):
        stream = source.read(bench.confirmed(), ReadLimits(), Versions())
        next(stream)
        bench.execute("TRUNCATE orders", insert("orders", 1))
        for batch in stream:
            if batch.rows is not None and batch.end is not None:
                source.confirm(batch.end)
                break
        eventually(lambda: bench.confirmed() == batch.end)


def test_a_reader_lets_the_next_one_restart_behind_what_it_got(bench: PostgresBench) -> None:
    """Behind everything that was in the log when it began."""
    bench.execute("INSERT INTO other SELECT generate_series(1, 1000)")
    begun = parse_lsn(bench.value("SELECT pg_current_wal_insert_lsn()::text"))
    assert restart(bench) < begun

    read_one(bench, bench.source())

    assert restart(bench) >= begun
    assert notes(bench.source()) == []


def test_a_role_without_the_right_reads_as_well(bench: PostgresBench, role: str) -> None:  # noqa: F811
    """It is told the statement that makes runs begin sooner, and then it need not be told again."""
    dsn = conninfo.make_conninfo(bench.dsn, user=role, password=PASSWORD)

    read_one(bench, bench.source(dsn=dsn))

    (note,) = notes(bench.source(dsn=dsn))
    bench.execute(str(note.remedy))
    assert notes(bench.source(dsn=dsn)) == []
    begun = parse_lsn(bench.value("SELECT pg_current_wal_insert_lsn()::text"))
    read_one(bench, bench.source(dsn=dsn))
    assert restart(bench) >= begun
