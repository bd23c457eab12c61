"""ClickHouse for tests: one server per session with the engine of the package `chdb`, on which every test has its own database."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from deltaforge_lab.servers.clickhouse import HOW_TO_GET, ClickhouseServer, available
from tests.started import or_fail

_NUMBERS = itertools.count()


def pytest_report_header() -> str:
    """Say whether there is an engine."""
    return f"clickhouse: {'the package chdb' if available() else HOW_TO_GET}"


@pytest.fixture(scope="session")
def clickhouse_server() -> Iterator[ClickhouseServer]:
    """A server with `.url`, `.user` and `.password`; not to be stopped or changed."""
    with or_fail(ClickhouseServer.start) as server:
        yield server
        server.stop()  # in order, so that `make coverage` sees what it has executed


@pytest.fixture
def clickhouse_database(clickhouse_server: ClickhouseServer) -> Iterator[str]:
    """The name of an empty database of the session's server."""
    name = f"test_{next(_NUMBERS)}"
    clickhouse_server.query(f"CREATE DATABASE {name}")
    yield name
    clickhouse_server.query(f"DROP DATABASE {name}")
