"""Spark for tests: one Connect server for the whole run, whatever the number of its processes.

`DELTAFORGE_TEST_SPARK_REMOTE` names a running server to use instead (`sc://...`, on a filesystem
that it shares with the tests, with the jars and extensions of `deltaforge lake install`). Otherwise our own server is
started, with an installed Java or the one of the extra `lab`; the jars come from Maven Central.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from deltaforge_dagster.errors import DeltaforgeError

if TYPE_CHECKING:
    from pyspark.sql.connect.session import SparkSession

REMOTE_VARIABLE = "DELTAFORGE_TEST_SPARK_REMOTE"


_IDLE_SECONDS = 20.0
"""How long the server outlives the last process of the tests."""


_POSTGRES_DRIVER = (
    "org.postgresql:postgresql:42.7.8",
    "2a32a9dcbc42d67a50ad3a0de5efd102c8d2be46720045f2cbd6689f160ab7c7",
)
"""For catalogs of Iceberg that are in a database: coordinates and checksum."""


@dataclass(frozen=True, slots=True)
class SparkAddress:
    """Where the Spark server of the tests is.

    Attributes:
        remote: Its Connect URL.
        folder: The folder of our own server below an installation's home; None for another server.
    """

    remote: str
    folder: Path | None

    def settings(self, home: Path) -> dict[str, str]:
        """Let the installation in `home` use the server; return the variables that it needs for that.

        Our own server becomes the installation's own, by a link to its folder. A server that is
        named by a variable counts as somebody else's: each run would first try out whether its
        workers can write to the journal, for which they import everything.
        """
        if self.folder is None:
            return {"DELTAFORGE_SPARK_REMOTE": self.remote}
        home.mkdir(parents=True, exist_ok=True)
        link = home / "spark"
        if not link.is_symlink():
            link.symlink_to(self.folder)
        return {}

    def use(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Do the same for an installation that takes its settings from the environment."""
        for name, value in self.settings(home).items():
            monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def spark_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkAddress]:
    """A Connect server with `.remote`; not to be stopped."""
    given = os.environ.get(REMOTE_VARIABLE)
    if given:
        yield SparkAddress(given, None)
        return
    from deltaforge_dagster.installation.lake_jars import LAKE_JARS  # noqa: PLC0415 - only here
    from deltaforge_dagster.installation.maven import Artifact  # noqa: PLC0415 - only here
    from deltaforge_dagster.installation.spark_server import SparkServer  # noqa: PLC0415 - only here
    from deltaforge_lab.servers.maven import fetch  # noqa: PLC0415 - only here

    own = tmp_path_factory.getbasetemp()
    home = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "installation"
    try:
        # The jars cost 0.1 s of processor time and 10 MB, so all tests share one server with them.
        jars = fetch([*LAKE_JARS, Artifact(*_POSTGRES_DRIVER)])
        server = SparkServer.ensure(home, jars=jars, idle_seconds=_IDLE_SECONDS)
    except DeltaforgeError as error:
        pytest.fail(str(error), pytrace=False)
    yield SparkAddress(server.remote, home / "spark")
    says = (home / "spark" / "server.log").read_text(errors="replace")
    server.release()  # it ends when every process of the tests has done that
    assert "CodeCache is full" not in says, "Spark's server ran out of room for machine code"


def connected(remote: str) -> SparkSession:
    """Return a new session on the server at `remote`, as the product's are: without retries and reattaching.

    A session that may reattach shares a thread pool with all others of its process, and shuts it
    down when it is collected. Where that happens amid a submission to the pool, it waits for the
    lock that its own thread holds.
    """
    from pyspark.sql.connect.session import SparkSession  # noqa: PLC0415 - slow to import

    session = SparkSession.builder.remote(remote).create()
    session.client.set_retry_policies([])  # they last ten minutes when the server is gone
    session.client.disable_reattachable_execute()
    return session


def unix_sockets(session: SparkSession) -> bool:
    """Return whether the Python workers of a session get their tasks over Unix domain sockets; runs a task."""
    import pyarrow as pa  # noqa: PLC0415 - slow to import

    def told(_: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        enabled = os.environ.get("PYTHON_UNIX_DOMAIN_ENABLED", "false")
        yield pa.record_batch([pa.array([enabled.lower() == "true"])], ["enabled"])

    (row,) = session.range(0, 1, 1, 1).mapInArrow(told, "enabled boolean").collect()
    return bool(row["enabled"])


@pytest.fixture(scope="session")
def spark(spark_server: SparkAddress) -> Iterator[SparkSession]:
    """A session on the server."""
    session = connected(spark_server.remote)
    yield session
    session.stop()
