"""A code server whose definitions are in a fork: it answers, loads them again, and ends as Dagster's own does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from dagster._core.errors import DagsterUserCodeProcessError, DagsterUserCodeUnreachableError
from dagster._grpc.client import DagsterGrpcClient

from deltaforge_dagster.launcher.code_server import ForkedCodeServer
from deltaforge_dagster.processes.process import free_port
from tests.e2e.deployment import eventually
from tests.processes.test_process import gone

DEFINITIONS = """\
import dagster as dg
import os
from pathlib import Path

@dg.op
def nothing(): ...

@dg.job(name=Path("job").read_text())
def one(): nothing()

with Path("loaded").open("a") as file:
    file.write(f"{os.getpid()} {one.name}\\n")
defs = dg.Definitions(jobs=[one])
"""


class CodeServer:
    """A code server that runs, for the module `shown` of a folder, which has a job of the name in the file `job`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "shown.py").write_text(DEFINITIONS)
        self.call_job("first")
        port = free_port()
        module = "deltaforge_dagster.launcher.code_server"
        self.proxy = subprocess.Popen(
            [sys.executable, "-m", module, "start", "-m", "shown", "-p", str(port)],
            cwd=folder,
            start_new_session=True,
            env={
                **os.environ,
                "DAGSTER_HOME": str(folder),
                "PYTHONPATH": os.pathsep.join([*sys.path, str(folder)]),
            },
        )
        self.client = DagsterGrpcClient(port=port, host="127.0.0.1")

    def call_job(self, name: str) -> None:
        """Give the job a name, from when the definitions are loaded the next time."""
        (self._folder / "job").write_text(name)

    def loaded(self) -> list[tuple[int, str]]:
        """Return the processes that have loaded the definitions and the name of their job, the latest last."""
        lines = (self._folder / "loaded").read_text().splitlines()
        return [(int(pid), name) for pid, name in map(str.split, lines)]

    def family(self) -> list[int]:
        """Return the processes that it consists of."""
        pids = [int(one.name) for one in Path("/proc").iterdir() if one.name.isdecimal()]
        return [pid for pid in pids if session(pid) == self.proxy.pid]

    def answers(self) -> bool:
        """Say whether there are definitions to ask for."""
        try:
            self.client.list_repositories()
        except (DagsterUserCodeUnreachableError, DagsterUserCodeProcessError):
            return False
        return True


def session(pid: int) -> int | None:
    """Return the session of a process; None if it has ended."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def command_line(pid: int) -> bytes:
    """Return the command with which a process, or what it is a fork of, was started."""
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.fixture
def code_server(tmp_path: Path) -> Iterator[CodeServer]:
    """One that answers."""
    started = CodeServer(tmp_path)
    try:
        eventually(started.answers, what="the definitions")
        yield started
    finally:
        with suppress(ProcessLookupError):  # all have ended
            os.killpg(started.proxy.pid, signal.SIGKILL)
        started.proxy.wait()


def test_definitions_are_loaded_in_forks(code_server: CodeServer) -> None:
    """Loading them again takes another fork, which sees what has changed; the first one ends."""
    [(first, name)] = code_server.loaded()
    code_server.call_job("second")
    code_server.client.reload_code(timeout=60)

    assert name == "first"
    assert [name for _, name in code_server.loaded()] == ["first", "second"]
    second = code_server.loaded()[-1][0]
    assert command_line(second) == command_line(code_server.proxy.pid)  # a new Python has its own
    assert gone(first)
    assert code_server.answers()


def test_definitions_whose_process_was_killed_are_loaded_again(code_server: CodeServer) -> None:
    """Until then, there are none. Dagster's proxy also asks the killed one to end, and reports that as an error."""
    [(first, _)] = code_server.loaded()
    os.kill(first, signal.SIGKILL)
    eventually(lambda: not code_server.answers(), what="the loss")

    with suppress(DagsterUserCodeUnreachableError):
        code_server.client.reload_code(timeout=60)

    assert code_server.answers()


def test_everything_ends_with_the_proxy(code_server: CodeServer) -> None:
    """In order, when it is asked to."""
    family = code_server.family()
    assert {code_server.proxy.pid, code_server.loaded()[0][0]} < set(family)

    code_server.proxy.terminate()

    assert code_server.proxy.wait(60) == 0
    assert all(map(gone, family))


def test_a_forked_process_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process of `subprocess` is: there are its end, its exit code, and a limit."""
    (tmp_path / "sleeps.py").write_text("import time\ntime.sleep(600)\n")
    (tmp_path / "ends.py").write_text("import os, sys\nsys.exit(int(os.environ['CODE']))\n")
    monkeypatch.syspath_prepend(tmp_path)
    ends = ForkedCodeServer([sys.executable, "-m", "ends"], cwd=None, env={"CODE": "3"})
    sleeps = ForkedCodeServer([sys.executable, "-m", "sleeps"], cwd=None, env={})

    assert ends.wait(60) == ends.poll() == ends.returncode == 3
    assert sleeps.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        sleeps.wait(0.01)
    sleeps.terminate()
    assert sleeps.wait(60) == -signal.SIGTERM
