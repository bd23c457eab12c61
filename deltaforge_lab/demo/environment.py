"""The servers that the demo runs on: a database, Redis, Spark and Dagster's processes.

This module starts all of them. They keep their files in one directory, listen on free ports of
127.0.0.1, and end with the environment: in order when the demo ends, through the guards of
`installation.process` when it is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from deltaforge_dagster.cli.installation.dagster_processes import DagsterProcesses
from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import DeltaforgeError, SettingsError
from deltaforge_dagster.installation.process import ServerProcess
from deltaforge_dagster.installation.spark_server import SparkServer
from deltaforge_dagster.resources.instance import dagster_home
from deltaforge_dagster.state.store import StateStore
from deltaforge_lab.demo.databases import PostgresDatabase, SqliteDatabase
from deltaforge_lab.demo.workload import DemoDatabase
from deltaforge_lab.servers.postgres import PostgresServer
from deltaforge_lab.servers.redis import RedisServer

STREAMS = "demo.*"

_TICK_SECONDS = 300.0

Say = Callable[[str], None]

DemoSource = Literal["postgres", "turso"]

_DATABASES: Mapping[DemoSource, type[PostgresDatabase | SqliteDatabase]] = {
    "postgres": PostgresDatabase,
    "turso": SqliteDatabase,
}

_BEFORE_SERVERS = {
    "DEMO_DATABASE": "shop.db",
    "DEMO_FILES": "files",
    "DEMO_POSTGRES_DSN": "postgres://localhost/shop",
    "DEMO_REDIS_URI": "redis://localhost",
}
"""Placeholders for the variables of the pipeline files, before the servers have started."""

_COMPILE = """
import sys
from pathlib import Path
from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.pipeline.run.kernels import kernels_of, make_ready
for name in kernels_of(load_pipeline(Path(sys.argv[1])).spec):
    if name.startswith("source ") == (sys.argv[2] == "log"):
        make_ready(name)
"""
_KERNELS = {"log": "the database's log", "others": "messages"}
"""Parts of the kernels that the demo's runs need, which are compiled at the same time."""


