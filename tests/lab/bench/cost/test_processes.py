"""Tests of reading the cost of processes from /proc."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from deltaforge_lab.bench.cost.processes import Sampler, Usage, descendants, usages

BURN = "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass\n"
PARENT = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BURN!r}])\ninput()"


def test_descendants_are_the_whole_tree() -> None:
    """A group includes all descendants, and no other processes."""
    tree = {pid: Usage(parent, 0, 0, 1) for pid, parent in {1: 0, 5: 1, 6: 5, 7: 6, 8: 1}.items()}

    assert sorted(descendants(tree, 5)) == [5, 6, 7]


def test_our_own_process_is_there() -> None:
    """The right fields are read: parent, processor time, memory."""
    own = usages()[os.getpid()]

    assert own.parent == os.getppid()
    assert 0 < own.cpu_seconds < time.process_time() + 1
    assert 10 << 20 < own.rss_bytes < 10 << 30


def test_what_an_ended_child_used_still_counts() -> None:
    """The processor time of an ended child counts in its group, not in this process's."""
    began = time.process_time()
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE) as other:
        groups = {"own": os.getpid(), "other": other.pid}
        with Sampler(groups, alone="own", together=("own", "other"), threads=True) as sampler:
            deadline = time.monotonic() + 240
            while sampler.cpu_seconds()["other"] < 0.3 or len(descendants(usages(), other.pid)) > 1:
                assert time.monotonic() < deadline
                time.sleep(0.2)
        used = sampler.cpu_seconds()
        ours = time.process_time() - began
        other.communicate(b"\n")

    assert 0.3 < used["other"] < 5
    assert 0.3 < sum(one.cpu_seconds for one in sampler.threads("other")) < 5
    assert "MainThread" in {one.name for one in sampler.threads("own")}
    assert "sampler" not in {one.name for one in sampler.threads("own")}
    assert used["own"] < ours + 0.1
    assert min(sampler.peak_rss.values()) > 1 << 20
    assert max(sampler.peak_rss.values()) <= sampler.peak_together
    assert sampler.peak_together <= sum(sampler.peak_rss.values())
