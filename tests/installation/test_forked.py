"""Tests of modules that run in forks of this process."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deltaforge_dagster.errors import SettingsError
from deltaforge_dagster.installation.forked import ForkedModule
from deltaforge_dagster.installation.process import ServerProcess
from tests.installation.test_process import alive, gone

PROJECT = Path(__file__).parents[2]

SHOWS = """\
import os, sys
umask = os.umask(0)
with open("shown.part", "w") as file:
    print(__name__, sys.argv[1:], os.getsid(0) == os.getpid(), oct(umask), sys.stdin.read(), file=file)
os.rename("shown.part", "shown")
print("on standard error", file=sys.stderr, flush=True)
import time
time.sleep(600)
"""

HOLDS_A_LOCK = """\
import fcntl, os, pathlib, sys, time
from deltaforge_dagster.installation.forked import ForkedModule
from deltaforge_dagster.installation.process import ServerProcess
folder = pathlib.Path(sys.argv[1])
lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
fcntl.flock(lock, fcntl.LOCK_EX)
first, second = (
    ServerProcess(name, ForkedModule("sleeps", [name]), directory=folder) for name in ("first", "second")
)
first.wait_until((folder / "first").exists, 60)
second.wait_until((folder / "second").exists, 60)
print(first.pid, second.pid, flush=True)
time.sleep(600)
"""


STARTS_A_FORK_SERVER = """\
import fcntl, multiprocessing, os, pathlib, sys, time
from deltaforge_dagster.installation.forked import start_fork_server
folder = pathlib.Path(sys.argv[1])
lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
fcntl.flock(lock, fcntl.LOCK_EX)
start_fork_server(["sleepless", "looks"])
import looks
process = multiprocessing.get_context("forkserver").Process(target=looks.look, args=(folder,), daemon=True)
process.start()
process.join()
print(process.exitcode, *(folder / "seen").read_text().split(), flush=True)
time.sleep(600)
"""

LOOKS = """\
import os, sys
def look(folder):
    with open(folder / "seen", "w") as file:
        print("sleepless" in sys.modules, os.getppid(), file=file)
"""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that forks run."""
    (tmp_path / "shows.py").write_text(SHOWS)
    (tmp_path / "sleeps.py").write_text(
        "import sys, time\nopen(sys.argv[1], 'w')\ntime.sleep(600)\n"
    )
    (tmp_path / "ends.py").write_text("import sys\nprint('short and stout')\nsys.exit(3)\n")
    (tmp_path / "looks.py").write_text(LOOKS)
    (tmp_path / "sleepless.py").touch()
    monkeypatch.syspath_prepend(tmp_path)


def started(script: str, folder: Path) -> subprocess.Popen[str]:
    """Run a script that can import the modules of `folder`, which is its argument."""
    return subprocess.Popen(
        [sys.executable, "-c", script, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{PROJECT}{os.pathsep}{folder}"},
    )


def test_a_module_runs_as_it_would_in_a_python_of_its_own(tmp_path: Path) -> None:
    """It has its arguments, a session, the folder, no input, and its output in the log; a polite signal ends it."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = ServerProcess(
            "shower", ForkedModule("shows", ["--port", "1"]), directory=tmp_path
        )
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    process.wait_until((tmp_path / "shown").exists, 60)
    said = (tmp_path / "shown").read_text()

    process.send(signal.SIGHUP)
    with pytest.raises(SettingsError, match="shower ended at once: on standard error"):
        process.wait_until(lambda: False, 60)

    assert said == "__main__ ['--port', '1'] True 0o77 \n"
    assert process.exit_code == -signal.SIGHUP


def test_a_module_that_ends_says_how(tmp_path: Path) -> None:
    """Its exit code and its last words are those of a program."""
    process = ServerProcess("teapot", ForkedModule("ends", []), directory=tmp_path)

    with pytest.raises(SettingsError, match="teapot ended at once: short and stout"):
        process.wait_until(lambda: False, 60)
    assert process.exit_code == 3


def test_a_fork_holds_nothing_that_is_ours(tmp_path: Path) -> None:
    """If this process is killed, its forks end, too, and a lock that it held is free, although they were open with it."""
    parent = started(HOLDS_A_LOCK, tmp_path)
    assert parent.stdout
    forks = [int(pid) for pid in parent.stdout.readline().split()]
    for fork in forks:
        os.kill(fork, signal.SIGSTOP)  # so that they are there until the guards end them
    parent.kill()
    parent.wait()
    parent.stdout.close()

    with (tmp_path / "lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert all(gone(fork) for fork in forks)


def test_a_fork_server_has_imported_what_it_is_told(tmp_path: Path) -> None:
    """It holds none of its parent's files, and ends when nobody can ask it for processes any more."""
    parent = started(STARTS_A_FORK_SERVER, tmp_path)
    assert parent.stdout
    code, imported, server = parent.stdout.readline().split()
    assert (code, imported) == ("0", "True")
    assert alive(int(server))

    parent.kill()
    parent.wait()
    parent.stdout.close()

    with (tmp_path / "lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert gone(int(server))
