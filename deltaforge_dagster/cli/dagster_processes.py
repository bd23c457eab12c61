"""Dagster's processes, as `deltaforge dev` and `deltaforge demo` start them.

One code server holds the definitions; webserver and daemon ask it, instead of each loading them
again. All of them write to one `DAGSTER_HOME`, and end with us.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import urllib.request
from pathlib import Path
from typing import Self

import dagster as dg

from deltaforge_dagster.cli.interrupts import interrupt_once
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import SettingsError
from deltaforge_dagster.servers.process import ServerProcess, free_port

_DEFINITIONS = "deltaforge_dagster.definitions"
_START_SECONDS = 240.0
_STOP_SECONDS = 120.0
ANSWER_SECONDS = 300
"""How long Dagster waits for the code server, which answers once a run's process has started. By Dagster's
own 60 seconds a busy machine has runs that "failed to start", though they do."""

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
        """Start all three, logging below `settings.home`; returns once the UI answers.

        Args:
            settings: The installation; passed on through the environment, which must describe it.
            dagster_home: Where Dagster keeps its instance.
            port: Port of the UI; None for any free one.

        Raises:
            SettingsError: The port is taken, or a process does not start; with its last lines.
        """
        port = free_port() if port is None else port
        code_port = free_port()
        workspace = dagster_home / "workspace.deltaforge.yaml"
        workspace.write_text(_WORKSPACE.format(port=code_port))
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a script's `&` leaves it
            # They would inherit that, and ignore SIGTERM, too, since Dagster treats both alike.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        # Also for the runs, which the code server starts.
        os.environ["DAGSTER_HOME"] = str(dagster_home)
        if not os.environ.get("DAGSTER_GRPC_TIMEOUT_SECONDS"):
            os.environ["DAGSTER_GRPC_TIMEOUT_SECONDS"] = str(ANSWER_SECONDS)
        if not os.environ.get("DELTAFORGE_DAGSTER_URL"):
            os.environ["DELTAFORGE_DAGSTER_URL"] = f"http://127.0.0.1:{port}"
        # Processes that make Dagster's SQLite tables at the same time leave them unusable.
        dg.DagsterInstance.from_config(str(dagster_home)).dispose()
        started = cls(f"http://127.0.0.1:{port}")
        try:
            started._run(
                "code server",
                settings.home,
                ["dagster", "code-server", "start", "-m", _DEFINITIONS, "-h", "127.0.0.1"],
                ["-p", str(code_port)],
            )
            started._run(
                "webserver",
                settings.home,
                ["dagster_webserver", "-h", "127.0.0.1", "-p", str(port)],
                ["-w", str(workspace), "--log-level", "warning"],
            )
            started._run(
                "daemon", settings.home, ["dagster._daemon", "run"], ["-w", str(workspace)]
            )
            started._processes[1].wait_until(started._answers, _START_SECONDS)
        except BaseException:
            started.stop()
            raise
        return started

    def check(self) -> None:
        """Raise `SettingsError` when one of the processes has ended by itself."""
        for process in self._processes:
            if not process.running:
                raise SettingsError(f"{process.name} ended: {process.log_tail()}")

    def stop(self) -> None:
        """End the daemon first, so that nothing new starts, then the rest with the live runs."""
        for process in reversed(self._processes):
            process.stop(signal.SIGTERM, _STOP_SECONDS)
        self._processes.clear()

    def _run(self, name: str, home: Path, module: list[str], options: list[str]) -> None:
        folder = home / "logs" / name.replace(" ", "-")
        folder.mkdir(parents=True, exist_ok=True)
        self._processes.append(
            ServerProcess(
                name,
                [sys.executable, "-m", *module, *options],
                directory=folder,
                working_directory=Path.cwd(),  # relative paths in settings and files mean it
                quick_signal=signal.SIGTERM,
            )
        )

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.ui}/server_info", timeout=10):  # noqa: S310 - ours
                return True
        except OSError:  # refused, reset or late: not yet
            return False


def wait_for_interrupt(processes: DagsterProcesses) -> None:
    """Return on Ctrl-C or SIGTERM; raise `SettingsError` when a process ends by itself.

    SIGTERM stays without effect afterwards: repeated, it must not cut the ending short.
    """
    signal.signal(signal.SIGTERM, interrupt_once)
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            processes.check()
            time.sleep(0.5)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
