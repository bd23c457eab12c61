"""Redis for tests: one server per session, emptied before each test that asks for it.

`DELTAFORGE_TEST_REDIS_URI` names a running server to use instead; its database is flushed.
Otherwise an installed redis-server is started, or the one of the extra `lab`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import redis

from deltaforge_lab.servers.redis import RedisServer, installed_version
from tests.started import each_closed, or_fail

URI_VARIABLE = "DELTAFORGE_TEST_REDIS_URI"

StartRedis = Callable[..., RedisServer]


def pytest_report_header() -> str:
    """Say which Redis the tests use."""
    if os.environ.get(URI_VARIABLE):
        return f"redis: the server of {URI_VARIABLE}"
    return f"redis: {installed_version()}"


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """A server with `.uri`; not to be stopped or changed."""
    uri = os.environ.get(URI_VARIABLE)
    with or_fail(lambda: RedisServer.attach(uri) if uri else RedisServer.start()) as server:
        yield server


@pytest.fixture
def redis_client(redis_server: RedisServer) -> Iterator[redis.Redis]:
    """A client of the session's server, whose database is empty."""
    # Its own 5 s are too short for a machine that is busy.
    with redis.Redis.from_url(
        redis_server.uri, decode_responses=True, socket_timeout=None
    ) as client:
        client.flushdb()
        yield client


@pytest.fixture
def start_redis() -> Iterator[StartRedis]:
    """Start a server of the test's own, to stop, pause and configure: `start_redis(settings)`.

    Always a new server, whatever `DELTAFORGE_TEST_REDIS_URI` says.
    """
    with each_closed(RedisServer.start) as start:
        yield start
