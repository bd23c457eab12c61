"""Spark for tests: one Connect server and one session for the whole run.

`DELTAFORGE_TEST_SPARK_REMOTE` names a running server to use instead (`sc://...`, on a filesystem
that it shares with the tests). Otherwise our own server is started, with an installed Java or the
one of the extra `servers`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from deltaforge_dagster.errors import DeltaforgeError

if TYPE_CHECKING:
    from pyspark.sql.connect.session import SparkSession

    from deltaforge_dagster.resources.spark_server import SparkServer

REMOTE_VARIABLE = "DELTAFORGE_TEST_SPARK_REMOTE"


@pytest.fixture(scope="session")
def spark_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkServer]:
    """A Connect server with `.remote`; not to be stopped."""
    from deltaforge_dagster.resources.spark_server import SparkServer  # noqa: PLC0415

    remote = os.environ.get(REMOTE_VARIABLE)
    try:
        server = (
            SparkServer.attach(remote)
            if remote
            else SparkServer.start(tmp_path_factory.mktemp("spark"))
        )
    except DeltaforgeError as error:
        pytest.fail(str(error), pytrace=False)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def spark(spark_server: SparkServer) -> Iterator[SparkSession]:
    """A session on the server."""
    from pyspark.sql.connect.session import SparkSession  # noqa: PLC0415

    session = SparkSession.builder.remote(spark_server.remote).create()
    yield session
    session.stop()
