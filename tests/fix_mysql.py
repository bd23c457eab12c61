"""MySQL for tests: one server per session and version, databases of their own for each test.

Most tests use one version, that of `mysql_server`: 8.0. What differs between versions is tried on
others as well: `@pytest.mark.parametrize("version", MYSQL_VERSIONS)` and the fixture `mysql_version`.

`DELTAFORGE_TEST_MYSQL_DSN` names a running server to use instead (a user with every privilege; it
needs binary logging of rows and GTIDs). Otherwise the one from Maven Central is started, or an
installed one where that does not run.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack

import pytest

from deltaforge_lab.servers.mysql import MysqlServer, installed_version
from deltaforge_lab.servers.mysql_programs import Version
from tests.started import each_closed, or_fail

DSN_VARIABLE = "DELTAFORGE_TEST_MYSQL_DSN"
FAST = {
    "sync_binlog": "0",
    "innodb_flush_log_at_trx_commit": "0",
    "innodb_doublewrite": "OFF",
    "innodb_flush_method": "nosync",
}
"""Settings of servers whose data nobody keeps."""

MYSQL_VERSIONS = ["5.7", "8.0", pytest.param("9.7", marks=pytest.mark.soak("versions"))]
"""Every MySQL that is tried, for `pytest.mark.parametrize`; the newest is not pinned."""

EVERY_SERVER = [
    "8.0",
    "mariadb",
    *(
        pytest.param(version, marks=pytest.mark.soak("versions"))
        for version in ("5.7", "9.7", "mariadb 10.5", "mariadb 10.11", "mariadb 11.8")
    ),
]
"""Every MySQL and MariaDB, of which a pinned one of each is tried always, for `pytest.mark.parametrize`."""

StartMysql = Callable[..., MysqlServer]
MysqlVersion = Callable[[Version], MysqlServer]


def pytest_report_header() -> str:
    """Say which MySQL the tests use."""
    if os.environ.get(DSN_VARIABLE):
        return f"mysql: the server of {DSN_VARIABLE}"
    return f"mysql: {installed_version()}"


@pytest.fixture(scope="session")
def mysql_server() -> Iterator[MysqlServer]:
    """A server with `.dsn` (root's) and `.create_database()`; not to be stopped or changed."""
    dsn = os.environ.get(DSN_VARIABLE)
    with or_fail(
        lambda: MysqlServer.attach(dsn) if dsn else MysqlServer.start(settings=FAST)
    ) as server:
        yield server


@pytest.fixture(scope="session")
def mysql_version() -> Iterator[MysqlVersion]:
    """Servers by version, started when first asked for; not to be stopped or changed.

    `mariadb` is one of them.
    """
    with ExitStack() as stack:

        @functools.cache
        def server(version: Version) -> MysqlServer:
            started = or_fail(lambda: MysqlServer.start(settings=FAST, version=version))
            return stack.enter_context(started)

        yield server


@pytest.fixture
def mysql_dsn(mysql_server: MysqlServer) -> str:
    """DSN of an empty database, root's."""
    return mysql_server.create_database()


@pytest.fixture
def start_mysql() -> Iterator[StartMysql]:
    """Start a server of the test's own, to stop, restart and configure: `start_mysql(settings)`.

    Always a new server, whatever `DELTAFORGE_TEST_MYSQL_DSN` says; `version="5.7"` for another one.
    """

    def start(settings: Mapping[str, str] | None, version: Version | None = None) -> MysqlServer:
        return MysqlServer.start(settings={**FAST, **(settings or {})}, version=version)

    with each_closed(start) as lent:
        yield lent
