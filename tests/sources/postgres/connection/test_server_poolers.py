"""Poolers before a real server, and addresses that cannot be reached from here."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from psycopg import conninfo

from deltaforge_dagster.errors import SourceMisconfigured, SourceUnavailable
from deltaforge_dagster.sources.postgres.connection import handshake
from deltaforge_dagster.sources.postgres.connection.server import PostgresSourceServer, pooled
from deltaforge_lab.servers import postgres_service
from deltaforge_lab.servers.pgbouncer import PgBouncer
from deltaforge_lab.servers.postgres import PostgresServer
from deltaforge_lab.servers.postgres_service import PostgresServiceServer
from tests.faulty_proxy import FaultyProxy
from tests.fix_postgres import FAST
from tests.sinks.certificates import certificate
from tests.sources.postgres.messages import refusing

NEON = "ep-quiet-sun-123456-pooler.eu-central-1.aws.neon.tech"


@pytest.mark.parametrize(
    ("host", "port", "user", "direct"),
    [
        (NEON, "5432", "df", "host ep-quiet-sun-123456.eu-central-1.aws.neon.tech"),
        (
            "aws-0-eu-central-1.pooler.supabase.com", "6543", "df.abcdef",
            "host db.abcdef.supabase.co, port 5432 and role df",
        ),
        ("db.abcdef.supabase.co", "6543", "df", "the server's own port instead of 6543, usually 5432"),
        ("shop.proxy-abc.eu-central-1.rds.amazonaws.com", "5432", "df", "the endpoint of the instance"),
        ("shop.postgres.database.azure.com", "6432", "df", "port instead of 6432, usually 5432"),
        ("pool.example.com", "5432", "df", "the host and port of the server itself"),
    ],
)  # fmt: skip
def test_the_direct_address_is_named(host: str, port: str, user: str, direct: str) -> None:
    """As far as the pooler's tells it."""
    assert direct in str(pooled("PostgreSQL there", host, port, user))


@pytest.mark.postgres
@pytest.mark.parametrize(
    ("refused", "sqlstate"),
    [(b"search_path", "08P01"), (b"replication", "08P01"), (b"replication", "0A000")],
)
def test_a_refusal_of_what_a_session_begins_with_is_a_poolers(
    postgres_server: PostgresServer, refused: bytes, sqlstate: str
) -> None:
    """PgBouncer refuses our settings or replication as a violation of the protocol, others say that they lack it."""
    answer = refusing(sqlstate, "unsupported startup parameter")
    dsn = conninfo.make_conninfo(postgres_server.dsn, sslmode="disable")
    with FaultyProxy.answering(
        postgres_server.dsn, lambda data: answer if refused in data else None
    ) as proxy:
        host, port = proxy.address
        behind = conninfo.make_conninfo(dsn, host=host, port=port)
        server = PostgresSourceServer.from_dsn(behind, "deltaforge/test")
        with pytest.raises(SourceMisconfigured, match="a connection pooler answers here"):
            server.identify(5)


@pytest.mark.postgres
@pytest.mark.soak("managed")
@pytest.mark.parametrize("release", ["bookworm", "trixie"])
@pytest.mark.parametrize("ignored", [None, "options", "options,replication"])
def test_a_pooler_is_recognized(tmp_path: Path, release: str, ignored: str | None) -> None:
    """Versions that refuse replication and that pass it on, whether they refuse our settings or lose them."""
    files = certificate(tmp_path)
    settings = {"ignore_startup_parameters": ignored} if ignored else {}
    with PostgresServiceServer.start(
        postgres_service.SUPABASE, *files, FAST, version=17
    ) as service:
        service.execute("CREATE ROLE df LOGIN PASSWORD 'secret' REPLICATION")
        with PgBouncer.start(service.dsn(), {"df": "secret"}, settings, release=release) as pooler:
            server = PostgresSourceServer.from_dsn(pooler.dsn("postgres", "df"), "deltaforge/test")
            with pytest.raises(SourceMisconfigured, match="a connection pooler answers here"):
                server.connect(5)
            if release == "bookworm":  # later versions pass replication on, with its settings
                with pytest.raises(SourceMisconfigured, match="a connection pooler answers here"):
                    server.identify(5)


def test_a_host_with_only_ipv6_addresses_is_named() -> None:
    """Where this machine has no way to it; an address that answers is another matter."""
    far = "2001:db8::1"  # for documentation, so it is nobody's
    no_way = OSError(errno.ENETUNREACH, "no way")

    assert handshake.is_only_ipv6(far, no_way)
    assert handshake.is_only_ipv6(far, TimeoutError())
    assert not handshake.is_only_ipv6("127.0.0.1", no_way)
    assert not handshake.is_only_ipv6(far, ConnectionRefusedError(errno.ECONNREFUSED, "no"))
    server = PostgresSourceServer.from_dsn(f"postgres://df@[{far}]:5432/shop", "deltaforge/test")
    with (
        pytest.raises(SourceUnavailable, match="the host has only IPv6 addresses"),
        server.query(5),
    ):
        pass
