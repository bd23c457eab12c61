"""Run a server program as a child process that never outlives this process.

A server runs in its own session, so Ctrl-C reaches only this process, which then stops the server
in order. A command that has children takes SIGTERM and SIGHUP like Ctrl-C (`interrupt_once`).

If this process cannot stop the server (killed, crashed, `os._exit`), a *guard* does: a short shell
script that waits on a pipe whose other end only this process holds. The kernel closes that end when
this process ends, for whatever reason; the guard then stops the server and removes its temporary
directory.

Some servers refuse to run as root (PostgreSQL). A process of root runs them as an ordinary account
(`Account.ordinary`), which owns the temporary directory.
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
from deltaforge_dagster.installation.forked import DAEMON_UMASK, Fork, ForkedModule

_GUARD = """
cat >/dev/null
kill -s "$2" "$1" 2>/dev/null
tries=0
while kill -0 "$1" 2>/dev/null && [ "$tries" -lt 50 ]; do sleep 0.1; tries=$((tries + 1)); done
kill -s KILL -- "$1" "-$1" 2>/dev/null
if [ -n "$3" ]; then rm -rf "$3"; fi
"""
"""Arguments: pid, name of the quick stop signal, directory to remove or an empty string."""

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
"""Arguments: uid, gid, then a program's path and its arguments, which replace this process.

After the switch nothing can be imported, because the new user may be unable to read Python's files.
"""

_LOG_TAIL = 5
_LOWEST_PORT = 10_240
_PORT_TRIES = 1000


@dataclass(frozen=True, slots=True)
class Account:
    """A user that programs run as."""

    uid: int
    gid: int

    @classmethod
    def ordinary(cls) -> Account | None:
        """Return the account for servers that refuse to run as root; None if we are not root."""
        if os.geteuid() != 0:
            return None
        for name in ("postgres", "nobody"):
            with contextlib.suppress(KeyError):
                user = pwd.getpwnam(name)
                return cls(user.pw_uid, user.pw_gid)
        return cls(65534, 65534)  # the kernel's overflow ids, by convention those of `nobody`

    def command(self, words: Sequence[str]) -> list[str]:
        """Return a command line that runs another one as this user.

        `subprocess` could switch the user itself, but would then call `fork` instead of `vfork`.
        After a `fork`, gRPC's handlers run in the child; if gRPC is in use in this process, they
        occasionally end the child before the program has started.
        """
        switch = [sys.executable, "-ISc", _SWITCH, str(self.uid), str(self.gid)]
        program, *arguments = words
        return [*switch, shutil.which(program) or program, *arguments]


def temporary_directory(name: str, account: Account | None) -> Path:
    """Create an empty directory, mode 0700, that `account` owns and can access."""
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
    """Run a short command in `directory`; the exit code is 126 if the program cannot be started."""
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


def free_port(*, but: int | None = None) -> int:
    """Return a TCP port of 127.0.0.1 that nobody listens on now.

    If possible, the port is below the range that the kernel uses for outgoing connections, because
    one of those could take it before the server does, or while the server is being restarted.

    Args:
        but: Not this port, which the caller is about to use.
    """
    below = _first_outgoing_port()
    for _ in range(_PORT_TRIES if below - _LOWEST_PORT >= _PORT_TRIES else 0):
        port = _LOWEST_PORT + secrets.randbelow(below - _LOWEST_PORT)
        if port != but:
            with contextlib.suppress(OSError):
                return _bound(port)
    while (port := _bound(0)) == but:
        pass
    return port


def _first_outgoing_port() -> int:
    """Return the first port of outgoing connections; 0 if it is unknown (not Linux)."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    return 0


