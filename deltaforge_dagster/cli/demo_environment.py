"""What the demo runs in: PostgreSQL, Redis, and `deltaforge dev` with Spark and Dagster.

Everything is started here, lives in one directory, listens on free ports of 127.0.0.1, and ends
with the environment: in order when the demo ends, by the guards of `servers.process` when it is
killed.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import SettingsError, StoreUnavailable
from deltaforge_dagster.servers.postgres import PostgresServer
from deltaforge_dagster.servers.process import ServerProcess, free_port
from deltaforge_dagster.servers.redis import RedisServer
from deltaforge_dagster.state.store import StateStore

PIPELINE_FILE = Path(__file__).with_name("demo.yaml").resolve()
PIPELINE = "demo"
STREAMS = "demo.*"
SINKS = ("redis", "files")

_START_SECONDS = 150.0
_STOP_SECONDS = 45.0

Say = Callable[[str], None]


class DemoEnvironment:
    """Servers of the demo. A context manager: leaving it ends everything it started.

    Args:
        home: Directory for state, journal, logs and files.
        say: Told what is being started, one short line each.
    """

    def __init__(self, home: Path, say: Say) -> None:
        self._home = home
        self._say = say
        self._owned = ExitStack()
        self._platform: ServerProcess | None = None
        self.ui = f"http://127.0.0.1:{free_port()}"
        self.files = home / "files"

    def __enter__(self) -> Self:
        try:
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

    def _start_servers(self) -> None:
        """Start PostgreSQL and Redis, from packages if those are installed."""
        self._say("starting PostgreSQL and Redis")
        postgres = self._owned.enter_context(PostgresServer.start(origins=["package", "installed"]))
        redis = self._owned.enter_context(RedisServer.start(origins=["package", "installed"]))
        self._say(f"PostgreSQL {postgres.version}, Redis {redis.version}")
        self.dsn = postgres.create_database("shop")
        self.redis_uri = redis.uri
        self.files.mkdir(parents=True, exist_ok=True)
        self._variables = {
            "DEMO_POSTGRES_DSN": self.dsn,
            "DEMO_REDIS_URI": self.redis_uri,
            "DEMO_FILES": str(self.files),
            "DELTAFORGE_HOME": str(self._home),
            "DELTAFORGE_PIPELINES": str(PIPELINE_FILE),
        }
        self.settings = Settings.from_env(self._variables)

    def start_platform(self) -> None:
        """Start Spark, Dagster's webserver and daemon; return when the pipeline waits for changes.

        Every change committed after this returns is captured.

        Raises:
            SettingsError: They do not start; the message names the log.
        """
        self._say("starting Spark, Dagster's webserver and daemon")
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("DELTAFORGE_", "DAGSTER_"))
        }
        port = self.ui.rpartition(":")[2]
        self._platform = ServerProcess(
            "deltaforge dev",
            [sys.executable, "-m", "deltaforge_dagster.cli.main", "dev", "--port", port],
            directory=self._home,
            environment={**inherited, **self._variables},
            quick_signal=signal.SIGTERM,
        )
        self._owned.callback(self._platform.stop, signal.SIGTERM, _STOP_SECONDS)
        self.store = StateStore.open(self.settings.state_url)
        self._owned.callback(self.store.close)
        self._platform.wait_until(self._pipeline_waits, _START_SECONDS)
        self._say(f"Dagster's UI: {self.ui}")

    def check(self) -> None:
        """Raise `SettingsError` when Spark and Dagster have ended by themselves."""
        if self._platform and not self._platform.running:
            raise SettingsError(f"Dagster has ended; its log is {self._home}/server.log")

    def wait(self) -> None:
        """Wait until Spark and Dagster end, or somebody interrupts."""
        while True:
            self.check()
            time.sleep(1)

    def _pipeline_waits(self) -> bool:
        """Say whether the webserver answers and the sensor has fixed the start position."""
        time.sleep(0.2)
        try:
            urllib.request.urlopen(f"{self.ui}/server_info", timeout=2).close()  # noqa: S310 - ours
            pipeline = self.store.pipeline(PIPELINE)
        except (urllib.error.URLError, OSError, StoreUnavailable):
            return False
        return pipeline is not None and pipeline.start_position is not None
