"""Failpoints end or stop real processes, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from deltaforge_dagster.errors import SettingsError
from deltaforge_dagster.pipeline.failpoints import FAILPOINTS, VARIABLE, failpoint

PROGRAM = """
from deltaforge_dagster.pipeline.failpoints import failpoint
for time in range(1, 4):
    failpoint("sink-sent")
    print(time, flush=True)
    failpoint("checkpoint-written")
"""


def start(setting: str) -> subprocess.Popen[str]:
    """Start a process that passes two failpoints three times and prints each time."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, VARIABLE: setting},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_inert_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every failpoint returns when the environment names none."""
    monkeypatch.delenv(VARIABLE, raising=False)

    for name in FAILPOINTS:
        failpoint(name)


@pytest.mark.parametrize(
    ("setting", "printed"),
    [("sink-sent", ""), ("sink-sent:3", "1\n2\n"), ("checkpoint-written:2", "1\n2\n")],
)
def test_kills_at_the_named_time(setting: str, printed: str) -> None:
    """The process dies by SIGKILL at the named step, the given time, and not before."""
    process = start(setting)

    output, _ = process.communicate(timeout=60)

    assert (printed, -signal.SIGKILL) == (output, process.returncode)


def test_stops_and_goes_on() -> None:
    """With `=stop` the process stops there once and runs to its end after SIGCONT."""
    process = start("sink-sent:2=stop")

    _, status = os.waitpid(process.pid, os.WUNTRACED)
    stopped = os.WIFSTOPPED(status)
    process.send_signal(signal.SIGCONT)
    output, _ = process.communicate(timeout=60)

    assert (stopped, output, process.returncode) == (True, "1\n2\n3\n", 0)


@pytest.mark.parametrize("setting", ["sink-snet", "sink-sent:0", "sink-sent=pause", "x:y:z"])
def test_unreadable_variable(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt setting is an error at the first failpoint, so a test cannot pass by accident."""
    monkeypatch.setenv(VARIABLE, setting)

    with pytest.raises(SettingsError, match=VARIABLE):
        failpoint("range-closed")


def test_unknown_name_in_code() -> None:
    """A name outside the documented tuple is an error even when nothing is switched on."""
    with pytest.raises(ValueError, match="FAILPOINTS"):
        failpoint("somewhere")
