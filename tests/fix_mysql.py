"""MySQL for tests: one server per session, databases of their own for each test.

`DELTAFORGE_TEST_MYSQL_DSN` names a running server to use instead (a user with every privilege; it
needs binary logging of rows and GTIDs). Otherwise the one from Maven Central is started, or an
installed one where that does not run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping

import pytest

from deltaforge_dagster.servers.mysql import MysqlServer, installed_version
from tests.started import each_closed, or_fail

DSN_VARIABLE = "DELTAFORGE_TEST_MYSQL_DSN"
FAST = {
    "sync_binlog": "0",
    "innodb_flush_log_at_trx_commit": "0",
    "innodb_doublewrite": "OFF",
    "innodb_flush_method": "nosync",
}
"""Settings of servers whose data nobody keeps."""

StartMysql = Callable[..., MysqlServer]


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


@pytest.fixture
def mysql_dsn(mysql_server: MysqlServer) -> str:
    """DSN of an empty database, root's."""
    return mysql_server.create_database()


@pytest.fixture
def start_mysql() -> Iterator[StartMysql]:
    """Start a server of the test's own, to stop, restart and configure: `start_mysql(settings)`.

    Always a new server, whatever `DELTAFORGE_TEST_MYSQL_DSN` says.
    """

    def start(settings: Mapping[str, str] | None) -> MysqlServer:
        return MysqlServer.start(settings={**FAST, **(settings or {})})

    with each_closed(start) as lent:
        yield lent
