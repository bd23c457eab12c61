"""Samples the processor time and memory of processes while a benchmark runs, from Linux's /proc.

A *group* is a process with all its descendants (proc(5), "/proc/pid/stat": fields 4 ppid, 14 utime,
15 stime, 20 num_threads, 24 rss). Processor time is recorded per process id, so the time of a
process that has ended still counts. A process that lives shorter than the sampling interval may be
missed.

Resident memory counts a page shared by two processes twice, so the sum over Spark's Python workers
is an upper bound.
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

from deltaforge_lab.bench.cost.threads import ThreadLedger, ThreadUsage

LOOK_SECONDS = 0.2

_FEW_THREADS = 8
_MANY_EVERY = 5
"""If a process has more than `_FEW_THREADS`, such as Java, they are read every fifth time only.

Reading them takes milliseconds.
"""

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Usage:
    """A process sample: parent, seconds of processor time, bytes of resident memory, threads."""

    parent: int
    cpu_seconds: float
    rss_bytes: int
    threads: int


class Sampler:
    """Samples groups of processes in a separate thread. A context manager.

    Args:
        groups: First process of each group, by the group's name.
        together: Names of the groups whose memory is summed.
        alone: Name of the group of this process, if there is one. Its children do not count: they
            are the servers, which are groups themselves.
        threads: Whether threads are sampled, too.

    Attributes:
        peak_rss: Peak memory of each group, in bytes.
        peak_together: Peak of the summed memory of the groups in `together`, in bytes.
    """

    def __init__(
        self,
        groups: Mapping[str, int],
        *,
        together: tuple[str, ...],
        alone: str | None = None,
        threads: bool = False,
    ) -> None:
        self._groups = groups
        self._alone = alone
        self._together = together
        self._first: dict[int, float] = {}
        self._last: dict[str, dict[int, float]] = {name: {} for name in groups}
        self._own_seconds = 0.0
        self._with_threads = threads
        self._ledger = ThreadLedger([])
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sampler", daemon=True)
        self.peak_rss = dict.fromkeys(groups, 0)
        self.peak_together = 0

    def __enter__(self) -> Self:
        """Start sampling; processor time used before does not count."""
        sampled = usages()
        self._first = {pid: usage.cpu_seconds for pid, usage in sampled.items()}
        if self._with_threads:
            self._ledger = ThreadLedger(
                pid for name in self._groups for pid in self._members(sampled, name)
            )
        self._sample(many=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Take a last sample and stop."""
        self._stop.set()
        self._thread.join()
        self._sample(many=True)

    def cpu_seconds(self) -> dict[str, float]:
        """Return each group's processor seconds since the start, without the sampler's thread."""
        used = {
            # Iterate over a copy, because the thread may add a process.
            name: sum(last - self._first.get(pid, 0.0) for pid, last in processes.copy().items())
            for name, processes in self._last.items()
        }
        if self._alone is not None:
            used[self._alone] -= self._own_seconds
        return used

    def threads(self, group: str) -> list[ThreadUsage]:
        """Return what each thread of a group, except the sampler's, has used since the start."""
        own = self._thread.native_id
        return [thread for thread in self._ledger.used(self._last[group]) if thread.id != own]

    def _watch(self) -> None:
        samples = 0
        while not self._stop.wait(LOOK_SECONDS):
            samples += 1
            self._sample(many=samples % _MANY_EVERY == 0)
            self._own_seconds = time.thread_time()

    def _sample(self, *, many: bool) -> None:
        """Sample all processes, with `many` also the threads of those that have many."""
        sampled = usages()
        together = 0
        for name in self._groups:
            members = {pid: sampled[pid] for pid in self._members(sampled, name) if pid in sampled}
            self._last[name].update({pid: usage.cpu_seconds for pid, usage in members.items()})
            if self._with_threads:
                all_threads = many or name == self._alone  # a run's threads end with it
                self._ledger.read(
                    pid
                    for pid, usage in members.items()
                    if all_threads or usage.threads <= _FEW_THREADS
                )
            rss = sum(usage.rss_bytes for usage in members.values())
            self.peak_rss[name] = max(self.peak_rss[name], rss)
            together += rss if name in self._together else 0
        self.peak_together = max(self.peak_together, together)

    def _members(self, sampled: Mapping[int, Usage], name: str) -> list[int]:
        first = self._groups[name]
        return [first] if name == self._alone else descendants(sampled, first)


def usages() -> dict[int, Usage]:
    """Return a sample of every process of the machine, by process id."""
    samples = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has just ended
            # The command's name, in parentheses, may contain any character; the fields after it are
            # fixed.
            fields = stat.read_text().rpartition(")")[2].split()
            cpu = (int(fields[11]) + int(fields[12])) / _TICKS
            rss = int(fields[21]) * _PAGE
            samples[int(stat.parent.name)] = Usage(int(fields[1]), cpu, rss, int(fields[17]))
    return samples


def descendants(processes: Mapping[int, Usage], first: int) -> list[int]:
    """Return a process and all its descendants."""
    children: dict[int, list[int]] = {}
    for pid, usage in processes.items():
        children.setdefault(usage.parent, []).append(pid)
    members = [first]
    for pid in members:
        members += children.get(pid, ())
    return members
