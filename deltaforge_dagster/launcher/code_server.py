"""Dagster's code server, as `deltaforge dev` runs it: the process that holds the definitions is forked.

`dagster code-server start` is a proxy. It starts `dagster api grpc`, which loads the definitions; to load them again it starts another one
and ends the first. Each would be a new Python, which imports Dagster and this package. Here it is a fork of a process that has
imported them and that the proxy starts before it has threads::

    proxy ── start, reload ──> fork server ── fork ──> `dagster api grpc`
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from dagster._cli.code_server import code_server_cli
from dagster._grpc import server

from deltaforge_dagster.processes.forked import ForkedModule, start_fork_server

_FORK_SERVER = multiprocessing.get_context("forkserver")


class ForkedCodeServer:
    """What Dagster expects of the process that holds the definitions: the methods of `subprocess.Popen` that it calls.

    Args:
        command: What Dagster would start, `python -m dagster api grpc` with its options.
        env: Its environment variables.

    Attributes:
        pid: Its process id.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        cwd: None,  # noqa: ARG002 - the folder is that of the proxy
        env: Mapping[str, str],
    ) -> None:
        _python, _m, module, *arguments = command
        self._process = _FORK_SERVER.Process(
            target=_serve, args=(ForkedModule(module, arguments), dict(env)), name="code server"
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """What `poll` returns."""
        return self.poll()

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it is running."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; return the exit code.

        Raises:
            subprocess.TimeoutExpired: It is still running.
        """
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("dagster api grpc", timeout or 0)
        return code

    def terminate(self) -> None:
        """Ask it to end."""
        self._process.terminate()


def _serve(module: ForkedModule, environment: Mapping[str, str]) -> None:
    """Run the module with these environment variables; called in the fork."""
    os.environ.clear()
    os.environ.update(environment)
    module.execute()


if __name__ == "__main__":
    start_fork_server()
    patched: Any = server
    patched.open_ipc_subprocess = ForkedCodeServer
    code_server_cli.main(prog_name="dagster code-server")