class DemoEnvironment:
    """The servers of the demo. A context manager: leaving it stops everything it started.

    Args:
        home: Directory for state, journal, logs and files.
        say: Called with one short line for each step.
        source: The source that the demo's pipeline reads.
    """

    def __init__(self, home: Path, say: Say, source: DemoSource = "postgres") -> None:
        self._home = home
        self._source = source
        self._say = say
        self._owned = ExitStack()
        self._dagster: DagsterProcesses | None = None
        self._began = time.monotonic()
        self._file = Path(__file__).with_name(f"{_DATABASES[source].pipeline}.yaml")
        self.files = home / "files"

    def __enter__(self) -> Self:
        try:
            self._check_file()
            self._start_servers()
        except BaseException:
            self._owned.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._say("ending everything")
        self._owned.close()

    def _check_file(self) -> None:
        """Load the pipeline's file, before anything starts that would wait for it.

        Raises:
            SpecError: It cannot be loaded; the message says why.
        """
        os.environ.update(_BEFORE_SERVERS)
        load_pipeline(self._file)

    def _start_servers(self) -> None:
        """Start Redis, and PostgreSQL if it is the source, from Python packages if installed."""
        self.database = self._start_database()
        self._say("starting Redis")
        redis = self._owned.enter_context(RedisServer.start(origins=["package", "installed"]))
        self._say(f"Redis {redis.version}")
        self.redis_uri = redis.uri
        self.files.mkdir(parents=True, exist_ok=True)
        for name in [name for name in os.environ if name.startswith(("DELTAFORGE_", "DAGSTER_"))]:
            del os.environ[name]  # the demo is a separate installation
        os.environ.update(
            {
                **self.database.environment,
                "DEMO_REDIS_URI": self.redis_uri,
                "DEMO_FILES": str(self.files),
                "DELTAFORGE_HOME": str(self._home),
                "DELTAFORGE_PIPELINES": str(self._file),
            }
        )

    def _start_database(self) -> DemoDatabase:
        if self._source == "turso":
            return SqliteDatabase(self._home / "shop.db")
        self._say("starting PostgreSQL")
        postgres = self._owned.enter_context(PostgresServer.start(origins=["package", "installed"]))
        self._say(f"PostgreSQL {postgres.version}")
        return PostgresDatabase(postgres.create_database("shop"))

    def start_platform(self) -> None:
        """Start Spark and Dagster's processes; return when the pipeline waits for changes.

        Every change committed after this returns is captured.

        Raises:
            SettingsError: Dagster does not start, or its sensor does not tick in time; the message
                names the logs.
            SparkUnavailable: Spark does not start.
        """
        self._say("starting Spark, Dagster's code server, webserver and daemon; compiling kernels")
        self._began = time.monotonic()
        settings = Settings.from_env()
        self._dagster = DagsterProcesses.start(settings, dagster_home(settings))
        self._owned.callback(self._dagster.stop)
        threads = self._owned.enter_context(ThreadPoolExecutor(1 + len(_KERNELS)))
        spark = threads.submit(self._start_spark)
        self._owned.callback(_stop_spark, spark)
        compiled = [
            threads.submit(self._report_kernels, what, self._compile_kernels(part))
            for part, what in _KERNELS.items()
        ]
        self._dagster.wait_until_ready()
        self._report(f"Dagster's UI is open: {self.ui}")
        wait(compiled)
        spark.result()
        self.store = StateStore.open(settings.state_url)
        self._owned.callback(self.store.close)
        deadline = time.monotonic() + _TICK_SECONDS
        while not self._pipeline_waits():
            self.check()
            if time.monotonic() > deadline:
                raise SettingsError(f"the sensor has not ticked in time (logs: {self._home}/logs)")
            time.sleep(0.2)
        self._report("the sensor has found where the pipeline begins")

    @property
    def ui(self) -> str:
        """Address of Dagster's UI."""
        assert self._dagster
        return self._dagster.ui

    def check(self) -> None:
        """Raise `SettingsError` if a process of Dagster has ended by itself."""
        if self._dagster:
            self._dagster.check()

    def wait(self) -> None:
        """Wait until Dagster ends or the user interrupts."""
        while True:
            self.check()
            time.sleep(1)

    def _report(self, what: str) -> None:
        self._say(f"{what} ({time.monotonic() - self._began:.0f} s)")

    def _start_spark(self) -> SparkServer:
        server = SparkServer.ensure(self._home)
        self._report("Spark runs")
        return server

    def _compile_kernels(self, part: str) -> ServerProcess:
        """Compile a part of the kernels in a process, in parallel with the other starts.

        A run uses the result, or compiles again if it is not there.
        """
        folder = self._home / "logs" / "kernels"
        folder.mkdir(parents=True, exist_ok=True)
        process = ServerProcess(
            "kernels", [sys.executable, "-c", _COMPILE, str(self._file), part], directory=folder
        )
        self._owned.callback(process.stop, signal.SIGTERM, 5)
        return process

    def _report_kernels(self, what: str, process: ServerProcess) -> None:
        while process.running:
            time.sleep(0.1)
        if process.exit_code == 0:
            self._report(f"the kernels for {what} are compiled")
        else:
            self._report(
                f"the kernels for {what} could not be compiled now, so the first run compiles them:"
                f" {process.log_tail()}"
            )

    def _pipeline_waits(self) -> bool:
        """Return whether the sensor has fixed the start position."""
        pipeline = self.store.pipelines.get(self.database.pipeline)
        return pipeline is not None and pipeline.start_position is not None


def _stop_spark(starting: Future[SparkServer]) -> None:
    with contextlib.suppress(DeltaforgeError):  # reported where it was waited for
        starting.result().stop()
