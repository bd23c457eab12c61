"""The parent process of Spark's Python workers: imports what they need once, and forks them.

Spark starts one such process (`spark.python.daemon.module`; on a server that is not the
installation's own, one per session). It forks a worker for each task that finds no idle worker;
idle workers end after a minute. Without this module each new worker would import pyarrow and the
kernels again, which takes most of a second.

Two things that Spark's workers do before or after each task would cost more than the task itself:
collecting garbage among all imported objects, which are therefore frozen (`gc.freeze`), and reading
the archives on the import path again: PySpark's, which are not needed because it is installed as a
package, and Spark's own jar. They are removed.

Workers also keep the memory that a task has freed for the next task, until they end: returning it
to the system and touching it again took a third of their time. Arrow and numpy both take it from
malloc.

Spark keeps such a parent, which takes 140 MB, for as long as the server lives. So a parent without
workers exits after a while (`IDLE_SECONDS`); Spark starts another one when it needs one.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import signal
import sys
import time
from pathlib import Path
from types import FrameType

# Before pyspark is imported; the search for this module has already opened the archives.
for _archive in [path for path in sys.path if path.endswith((".zip", ".jar"))]:
    sys.path.remove(_archive)
    sys.path_importer_cache.pop(_archive, None)

# ruff: noqa: E402
from deltaforge_dagster.installation.arrow_memory import arrow_uses_malloc

arrow_uses_malloc()

import pyarrow as pa
from pyspark import daemon
from pyspark.sql.pandas import serializers, types

from deltaforge_dagster.pipeline.encode import messages
from deltaforge_dagster.pipeline.pandas_later import arrow_without_pandas

PRELOADED = (pa, serializers, types, messages)
"""Modules that are imported before workers are forked.

pandas is only imported where a function uses it, because it takes 45 MB.
"""

IDLE_SECONDS = 300
_CHECK_SECONDS = 10
_idle = 0

_SOCKET_NAME = re.compile(r"\.[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\.sock")
"""Matches the names that Spark gives to its sockets in a folder."""

_BOUND = Path("/proc/net/unix")
"""Linux's list of all bound sockets (proc(5)).

Connecting to each socket instead would use up one that waits for a single client.
"""

_YOUNG_SECONDS = 60.0
"""Younger files are kept, because a socket's file appears a moment before the socket is listed."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # mallopt(3)


def _keep_memory() -> None:
    """Make malloc keep freed memory, if it is the one of the GNU C library."""
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_TRIM_THRESHOLD, 1 << 30)  # more than a worker holds, so nothing is returned
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the most that mallopt(3) accepts with 64 bits


def _end_when_idle(_signal: int, _frame: FrameType | None) -> None:
    """Exit after `IDLE_SECONDS` of checks that found no worker.

    Workers do not inherit the timer (see fork(2)), so they never run this handler.
    """
    global _idle  # noqa: PLW0603 - a signal handler has no other place
    try:
        os.waitpid(-1, os.WNOHANG)  # SIGCHLD is ignored, so ended workers are already reaped
        _idle = 0
    except ChildProcessError:
        _idle += _CHECK_SECONDS
    if _idle >= IDLE_SECONDS:
        sys.exit(0)


def _remove_sockets_of_killed_parents() -> None:
    """Remove the sockets of killed parents; a parent that ends otherwise removes its own."""
    folder = os.environ.get("PYTHON_WORKER_FACTORY_SOCK_DIR")
    if folder is not None:
        with contextlib.suppress(OSError):  # nothing that a job needs
            remove_abandoned_sockets(Path(folder))


def remove_abandoned_sockets(folder: Path) -> None:
    """Remove the files of Spark's sockets in a folder that no process has bound; only on Linux."""
    files = [
        path
        for path in folder.iterdir()
        if _SOCKET_NAME.fullmatch(path.name) and path.is_socket() and _age(path) > _YOUNG_SECONDS
    ]
    if not files or not _BOUND.exists():
        return
    bound = {line.rpartition(" ")[2] for line in _BOUND.read_text().splitlines()}
    for path in files:
        if str(path) not in bound:
            path.unlink(missing_ok=True)


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:  # removed meanwhile
        return 0.0


if __name__ == "__main__":
    _remove_sockets_of_killed_parents()
    _keep_memory()
    arrow_without_pandas()
    messages.warm()
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGALRM, _end_when_idle)
    signal.setitimer(signal.ITIMER_REAL, _CHECK_SECONDS, _CHECK_SECONDS)
    daemon.manager()  # type: ignore[no-untyped-call]
