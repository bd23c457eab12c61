"""The processor time of threads, from Linux's /proc.

Each thread has a `stat` like a process (proc(5), "/proc/pid/task"). The kernel knows the names that
Java and librdkafka give their threads, but before Python 3.14 not those of Python's, so the names
in this process come from `threading`. Times are in clock ticks, mostly 10 ms. A thread's time is
gone when the thread ends: what it used after the last reading is missing here, but not in the
process's time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ThreadUsage:
    """A thread, its name, and its seconds of processor time (user and system)."""

    id: int
    name: str
    cpu_seconds: float


class ThreadLedger:
    """What the threads of some processes have used since the ledger was opened.

    Args:
        processes: Their threads' time until now does not count. In processes that begin later, all
            of it does.
    """

    def __init__(self, processes: Iterable[int]) -> None:
        self._before = {
            (process, thread.id): thread.cpu_seconds
            for process in processes
            for thread in threads(process)
        }
        self._last: dict[int, dict[int, ThreadUsage]] = {}
        self._names: dict[int, str] = {}

    def read(self, processes: Iterable[int]) -> None:
        """Read the threads of these processes; a thread that has ended keeps its last reading."""
        for process in processes:
            if process == os.getpid():
                # A thread that Python did not start has only a number there, and often a name in
                # the kernel.
                self._names |= {
                    thread.native_id: thread.name
                    for thread in threading.enumerate()
                    if thread.native_id is not None and not thread.name.startswith("Dummy-")
                }
            self._last.setdefault(process, {}).update(
                (thread.id, thread) for thread in threads(process)
            )

    def used(self, processes: Iterable[int]) -> list[ThreadUsage]:
        """Return what each thread of these processes has used, as far as it was read."""
        return [
            ThreadUsage(
                thread.id,
                self._names.get(thread.id, thread.name),
                thread.cpu_seconds - self._before.get((process, thread.id), 0.0),
            )
            for process in processes
            for thread in self._last.get(process, {}).values()
        ]


def threads(process: int) -> Iterator[ThreadUsage]:
    """Yield the threads of a process, none if it has ended.

    Those of other processes are named `program: thread`, or only `program` if both names are the
    same.
    """
    program = ""
    if process != os.getpid():
        with suppress(OSError):
            program = Path(f"/proc/{process}/comm").read_text().strip()
    for stat in Path(f"/proc/{process}/task").glob("[0-9]*/stat"):
        with suppress(OSError):  # the thread has just ended
            # The name, in parentheses, may contain any character; the fields after it are fixed.
            start, _, end = stat.read_text().rpartition(")")
            name, fields = start.partition("(")[2], end.split()
            cpu_seconds = (int(fields[11]) + int(fields[12])) / _TICKS
            called = name if program in {"", name} else f"{program}: {name}"
            yield ThreadUsage(int(stat.parent.name), called, cpu_seconds)
