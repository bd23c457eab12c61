"""PostgreSQL for tests: one server per session and version, databases of their own for each test.

Most tests use one version, that of `postgres_server`: 15 or 16 mostly. What differs between versions is tried on the
oldest and the newest as well, and on all of them behind the mark `soak`:
`@pytest.mark.parametrize("version", POSTGRES_VERSIONS)` and the fixture `postgres_version`.

`DELTAFORGE_TEST_POSTGRES_DSN` names a running server to use instead (a superuser's DSN; it needs
`wal_level=logical`). Otherwise an installed PostgreSQL is started, or the one of the extra
`lab`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack

import pytest

from deltaforge_lab.servers.postgres import PostgresServer, installed_version
from tests.started import each_closed, or_fail

DSN_VARIABLE = "DELTAFORGE_TEST_POSTGRES_DSN"
FAST = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
"""Settings of servers whose data nobody keeps."""

POSTGRES_VERSIONS = [
    12,
    *(pytest.param(version, marks=pytest.mark.soak("versions")) for version in range(13, 18)),
    18,
]
"""Every major version that is supported, for `pytest.mark.parametrize`."""

StartPostgres = Callable[..., PostgresServer]
PostgresVersion = Callable[[int], PostgresServer]


def pytest_report_header() -> str:
    """Say which PostgreSQL the tests use."""
    if os.environ.get(DSN_VARIABLE):
        return f"postgres: the server of {DSN_VARIABLE}"
    return f"postgres: {installed_version()}"


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A server with `.dsn` (superuser) and `.create_database()`; not to be stopped or changed."""
    dsn = os.environ.get(DSN_VARIABLE)
    with or_fail(
        lambda: PostgresServer.attach(dsn) if dsn else PostgresServer.start(settings=FAST)
    ) as server:
        yield server


@pytest.fixture(scope="session")
def postgres_version() -> Iterator[PostgresVersion]:
    """Servers by major version, started when first asked for; not to be stopped or changed."""
    with ExitStack() as stack:

        @functools.cache
        def server(version: int) -> PostgresServer:
            started = or_fail(lambda: PostgresServer.start(settings=FAST, version=version))
            return stack.enter_context(started)

        yield server


@pytest.fixture
def postgres_dsn(postgres_server: PostgresServer) -> str:
    """DSN of an empty database, its superuser's."""
    return postgres_server.create_database()


@pytest.fixture
def start_postgres() -> Iterator[StartPostgres]:
    """Start a server of the test's own, to stop, restart and configure: `start_postgres(settings)`.

    Always a new server, whatever `DELTAFORGE_TEST_POSTGRES_DSN` says; `version=12` for another one.
    """

    def start(settings: Mapping[str, str] | None, version: int | None = None) -> PostgresServer:
        return PostgresServer.start(settings={**FAST, **(settings or {})}, version=version)

    with each_closed(start) as lent:
        yield lent
