"""One server program as a child of ours, and the promise that it ends when we do.

A server runs in a session of its own, so Ctrl-C reaches us and not it, and we end it in order. When
we cannot (killed, crashed, `os._exit`), a *guard* does: a shell of a few lines that waits on a pipe
whose other end only we hold. The kernel closes that end when we die, however we die; the guard then
stops the server and removes its temporary directory.

Some servers refuse to run as root (PostgreSQL). As root we run them as an ordinary account
(`Account.ordinary`) that owns the temporary directory.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deltaforge_dagster.errors import SettingsError

_GUARD = """
cat >/dev/null
kill -s "$2" "$1" 2>/dev/null
tries=0
while kill -0 "$1" 2>/dev/null && [ "$tries" -lt 50 ]; do sleep 0.1; tries=$((tries + 1)); done
kill -s KILL -- "$1" "-$1" 2>/dev/null
if [ -n "$3" ]; then rm -rf "$3"; fi
"""
"""Arguments: pid, name of the quick stop signal, directory to remove or nothing."""

_SWITCH = """
import os, sys
uid, gid, *command = sys.argv[1:]
os.setgroups([])
os.setgid(int(gid))
os.setuid(int(uid))
try:
    os.execv(command[0], command)
except OSError as error:
    print(f"{command[0]}: {error.strerror}", file=sys.stderr)
    sys.exit(126)
"""
"""Arguments: user, group, then a program's path and its arguments, which take this process over.

Nothing can be imported any more once the user is another one, who may not even see where Python is.
"""

_LOG_TAIL = 5
_LOWEST_PORT = 10_240
_PORT_TRIES = 1000
_DAEMON_UMASK = 0o077


@dataclass(frozen=True, slots=True)
class Account:
    """A user that programs run as."""

    uid: int
    gid: int

    @classmethod
    def ordinary(cls) -> Account | None:
        """Return the account to run a server as that refuses root, None to run it as ourselves."""
        if os.geteuid() != 0:
            return None
        for name in ("postgres", "nobody"):
            with contextlib.suppress(KeyError):
                entry = pwd.getpwnam(name)
                return cls(entry.pw_uid, entry.pw_gid)
        return cls(65534, 65534)

    def command(self, words: Sequence[str]) -> list[str]:
        """Return the command line that runs another one as this user.

        `subprocess` could switch the user itself, but would call `fork` for it, where it otherwise calls
        `vfork`. After a `fork` gRPC's handlers begin to work in the child; if gRPC is in use here, they now
        and then end it before the program has begun.
        """
        switch = [sys.executable, "-ISc", _SWITCH, str(self.uid), str(self.gid)]
        program, *arguments = words
        return [*switch, shutil.which(program) or program, *arguments]


def temporary_directory(name: str, account: Account | None) -> Path:
    """Create an empty directory, mode 0700, that belongs to `account` and can be reached by it."""
    parents: list[str | None] = [None, "/tmp", "/var/tmp"]  # noqa: S108 - mkdtemp makes names safe
    for parent in parents if account else parents[:1]:
        directory = Path(tempfile.mkdtemp(prefix=f"deltaforge-{name}-", dir=parent))
        if account is None:
            return directory
        os.chown(directory, account.uid, account.gid)
        if run_as(["test", "-w", str(directory)], account, Path("/")).returncode == 0:
            return directory
        directory.rmdir()
    raise SettingsError(
        f"{name}: no temporary directory that user {account and account.uid} can enter; "
        "set TMPDIR to one"
    )


def run_as(
    command: Sequence[str],
    account: Account | None,
    directory: Path,
    standard_input: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a short command in `directory`; a program that cannot be started gives code 126."""
    try:
        with (standard_input or Path(os.devnull)).open("rb") as stdin:
            return subprocess.run(
                account.command(command) if account else command,
                cwd=directory,
                stdin=stdin,
                capture_output=True,
                text=True,
                check=False,
            )
    except OSError as error:
        return subprocess.CompletedProcess(command, 126, "", str(error))


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that nobody listens on now.

    Where there is room it lies below the ports that the kernel gives to outgoing connections: one of
    those could take it before the server does, or while the server is being restarted.
    """
    below = _first_outgoing_port()
    for _ in range(_PORT_TRIES if below - _LOWEST_PORT >= _PORT_TRIES else 0):
        port = _LOWEST_PORT + secrets.randbelow(below - _LOWEST_PORT)
        with contextlib.suppress(OSError):
            return _bound(port)
    return _bound(0)


def _first_outgoing_port() -> int:
    """Return the first port of outgoing connections; 0 where the kernel does not say (not Linux)."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    return 0