def _bound(port: int) -> int:
    """Return a port that can be bound now: the given port, or any port for 0.

    Raises:
        OSError: The given port is in use.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))
        bound_port: int = probe.getsockname()[1]
        return bound_port


class ServerProcess:
    """A running server program.

    Args:
        name: The program's name in messages.
        command: Program and arguments, or a module to run in a fork of this process, which has this
            process's account and environment.
        directory: The directory of `server.log`.
        working_directory: The program's working directory; None for `directory`.
        account: The account to run it as; None for the current user.
        environment: Its environment variables; None for those of this process.
        quick_signal: The signal that ends the program at once, including its children.
        remove: The directory that the guard removes when this process ends; None to keep
            everything.

    Attributes:
        name: The program's name in messages.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str] | ForkedModule,
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
        self._child: subprocess.Popen[bytes] | Fork
        with self._log.open("ab") as log:
            try:
                if isinstance(command, ForkedModule):
                    self._child = Fork(command, log, working_directory or directory)
                else:
                    self._child = subprocess.Popen(
                        account.command(command) if account else command,
                        cwd=working_directory or directory,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                        umask=DAEMON_UMASK,
                    )
            except OSError as error:
                raise SettingsError(f"{name} cannot be started: {error}") from error
        # A session of its own, so that Ctrl-C does not end it before the server.
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
        """Whether the program is still running."""
        return self.exit_code is None

    @property
    def exit_code(self) -> int | None:
        """The program's exit code, negative for a signal; None while it is running."""
        return self._child.poll()

    def wait_until(self, ready: Callable[[], bool], seconds: float) -> None:
        """Wait until `ready()` is true.

        Raises:
            SettingsError: The program ended, or `seconds` passed; the message has its last log
                lines.
        """
        deadline = time.monotonic() + seconds
        while not ready():
            if not self.running or time.monotonic() > deadline:
                problem = "is not ready in time" if self.running else "ended at once"
                self.stop(self._quick_signal, 5)
                raise SettingsError(f"{self.name} {problem}: {self.log_tail()}")
            time.sleep(0.02)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the program's process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, number)

    def pause(self) -> None:
        """Freeze the program (SIGSTOP), and return when all of its threads are stopped."""
        self.send(signal.SIGSTOP)
        while self.running and not _is_stopped(self._child.pid):
            time.sleep(0.001)

    def resume(self) -> None:
        """Resume a frozen program (SIGCONT)."""
        self.send(signal.SIGCONT)

    def stop(self, number: signal.Signals, seconds: float) -> None:
        """End the program and its children with a signal, and by force after `seconds`.

        The whole process group gets the signal, as with Ctrl-C in a terminal. Safe to call twice.
        """
        atexit.unregister(self.stop)
        if self._guard.returncode is not None:
            return
        for step, patience in ((number, seconds), (self._quick_signal, 5.0), (signal.SIGKILL, 5.0)):
            self.send(step)
            self.send(signal.SIGCONT)  # a paused program would not handle the other signal
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

    def limit_log(self, most: int) -> None:
        """Move the log to `server.log.1`, replacing that file, if it has more than `most` bytes.

        The program goes on appending to the same file. A line that it writes at that moment may be
        lost.
        """
        if self._log.stat().st_size > most:
            shutil.copyfile(self._log, self._log.with_name(f"{self._log.name}.1"))
            os.truncate(self._log, 0)

    def log_tail(self) -> str:
        """Return the last lines of the program's log as a single line."""
        lines = self._log.read_text(errors="replace").splitlines()[-_LOG_TAIL:]
        return " / ".join(line.strip() for line in lines if line.strip()) or "it wrote no log"


def _is_stopped(process: int) -> bool:
    """Return whether all threads of a process are stopped; they stop one after another."""
    for stat in Path(f"/proc/{process}/task").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the thread has just ended
            # Stopped, stopped by a tracer, zombie: proc(5).
            if stat.read_text().rpartition(")")[2].split()[0] not in "TtZ":
                return False
    return True


def _group_lives(group: int) -> bool:
    """Return whether a process group has members other than zombies; needs Linux's /proc."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has just ended
            state, _parent, its_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                return True
    return False


def package_directory(package: str) -> Path | None:
    """Return the directory of an installed package without importing it; None if not installed."""
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).resolve().parent if spec and spec.origin else None


def remove_directory(directory: Path) -> None:
    """Delete a directory with everything in it; errors are ignored."""
    shutil.rmtree(directory, ignore_errors=True)


def interrupt_once(*_: object) -> None:
    """Handle SIGTERM or SIGHUP like Ctrl-C.

    Whoever ends the process may repeat the signal until it is gone. Both signals are ignored from
    then on, so that repeats do not interrupt the shutdown; Ctrl-C still does.

    Raises:
        KeyboardInterrupt: Always.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        # Not a handler in Python: the interpreter removes those before the process has ended.
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt
