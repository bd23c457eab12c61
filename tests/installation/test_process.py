"""Server programs end when we do, however we do."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deltaforge_dagster.errors import SettingsError
from deltaforge_dagster.installation import process
from deltaforge_dagster.installation.process import (
    Account,
    ServerProcess,
    free_port,
    package_directory,
    run_as,
    temporary_directory,
)


def alive(pid: int) -> bool:
    """Return whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # gone, maybe while it was being looked at
        return False


def gone(pid: int, seconds: float = 90) -> bool:
    """Wait until a process has ended."""
    deadline = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


def test_stop_ends_a_program_that_ignores_the_signal(tmp_path: Path) -> None:
    """A server that does not follow the polite signal is ended by force."""
    process = ServerProcess(
        "stubborn", ["sh", "-c", "trap '' TERM; while :; do sleep 0.1; done"], directory=tmp_path
    )
    process.stop(signal.SIGTERM, 0.2)

    assert not process.running
    assert gone(process.pid)


def test_stop_ends_what_the_program_left_behind(tmp_path: Path) -> None:
    """Children that outlive their parent are told to end, and get the time to do so."""
    child = (
        "trap 'echo ended in order > note; exit' TERM; touch ready; while :; do sleep 0.05; done"
    )
    process = ServerProcess(
        "parent",
        ["sh", "-c", f'sh -c "{child}" & echo $! > new; mv new pid; wait'],
        directory=tmp_path,
    )
    process.wait_until(lambda: all((tmp_path / name).exists() for name in ("pid", "ready")), 30)
    process.stop(signal.SIGTERM, 30)

    assert gone(int((tmp_path / "pid").read_text()), 0)
    assert (tmp_path / "note").read_text() == "ended in order\n"


def test_a_program_that_ends_at_once_is_one_error_with_its_last_words(tmp_path: Path) -> None:
    """The message carries the log, so that the reader knows why."""
    process = ServerProcess(
        "teapot", ["sh", "-c", "echo short and stout; exit 1"], directory=tmp_path
    )

    with pytest.raises(SettingsError, match="teapot ended at once: short and stout"):
        process.wait_until(lambda: False, 5)


def test_a_program_that_is_never_ready_is_stopped(tmp_path: Path) -> None:
    """Waiting ends with an error, and nothing is left running."""
    process = ServerProcess("sleeper", ["sleep", "600"], directory=tmp_path)

    with pytest.raises(SettingsError, match="sleeper is not ready in time"):
        process.wait_until(lambda: False, 0.1)
    assert gone(process.pid)


def test_a_log_that_has_grown_is_moved(tmp_path: Path) -> None:
    """The program goes on at the beginning of an empty file; what it wrote before is in a second one."""
    go_on = tmp_path / "go-on"
    script = (
        f"for n in 1 2 3; do echo line $n; while [ ! -e {go_on}-$n ]; do sleep 0.02; done; done"
    )
    server = ServerProcess("writer", ["sh", "-c", script], directory=tmp_path)
    log, older = tmp_path / "server.log", tmp_path / "server.log.1"

    def wrote(text: str) -> None:
        deadline = time.monotonic() + 60
        while log.read_text() != text:
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)

    wrote("line 1\n")
    server.limit_log(7)
    assert not older.exists()
    server.limit_log(6)
    assert (log.read_text(), older.read_text()) == ("", "line 1\n")
    Path(f"{go_on}-1").touch()
    wrote("line 2\n")
    assert server.log_tail() == "line 2"
    server.limit_log(6)
    assert (log.read_text(), older.read_text()) == ("", "line 2\n")
    server.stop(signal.SIGTERM, 5)


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
def test_the_server_ends_and_its_files_go_when_we_are_killed(
    tmp_path: Path, ending: signal.Signals
) -> None:
    """Even a process that cannot clean up leaves neither a server nor its directory."""
    directory = tmp_path / "server"
    directory.mkdir()
    script = (
        "import sys, time, pathlib\n"
        "from deltaforge_dagster.installation.process import ServerProcess\n"
        "d = pathlib.Path(sys.argv[1])\n"
        "p = ServerProcess('sleeper', ['sleep', '600'], directory=d, remove=d)\n"
        "print(p.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(directory)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert parent.stdout
    server = int(parent.stdout.readline())
    parent.send_signal(ending)
    parent.wait()
    parent.stdout.close()

    assert gone(server)
    deadline = time.monotonic() + 90
    while directory.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not directory.exists()


def test_a_temporary_directory_can_be_reached_by_its_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A TMPDIR that only we can enter is passed over for an account that is not us."""
    closed = tmp_path / "closed" / "tmp"
    closed.mkdir(parents=True)
    closed.parent.chmod(0o700)
    monkeypatch.setattr("tempfile.tempdir", str(closed))
    account = Account.ordinary()
    directory = temporary_directory("test", account)

    assert run_as(["test", "-w", str(directory)], account, Path("/")).returncode == 0
    assert directory.is_relative_to(closed) == (account is None)
    directory.rmdir()


def test_what_is_to_be_done_after_a_fork_does_not_disturb_another_account(tmp_path: Path) -> None:
    """A library's handler that would end every forked process, as gRPC's may, ends no program of ours."""
    script = (
        "import ctypes, pathlib, signal, sys\n"
        "from deltaforge_dagster.installation.process import Account, ServerProcess, run_as\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.__register_atfork(None, None, libc.abort, None)\n"
        "account = Account.ordinary()\n"
        "print(account and account.uid, run_as(['id', '-u'], account, pathlib.Path('/')).stdout.strip())\n"
        "print(run_as(['/no/program'], account, pathlib.Path('/')).returncode)\n"
        "d = pathlib.Path(sys.argv[1])\n"
        "server = ServerProcess('sleeper', ['sleep', '600'], directory=d, account=account)\n"
        "print(server.running)\n"
        "server.stop(signal.SIGTERM, 60)\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    ).stdout.split()

    expected, user, code, running = said
    assert user == (str(os.geteuid()) if expected == "None" else expected)
    assert (code, running) == ("126", "True")


def test_free_ports_are_not_taken() -> None:
    """Nobody listens there, and the kernel gives none of them to an outgoing connection."""
    first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    with contextlib.ExitStack() as stack:
        taken = set()
        for _ in range(100):
            port = free_port()
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
            assert 1024 <= port < 65536
            assert port < first_outgoing or first_outgoing < 20_000, "there is room below"
            assert port not in taken
            taken.add(port)


def test_a_free_port_for_a_second_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's other port, on which nothing listens yet, is not drawn again."""
    first = free_port()
    drawn, draw = iter([first - process._LOWEST_PORT]), secrets.randbelow
    monkeypatch.setattr(secrets, "randbelow", lambda below: next(drawn, None) or draw(below))

    assert free_port(but=first) != first


def test_a_package_that_is_not_installed_has_no_directory() -> None:
    """The answer is None, not an exception."""
    assert package_directory("no_such_package_of_ours") is None
