"""Interrupts the Spark tasks of a killed run, once its lease has expired and nobody holds it.

Spark continues the tasks of a killed run, forever if a processor hangs, and they occupy task slots.
The next run that uses Spark interrupts them (`spark`), but it may not come soon: the pipeline is
stopped, a sink is paused, or there are so few changes that the run encodes them without Spark. So a
tick has them interrupted as well, by a separate process (`python -m
deltaforge_dagster.resources.left_tasks PIPELINE`), because a code server must not load PySpark.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading

from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.resources.platform import existing_store
from deltaforge_dagster.state.records import LeaseRow

_SECONDS = 60
"""Seconds after which the process ends, even if Spark's server does not respond."""

_interrupted_runs: dict[str, str] = {}
"""For each pipeline, the killed run whose tasks this process has had interrupted."""


def end_left_tasks(lease: LeaseRow) -> None:
    """Have the tasks of a lease's last run interrupted, once.

    If the run has released its lease, there is nothing to do.

    Does not wait, and does not fail: the next run interrupts them in any case.

    Args:
        lease: A lease that nobody holds now.
    """
    run_id = lease.run_id
    if (
        run_id is None
        or lease.session_id is None
        or _interrupted_runs.get(lease.pipeline) == run_id
    ):
        return
    _interrupted_runs[lease.pipeline] = run_id
    command = [sys.executable, "-m", __name__, lease.pipeline]
    threading.Thread(target=_run, args=(command,), name="left tasks", daemon=True).start()


def interrupt(settings: Settings, pipeline: str) -> None:
    """Interrupt the tasks of a pipeline's last run, unless its lease was released or is held.

    Raises:
        DeltaforgeError: Store or Spark cannot be reached.
    """
    from deltaforge_dagster.resources.spark import SparkSessions  # noqa: PLC0415 - see above

    with existing_store(settings) as store:
        if store is None:
            return
        leases = store.leases
        lease = leases.get(pipeline)
        if lease is None or lease.run_id is None or lease.session_id is None:
            return
        if lease.active_at(store.now()):
            return
        sessions = SparkSessions(settings, lease.session_id, lambda _session_id: None)
        sessions.interrupt(unless=lambda: leases.get(pipeline) != lease)


def _run(command: list[str]) -> None:
    with contextlib.suppress(OSError):
        subprocess.run(  # noqa: S603 - this interpreter
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )


if __name__ == "__main__":
    signal.alarm(_SECONDS)
    interrupt(Settings.from_env(), sys.argv[1])
