"""Run Python modules in forks of this process, which share the memory of all that it imported.

`python -m MODULE` imports each library again, and has its own copy of it. Three processes of
Dagster need the same ones: as forks of a process that has imported them, they start in half the
time and take half the memory.

Fork only while this process has a single thread: a lock that another thread holds stays locked in
the fork forever.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, util
from pathlib import Path
from typing import IO

DAEMON_UMASK = 0o077  # what servers write may contain secrets and rows: it is for their owner

LONGEST_SOCKET = 103
"""The longest path of a socket in bytes: 103 on macOS, 107 on Linux."""

_LONGEST_FOLDER = LONGEST_SOCKET - len("/pymp-12345678/listener-12345678")
"""The longest path of a folder in which `multiprocessing` can make a socket."""


@dataclass(frozen=True, slots=True)
class ForkedModule:
    """A module and its arguments, as for `python -m`."""

    module: str
    arguments: Sequence[str]

    def execute(self) -> None:
        """Run the module in this process."""
        sys.argv = [self.module, *self.arguments]
        runpy.run_module(self.module, run_name="__main__", alter_sys=True)


class Fork:
    """A fork that runs a module, in a session of its own, with its output in `log`.

    Attributes:
        pid: Its process id.
    """

    def __init__(self, run: ForkedModule, log: IO[bytes], working_directory: Path) -> None:
        self._process = multiprocessing.get_context("fork").Process(
            target=_run, args=(run, log.fileno(), working_directory), name=run.module
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it is running."""
        return self._process.exitcode


def share(modules: Iterable[str]) -> None:
    """Import the modules that forks need, so that the forks share their memory."""
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    # A garbage collection writes to the objects that it visits, so each fork would get its own
    # copies of their memory pages. Frozen objects are not visited.
    gc.freeze()


def start_fork_server(modules: Sequence[str]) -> None:
    """Start the fork server of `multiprocessing`, a new Python that imports `modules` first.

    Processes that this process starts through `multiprocessing.get_context("forkserver")` are forks
    of the fork server and share what it has imported. Does nothing if the fork server is running.
    """
    _keep_socket_short()
    forkserver.set_forkserver_preload(list(modules))
    forkserver.ensure_running()


def _keep_socket_short() -> None:
    """Put the fork server's socket into `/tmp` if the temporary folder's path is too long."""
    if len(os.fsencode(tempfile.gettempdir())) <= _LONGEST_FOLDER:
        return
    # `util.get_temp_dir` makes a folder of its own in `/tmp`.
    configured, tempfile.tempdir = tempfile.tempdir, "/tmp"  # noqa: S108
    try:
        util.get_temp_dir()  # made once, and used from then on
    finally:
        tempfile.tempdir = configured


def _run(run: ForkedModule, log: int, working_directory: Path) -> None:
    """Do in a fork what `subprocess.Popen` and `python -m` do for a new process."""
    # Unlike an exec, a fork keeps the handlers of its parent.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    os.umask(DAEMON_UMASK)
    os.chdir(working_directory)
    os.dup2(log, 1)
    os.dup2(log, 2)
    _let_go_of_files()
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - of this process as long as it lives
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    run.execute()


def _let_go_of_files() -> None:
    """Put the null device in place of every other file that was open when this process was forked.

    Locks and pipes are released only when nobody has them open. They are not closed, because the
    objects that own them might later close another file that has their number.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for number in [int(descriptor.name) for descriptor in Path("/dev/fd").iterdir()]:
        if number > 2:
            os.dup2(null, number)
    os.dup2(null, 0)
