"""Starts runs by forking a process that has imported what they need; configured in `dagster.yaml`.

Dagster's own launcher has the code server start a new Python for each run, which takes two seconds of processor time
until the run holds its lease: most of what a change waits for when no run is there. Here the process that launches, which
is Dagster's daemon, starts one *fork server* (`multiprocessing`'s own): with its first run, or when it begins (`begin`).
It imports `run_process` and loads `run_kernels`, and each run is a fork of it, so runs also share the memory of what
was imported.

::

    daemon ── launch_run ──> fork server ── fork ──> run's process ── `dagster api execute_run`
      │                                                 │
      └── a thread waits for its end <──────────────────┘
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import dagster as dg
from dagster._core.launcher import DefaultRunLauncher, LaunchRunContext
from dagster._core.origin import JobPythonOrigin
from dagster._grpc.types import ExecuteRunArgs
from dagster._serdes import serialize_value
from dagster._utils import get_run_crash_explanation

from deltaforge_dagster.processes.forked import start_fork_server

_FORK_SERVER = multiprocessing.get_context("forkserver")

DEFINITIONS = "deltaforge_dagster.definitions"
"""The module of our definitions."""
_IMPORTED = [
    __name__,
    "deltaforge_dagster.launcher.run_process",
    "deltaforge_dagster.launcher.run_kernels",
]
"""What the fork server imports before it forks."""

_LOOK_SECONDS = 1.0
_END_SECONDS = 10.0
"""How often it is looked whether a run's process has ended, once there is nobody who tells."""

PROCESS_TAG = "deltaforge/process"
"""Of a run that was forked: number and start time of its process."""


class ForkedRunLauncher(DefaultRunLauncher):
    """Forks the processes of our runs; runs of other people's definitions are started by their code server.

    Ours are those of pipelines' jobs, and all others of our definitions, such as a *Materialize* and the retention.
    The run's process has the environment of the process that launches it, which must be on the machine of the code
    server, with the same Python. It ends with the process that launches it: if that ends in order, it asks the run to end
    and waits for it; if it is killed, the run goes on.
    """

    def launch_run(self, context: LaunchRunContext) -> None:
        """Start a run; return when its process has started."""
        run = context.dagster_run
        origin = context.job_code_origin
        if (
            origin is None
            or not _is_ours(run, origin)
            or origin.repository_origin.executable_path != sys.executable
        ):
            super().launch_run(context)
            return
        arguments = ExecuteRunArgs(
            job_origin=origin, run_id=run.run_id, instance_ref=self._instance.get_ref()
        )
        process = _FORK_SERVER.Process(
            target=_execute, args=(serialize_value(arguments),), name=run.run_id, daemon=True
        )
        _start(process)
        assert process.pid is not None
        tag = f"{process.pid} {_started(process.pid)}"
        self._instance.add_run_tags(run.run_id, {PROCESS_TAG: tag})
        self._run_ids.add(run.run_id)
        threading.Thread(
            target=self._await_end, args=(process, run.run_id), name="run's end", daemon=True
        ).start()

    def terminate(self, run_id: str) -> bool:
        """Interrupt a run's process, as its code server would; return whether there was one."""
        run = self._instance.get_run_by_id(run_id)
        if run is None or PROCESS_TAG not in run.tags:
            return bool(super().terminate(run_id))  # type: ignore[no-untyped-call]
        if run.is_finished:
            return False
        self._instance.report_run_canceling(run)
        if not _is_alive(run):
            return False
        os.kill(_process_of(run)[0], signal.SIGINT)
        return True

    def _await_end(self, process: ForkServerProcess, run_id: str) -> None:
        """Report a run as failed whose process has ended and did not say how."""
        process.join()
        run = self._instance.get_run_by_id(run_id)
        # The end of the fork server, which says how its forks end, looks like that of all its forks.
        while run is not None and not run.is_finished and _is_alive(run):
            time.sleep(_LOOK_SECONDS)
            run = self._instance.get_run_by_id(run_id)
        if run is None or run.is_finished:
            return
        code = process.exitcode or 0
        message = get_run_crash_explanation(f"Run execution process for {run_id}", code)
        self._instance.report_engine_event(message, run, cls=type(self))
        self._instance.report_run_failed(run, message)


def begin() -> None:
    """Start the process that runs are forked from, unless it is running."""
    start_fork_server(_IMPORTED)


def _start(process: ForkServerProcess) -> None:
    """Start a run's process.

    A fork server that was killed a moment ago refuses connections, or accepts one and answers nothing, but is taken for
    alive until its parent can collect its end. So it is tried again. Should it have forked a process all the same, a run
    has one lease.
    """
    deadline = time.monotonic() + _END_SECONDS
    while True:
        begin()
        try:
            process.start()
        except (ConnectionRefusedError, EOFError):
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.05)
        else:
            return


def _is_ours(run: dg.DagsterRun, origin: JobPythonOrigin) -> bool:
    """Return whether a run is one of a pipeline's jobs, or of our definitions."""
    # Every process of Dagster has this module; only the daemon launches.
    from deltaforge_dagster.assets.names import PIPELINE_TAG  # noqa: PLC0415

    pointer = origin.repository_origin.code_pointer
    return PIPELINE_TAG in run.tags or getattr(pointer, "module", None) == DEFINITIONS


def _execute(arguments: str) -> None:
    """Execute a run; called in its process."""
    from deltaforge_dagster.launcher.run_process import execute  # noqa: PLC0415 - see `_IMPORTED`

    execute(arguments)


def _process_of(run: dg.DagsterRun) -> tuple[int, str]:
    """Return number and start time of the process that was forked for a run."""
    pid, _, started = run.tags[PROCESS_TAG].partition(" ")
    return int(pid), started


def _is_alive(run: dg.DagsterRun) -> bool:
    """Return whether the process that was forked for a run has not ended."""
    pid, started = _process_of(run)
    return bool(started) and _started(pid) == started


def _started(pid: int) -> str:
    """Return the start time of a process, which tells it from a later one with its number; "" if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    state, started = stat[0], stat[19]
    return "" if state == "Z" else started
