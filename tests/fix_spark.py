"""Spark for tests: one Connect server and one session for the whole run.

`DELTAFORGE_TEST_SPARK_REMOTE` names a running server to use instead (`sc://...`, on a filesystem
that it shares with the tests). Otherwise our own server is started, with an installed Java or the
one of the extra `servers`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from deltaforge_dagster.errors import DeltaforgeError

if TYPE_CHECKING:
    from pyspark.sql.connect.session import SparkSession

REMOTE_VARIABLE = "DELTAFORGE_TEST_SPARK_REMOTE"


@dataclass(frozen=True, slots=True)
class SparkAddress:
    """Where the session's Spark server is."""

    remote: str


@pytest.fixture(scope="session")
def spark_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkAddress]:
    """A Connect server with `.remote`; not to be stopped."""
    given = os.environ.get(REMOTE_VARIABLE)
    if given:
        yield SparkAddress(given)
        return
    from deltaforge_dagster.resources.spark_server import SparkServer  # noqa: PLC0415 - only here

    try:
        server = SparkServer.ensure(tmp_path_factory.mktemp("spark"))
    except DeltaforgeError as error:
        pytest.fail(str(error), pytrace=False)
    yield SparkAddress(server.remote)
    server.stop()


def connected(remote: str) -> SparkSession:
    """Return a new session on the server at `remote`, as the product's are: without reattaching.

    A session that may reattach shares a thread pool with all others of its process, and shuts it
    down when it is collected. Where that happens amid a submission to the pool, it waits for the
    lock that its own thread holds.
    """
    from pyspark.sql.connect.session import SparkSession  # noqa: PLC0415 - slow to import

    session = SparkSession.builder.remote(remote).create()
    session.client.disable_reattachable_execute()
    return session


@pytest.fixture(scope="session")
def spark(spark_server: SparkAddress) -> Iterator[SparkSession]:
    """A session on the server."""
    session = connected(spark_server.remote)
    yield session
    session.stop()
