"""The parent of Spark's Python workers: imports what they need once, before it forks them.

Spark starts one such process per session and forks a worker for each task that finds no idle one
(an idle worker ends after a minute). Without this, each new worker would import pyarrow and
pandas again: most of a second before the first row. Named by `spark.python.daemon.module`.

Two things that Spark's workers do after or before each task would cost more than a task's work:
collecting garbage among everything imported, which is therefore frozen (`gc.freeze`), and reading
the archives of PySpark on the import path again, which are not needed beside the installed package.

Workers also keep what memory a task has freed for the next one, until they end: to give it back and
to touch it anew took a third of their time.

Spark keeps the parents of ended sessions for as long as the server lives, 140 MB each. So a parent
without workers ends by itself after a while; Spark starts another one when it needs one.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
from types import FrameType

sys.path[:] = [one for one in sys.path if not one.endswith(".zip")]  # before pyspark is imported
os.environ.setdefault("MIMALLOC_PURGE_DELAY", "-1")  # before pyarrow is: never

# ruff: noqa: E402
import pandas as pd
import pyarrow as pa
from pyspark import daemon
from pyspark.sql.pandas import serializers, types

from deltaforge_dagster.pipeline import messages

PRELOADED = (pa, pd, serializers, types, messages)
"""Modules that a worker finds imported."""

IDLE_SECONDS = 300
_CHECK_SECONDS = 10
_idle = 0

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # mallopt(3)


def _keep_memory() -> None:
    """Let malloc give nothing back, where it is that of the GNU C library."""
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_TRIM_THRESHOLD, 1 << 30)
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)


def _end_when_idle(_signal: int, _frame: FrameType | None) -> None:
    """Count the checks that found no worker, and leave after enough of them.

    Workers inherit neither the timer (see fork(2)) nor, as they end here, the count.
    """
    global _idle  # noqa: PLW0603 - a signal handler has no other place
    try:
        os.waitpid(-1, os.WNOHANG)  # the parent ignores SIGCHLD, so ended workers are gone already
        _idle = 0
    except ChildProcessError:
        _idle += _CHECK_SECONDS
    if _idle >= IDLE_SECONDS:
        sys.exit(0)


if __name__ == "__main__":
    _keep_memory()
    messages.warm()
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGALRM, _end_when_idle)
    signal.setitimer(signal.ITIMER_REAL, _CHECK_SECONDS, _CHECK_SECONDS)
    daemon.manager()  # type: ignore[no-untyped-call]
