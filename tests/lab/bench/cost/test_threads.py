"""Tests of reading the processor time of threads from /proc."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

from deltaforge_lab.bench.cost.threads import ThreadLedger, threads

BURN_SECONDS = 0.1
CHILD = f"""
import ctypes, time
ctypes.CDLL(None).prctl(15, b"a) (name", 0, 0, 0)  # PR_SET_NAME
while time.process_time() < {BURN_SECONDS}: pass
print(flush=True)
input()
"""


class Burner:
    """A thread that uses processor time twice, each time when it is told to."""

    def __init__(self, name: str) -> None:
        self.rounds = [threading.Event(), threading.Event(), threading.Event()]
        self.done = [threading.Event(), threading.Event()]
        self.thread = threading.Thread(target=self._burn, name=name)
        self.thread.start()

    def burn(self, number: int) -> None:
        """Have it burn for the first or second time, and wait until it has."""
        self.rounds[number].set()
        assert self.done[number].wait(300)

    def _burn(self) -> None:
        for number, done in enumerate(self.done):
            assert self.rounds[number].wait(300)
            end = time.thread_time() + BURN_SECONDS
            while time.thread_time() < end:
                pass
            done.set()
        assert self.rounds[-1].wait(300)


def test_a_thread_has_its_name_and_what_it_used_since_the_beginning() -> None:
    """The name is Python's; time before the ledger does not count, and the last reading outlives the thread."""
    own = os.getpid()
    burner = Burner("capture of something")
    burner.burn(0)
    ledger = ThreadLedger([own])
    burner.burn(1)
    ledger.read([own])
    burner.rounds[-1].set()
    burner.thread.join()
    ledger.read([own])

    (found,) = [one for one in ledger.used([own]) if one.name == "capture of something"]

    assert found.id == burner.thread.native_id
    assert BURN_SECONDS / 2 < found.cpu_seconds < BURN_SECONDS * 1.5 + 0.02


def test_threads_of_another_process_have_the_kernels_names() -> None:
    """A name may contain parentheses and spaces; a process that has ended has no threads."""
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        (only,) = threads(child.pid)
        child.communicate(b"\n")

    assert (only.id, only.name) == (child.pid, "a) (name")
    assert BURN_SECONDS / 2 < only.cpu_seconds < 60
    assert list(threads(child.pid)) == []