def _bound(port: int) -> int:
    """Return a port that can be bound now: the given one, for 0 any.

    Raises:
        OSError: The given one is in use.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))
        found: int = probe.getsockname()[1]
        return found


class ServerProcess:
    """A running server program.

    Args:
        name: What messages call it.
        command: Program and arguments.
        directory: `server.log` is written there.
        working_directory: Its working directory; None for `directory`.
        account: Whom to run it as; None for ourselves.
        environment: Its environment variables; None for ours.
        quick_signal: Ends the program at once and whole, its own children included.
        remove: Directory the guard removes when we die; None to keep everything.

    Attributes:
        name: What messages call it.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        directory: Path,
        working_directory: Path | None = None,
        account: Account | None = None,
        environment: Mapping[str, str] | None = None,
        quick_signal: signal.Signals = signal.SIGKILL,
        remove: Path | None = None,
    ) -> None:
        self.name = name
        self._quick_signal = quick_signal
        self._log = directory / "server.log"
        with self._log.open("ab") as log:
            try:
                self._child = subprocess.Popen(
                    account.command(command) if account else command,
                    cwd=working_directory or directory,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    umask=_DAEMON_UMASK,
                )
            except OSError as error:
                raise SettingsError(f"{name} cannot be started: {error}") from error
        self._guard = subprocess.Popen(
            [
                "/bin/sh", "-c", _GUARD, "guard",
                str(self._child.pid), quick_signal.name.removeprefix("SIG"), str(remove or ""),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        atexit.register(self.stop, quick_signal, 5)

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._child.pid

    @property
    def running(self) -> bool:
        """Whether the program has not ended."""
        return self._child.poll() is None

    def wait_until(self, ready: Callable[[], bool], seconds: float) -> None:
        """Wait until `ready()` is true.

        Raises:
            SettingsError: The program ended, or `seconds` passed; with its last log lines.
        """
        deadline = time.monotonic() + seconds
        while not ready():
            if not self.running or time.monotonic() > deadline:
                what = "is not ready in time" if self.running else "ended at once"
                self.stop(self._quick_signal, 5)
                raise SettingsError(f"{self.name} {what}: {self.log_tail()}")
            time.sleep(0.02)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the program and everything it started in its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, number)

    def pause(self) -> None:
        """Freeze the program (SIGSTOP); returns when none of its threads runs any more."""
        self.send(signal.SIGSTOP)
        while self.running and not _is_stopped(self._child.pid):
            time.sleep(0.001)

    def resume(self) -> None:
        """Let a frozen program go on (SIGCONT)."""
        self.send(signal.SIGCONT)

    def stop(self, number: signal.Signals, seconds: float) -> None:
        """End the program with a signal, after `seconds` by force; nothing of it is left running.

        What it started gets the same signal at the same time, as with Ctrl-C in a terminal. Safe
        to call twice.
        """
        atexit.unregister(self.stop)
        if self._guard.returncode is not None:
            return
        for step, patience in ((number, seconds), (self._quick_signal, 5.0), (signal.SIGKILL, 5.0)):
            self.send(step)
            self.send(signal.SIGCONT)  # a paused program would never see the other signal
            if self._ended(patience):
                break
        self._guard.kill()
        self._guard.wait()
        if self._guard.stdin:
            self._guard.stdin.close()

    def _ended(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.running or _group_lives(self._child.pid):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def log_tail(self) -> str:
        """Return the last lines of its log, in one."""
        lines = self._log.read_text(errors="replace").splitlines()[-_LOG_TAIL:]
        return " / ".join(line.strip() for line in lines if line.strip()) or "it wrote no log"


def _is_stopped(process: int) -> bool:
    """Say whether all threads of a process are stopped: they are one after another."""
    for stat in Path(f"/proc/{process}/task").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # that thread ended just now
            if stat.read_text().rpartition(")")[2].split()[0] not in "TtZ":
                return False
    return True


def _group_lives(group: int) -> bool:
    """Say whether a process group has members that run (zombies do not); needs Linux's /proc."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended just now
            state, _parent, its_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                return True
    return False


def package_directory(package: str) -> Path | None:
    """Return where an installed package's files are, without importing it; None if it is not."""
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).resolve().parent if spec and spec.origin else None


def remove_directory(directory: Path) -> None:
    """Delete a directory with everything in it; what is gone already is no error."""
    shutil.rmtree(directory, ignore_errors=True)
