"""Dagster's processes, as `deltaforge dev` and `deltaforge demo` start them.

One code server holds the definitions; the webserver and the daemon query it instead of each loading
them again. All of them share one `DAGSTER_HOME` and end with this process. They are forks of it, so
most of what they import is in memory only once. The processes that they start in turn are new
Python interpreters: the one that loads the definitions, and the fork server of runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
import urllib.request
from pathlib import Path
from typing import Self

import dagster as dg

from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.dagster_private import DAEMON_MODULES
from deltaforge_dagster.errors import SettingsError
from deltaforge_dagster.installation.forked import ForkedModule, share
from deltaforge_dagster.installation.process import ServerProcess, free_port, interrupt_once
from deltaforge_dagster.installation.run_launcher import DEFINITIONS

_START_SECONDS = 240.0
_STOP_SECONDS = 120.0
_LOG_BYTES = 10 << 20
"""The size at which the log of a process is moved to a second file, which replaces the previous
one."""
ANSWER_SECONDS = 300
"""How long Dagster waits for the code server, which answers once a run's process has started.

With Dagster's default of 60 seconds, a busy machine reports runs as "failed to start" although they
do start.
"""

THREADS = 24
"""How many requests the code server and its proxy answer at a time: more than the daemon's threads
for sensors (`resources.instance`), because starting a run and the UI need some, too. Dagster's
default is four more than processors.
"""

THREAD_VARIABLES = ("DAGSTER_GRPC_MAX_WORKERS", "DAGSTER_CODE_SERVER_MAX_WORKERS")
"""Where the code server and its proxy read `THREADS`."""

_SHARED = (
    *DAEMON_MODULES,
    "dagster_graphql.schema",
    "dagster_webserver.app",
    "deltaforge_dagster.installation.run_launcher",
)
"""Modules that this process imports before it forks, because the processes need them."""

_LOADED_QUERY = """{ workspaceOrError { ... on Workspace { locationEntries {
  locationOrLoadError { __typename ... on PythonError { message } } } } } }"""
"""GraphQL query whether the webserver has loaded the code location, with the error if it failed."""

_UNREACHABLE = "DagsterUserCodeUnreachableError"
"""Part of the answer to `_LOADED_QUERY` while the code server is still starting."""

_WORKSPACE = """\
load_from:
  - grpc_server: {{host: 127.0.0.1, port: {port}, location_name: deltaforge_dagster}}
"""


class DagsterProcesses:
    """A running code server, webserver and daemon.

    Attributes:
        ui: Address of the UI.
    """

    def __init__(self, ui: str) -> None:
        self.ui = ui
        self._processes: list[ServerProcess] = []

    @classmethod
    def start(cls, settings: Settings, dagster_home: Path, *, port: int | None = None) -> Self:
        """Start all three, with logs below `settings.home`; see `wait_until_ready`.

        They are forks, so this process must have no other thread yet.

        Args:
            settings: The installation. The processes read it from the environment, which must
                match.
            dagster_home: Where Dagster keeps its instance.
            port: Port of the UI; None for any free one.

        Raises:
            SettingsError: A process cannot be started.
        """
        port = free_port() if port is None else port
        code_port = free_port(but=port)
        workspace = dagster_home / "workspace.deltaforge.yaml"
        workspace.write_text(_WORKSPACE.format(port=code_port))
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a script's `&` leaves it
            # The processes would inherit this and also ignore SIGTERM, since Dagster treats both
            # alike.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        # The runs, which the code server starts, inherit these as well.
        os.environ["DAGSTER_HOME"] = str(dagster_home)
        for name, usual in {
            "DAGSTER_GRPC_TIMEOUT_SECONDS": str(ANSWER_SECONDS),
            **dict.fromkeys(THREAD_VARIABLES, str(THREADS)),
            "DELTAFORGE_DAGSTER_URL": f"http://127.0.0.1:{port}",
        }.items():
            if not os.environ.get(name):
                os.environ[name] = usual
        # Create Dagster's SQLite tables first: processes that do so concurrently leave them
        # unusable.
        dg.DagsterInstance.from_config(str(dagster_home)).dispose()
        share(_SHARED)
        started = cls(f"http://127.0.0.1:{port}")
        try:
            started._run(
                "code server",
                settings.home,
                ForkedModule(
                    "dagster",
                    [
                        "code-server",
                        "start",
                        "-m",
                        DEFINITIONS,
                        "-h",
                        "127.0.0.1",
                        "-p",
                        str(code_port),
                    ],
                ),
            )
            # A process that connects before it listens logs a stack trace, and retries only later.
            started._processes[0].wait_until(lambda: _listens(code_port), _START_SECONDS)
            started._run(
                "webserver",
                settings.home,
                ForkedModule(
                    "dagster_webserver",
                    [
                        "-h",
                        "127.0.0.1",
                        "-p",
                        str(port),
                        "-w",
                        str(workspace),
                        "--log-level",
                        "warning",
                    ],
                ),
            )
            started._run(
                "daemon",
                settings.home,
                ForkedModule("deltaforge_dagster.installation", ["run", "-w", str(workspace)]),
            )
        except BaseException:
            started.stop()
            raise
        return started

    def wait_until_ready(self) -> None:
        """Return once the UI shows the pipelines.

        Raises:
            SettingsError: The port is taken, or the webserver does not start; the message has its
                last log lines.
        """
        self._processes[1].wait_until(self._answers, _START_SECONDS)

    def check(self) -> None:
        """Raise `SettingsError` if a process has ended by itself; keep their logs within limits."""
        for process in self._processes:
            process.limit_log(_LOG_BYTES)
            if not process.running:
                raise SettingsError(f"{process.name} ended: {process.log_tail()}")

    def stop(self) -> None:
        """Stop the daemon, so that no new run starts, then the other processes and live runs."""
        for process in reversed(self._processes):
            process.stop(signal.SIGTERM, _STOP_SECONDS)
        self._processes.clear()

    def _run(self, name: str, home: Path, module: ForkedModule) -> None:
        folder = home / "logs" / name.replace(" ", "-")
        folder.mkdir(parents=True, exist_ok=True)
        self._processes.append(
            ServerProcess(
                name,
                module,
                directory=folder,
                working_directory=Path.cwd(),  # the base of relative paths in settings and files
                quick_signal=signal.SIGTERM,
            )
        )

    def _answers(self) -> bool:
        """Return whether the webserver has loaded the definitions, with or without an error."""
        request = urllib.request.Request(  # noqa: S310 - ours
            f"{self.ui}/graphql",
            data=json.dumps({"query": _LOADED_QUERY}).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310 - ours
                entries = json.load(answer)["data"]["workspaceOrError"].get("locationEntries", ())
        except OSError:  # refused, reset or late: not yet
            return False
        loaded = [location["locationOrLoadError"] for location in entries]
        return bool(loaded) and all(loaded) and _UNREACHABLE not in str(loaded)


def _listens(port: int) -> bool:
    """Return whether a process listens on a port of this machine."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5):
        return True
    return False


def wait_for_interrupt(processes: DagsterProcesses) -> None:
    """Return on Ctrl-C or SIGTERM; raise `SettingsError` if a process ends by itself.

    SIGTERM is ignored afterwards, so that a second one does not interrupt the shutdown.
    """
    signal.signal(signal.SIGTERM, interrupt_once)
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            processes.check()
            time.sleep(0.5)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
