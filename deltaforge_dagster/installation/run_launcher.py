"""Start runs by forking a process that has imported what they need; configured in `dagster.yaml`.

Dagster's own launcher has the code server start a new Python for each run. That takes two seconds
of processor time until the run holds its lease, which is most of a change's latency while no run is
live. Here the launching process, Dagster's daemon, starts one *fork server* (that of
`multiprocessing`), either with its first run or at its own start (`begin`). The fork server imports
`run_process`. Each run is a fork of it, so runs also share the memory of
everything that was imported.

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

from deltaforge_dagster.dagster_private import (
    JobPythonOrigin,
    LaunchRunContext,
    execute_run,
    get_run_crash_explanation,
    run_arguments,
)
from deltaforge_dagster.installation.forked import start_fork_server

_FORK_SERVER = multiprocessing.get_context("forkserver")

DEFINITIONS = "deltaforge_dagster.definitions"
"""The module of our definitions."""
_IMPORTED = [
    __name__,
    "deltaforge_dagster.installation.run_process",
]
"""What the fork server imports before it forks."""

_LOOK_SECONDS = 1.0
"""How often the launcher checks whether a run's process has ended, once the fork server is gone."""
_END_SECONDS = 10.0
"""How long the launcher retries to start a run's process after the fork server was killed."""

PIPELINE_TAG = "deltaforge/pipeline"
"""Tag of the runs of a pipeline's jobs, with the pipeline's name."""
PROCESS_TAG = "deltaforge/process"
"""Tag of a forked run: the pid and the start time of its process."""


class ForkedRunLauncher(dg.DefaultRunLauncher):
    """Forks the processes of our runs; the code server starts runs of other people's definitions.

    Our runs are those of pipelines' jobs, and all others of our definitions, such as a
    *Materialize* and the retention. A run's process has the environment of the launching process,
    which must be on the machine of the code server, with the same Python. When the launching
    process exits normally, it asks the run to end and waits for it; if it is killed, the run
    continues.
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
        arguments = run_arguments(origin, run.run_id, self._instance.get_ref())
        process = _FORK_SERVER.Process(
            target=_execute, args=(arguments,), name=run.run_id, daemon=True
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
        """Report a run as failed if its process has ended without reporting an outcome."""
        process.join()
        run = self._instance.get_run_by_id(run_id)
        # The fork server reports the end of its forks, so its own end looks like the end of all of
        # them.
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

    A fork server that was just killed refuses connections, or accepts one and never answers, but
    counts as running until its parent can reap it, so starting is retried. If the first attempt
    forked a process after all, the run's lease still lets only one of the two work.
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
    pointer = origin.repository_origin.code_pointer
    return PIPELINE_TAG in run.tags or getattr(pointer, "module", None) == DEFINITIONS


def _execute(arguments: str) -> None:
    """Execute a run; called in its process."""
    execute_run(arguments)


def _process_of(run: dg.DagsterRun) -> tuple[int, str]:
    """Return the pid and the start time of the process that was forked for a run."""
    pid, _, started = run.tags[PROCESS_TAG].partition(" ")
    return int(pid), started


def _is_alive(run: dg.DagsterRun) -> bool:
    """Return whether the process that was forked for a run has not ended."""
    pid, started = _process_of(run)
    return bool(started) and _started(pid) == started


def _started(pid: int) -> str:
    """Return the start time of a process; an empty string if it has ended.

    The start time tells a process from a later one with the same pid.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    state, started = stat[0], stat[19]  # fields 3 and 22 of proc(5)
    return "" if state == "Z" else started
