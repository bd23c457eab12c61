"""What processes cost while a benchmark runs: processor time and memory, from Linux's /proc.

A *group* is a process with everything it has started (proc(5), "/proc/pid/stat": fields 4 ppid, 14
utime, 15 stime, 24 rss). Processor time is kept per process id, so that what a process used before
it ended still counts; one that lives shorter than the time between two looks may be missed.

Resident memory counts a page shared by two processes twice, so the sum over Spark's Python workers is
an upper bound.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

LOOK_SECONDS = 0.2

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Usage:
    """One process at one moment: its parent, seconds of processor time, bytes of memory."""

    parent: int
    cpu_seconds: float
    rss_bytes: int


class Sampler:
    """Watches groups of processes from a thread of its own. A context manager.

    Args:
        groups: First process of each group, by the group's name.
        alone: A group of one process that is not to be followed to its children: ourselves, who
            have started the servers.

    Attributes:
        peak_rss: Most memory of each group, in bytes.
        peak_together: Most memory of the groups that `together` names, at one moment.
    """

    def __init__(self, groups: Mapping[str, int], *, alone: str, together: tuple[str, ...]) -> None:
        self._groups = groups
        self._alone = alone
        self._together = together
        self._first: dict[int, float] = {}
        self._last: dict[str, dict[int, float]] = {name: {} for name in groups}
        self._own_seconds = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sampler", daemon=True)
        self.peak_rss = dict.fromkeys(groups, 0)
        self.peak_together = 0

    def __enter__(self) -> Self:
        """Begin: what was used before does not count."""
        self._first = {pid: usage.cpu_seconds for pid, usage in usages().items()}
        self._look()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End with a last look."""
        self._stop.set()
        self._thread.join()
        self._look()

    def cpu_seconds(self) -> dict[str, float]:
        """Return what each group has used since the beginning; without this sampler's own share."""
        used = {
            # Of a copy: the thread may be adding a process.
            name: sum(last - self._first.get(pid, 0.0) for pid, last in processes.copy().items())
            for name, processes in self._last.items()
        }
        used[self._alone] -= self._own_seconds
        return used

    def _watch(self) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            self._look()
            self._own_seconds = time.thread_time()

    def _look(self) -> None:
        now = usages()
        together = 0
        for name, first in self._groups.items():
            members = [first] if name == self._alone else descendants(now, first)
            usage = {pid: now[pid] for pid in members if pid in now}
            self._last[name].update({pid: one.cpu_seconds for pid, one in usage.items()})
            rss = sum(one.rss_bytes for one in usage.values())
            self.peak_rss[name] = max(self.peak_rss[name], rss)
            together += rss if name in self._together else 0
        self.peak_together = max(self.peak_together, together)


def usages() -> dict[int, Usage]:
    """Return every process of the machine."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended just now
            # The command's name, in parentheses, may hold anything; what follows is fixed.
            fields = stat.read_text().rpartition(")")[2].split()
            cpu = (int(fields[11]) + int(fields[12])) / _TICKS
            found[int(stat.parent.name)] = Usage(int(fields[1]), cpu, int(fields[21]) * _PAGE)
    return found


def descendants(processes: Mapping[int, Usage], first: int) -> list[int]:
    """Return a process with its children, their children, and so on."""
    children: dict[int, list[int]] = {}
    for pid, usage in processes.items():
        children.setdefault(usage.parent, []).append(pid)
    found = [first]
    for pid in found:
        found += children.get(pid, ())
    return found
