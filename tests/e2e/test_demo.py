"""`deltaforge demo`: the proof holds, and nothing is left running, however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.deployment import eventually

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.spark,
    pytest.mark.postgres,
    pytest.mark.redis,
]

ROOT = Path(__file__).parents[2]
_COMMAND = "from deltaforge_dagster.cli.main import app; app()"


def left_over(marker: str) -> list[str]:
    """Return the living processes that inherited an environment with `marker` in it."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (directory / "environ").read_bytes():
                found.append((directory / "cmdline").read_text().replace("\0", " ")[:200])
        except OSError:  # it has ended, or it belongs to somebody else
            continue
    return found


@contextmanager
def running_demo(folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Start a demo whose temporary files, and those of all its children, lie in `folder`."""
    demo = subprocess.Popen(
        [sys.executable, "-c", _COMMAND, "demo", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
    )
    try:
        yield demo
    finally:
        demo.kill()
        demo.communicate()


def nothing_left(folder: Path) -> bool:
    """Wait a moment for processes that are ending, and say whether all are gone."""
    deadline = time.monotonic() + 90
    while left_over(str(folder)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left_over(str(folder)) == []
    return True


def test_every_change_arrives_once_in_order_and_all_ends(tmp_path: Path) -> None:
    """The JSON says so, the exit code agrees, and no process or file of the demo is left."""
    with running_demo(tmp_path, "--json", "--rows", "5000") as demo:
        output, progress = demo.communicate(timeout=800)

    result = json.loads(output.splitlines()[-1])
    assert demo.returncode == 0, progress
    assert result["captured"] == 5000
    assert result["delivered"] == {"redis": 5000, "files": 5000}
    assert (result["lost"], result["duplicated"], result["out_of_order"]) == (0, 0, 0)
    assert result["wrong"] == 0
    assert result["ranges"] > 1
    assert result["seconds"] > 0
    assert result["events_per_second"] > 0
    assert 0 < result["latency_ms"]["p50"] <= result["latency_ms"]["p99"]
    assert result["ui"].startswith("http://127.0.0.1:")
    assert nothing_left(tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("deltaforge-")] == []


def test_a_sqlite_file_takes_the_place_of_postgresql(tmp_path: Path) -> None:
    """The same proof holds for the source `turso`, and nothing of that demo is left, either."""
    with running_demo(tmp_path, "--json", "--rows", "500", "--source", "turso") as demo:
        output, progress = demo.communicate(timeout=800)

    result = json.loads(output.splitlines()[-1])
    assert demo.returncode == 0, progress
    assert result["delivered"] == {"redis": 500, "files": 500}
    assert (result["lost"], result["duplicated"], result["out_of_order"]) == (0, 0, 0)
    assert result["wrong"] == 0
    assert "PostgreSQL" not in progress
    assert nothing_left(tmp_path)


@pytest.mark.parametrize(
    ("ending", "phase"),
    [
        pytest.param(signal.SIGINT, "starting Spark", marks=pytest.mark.soak("faults")),
        pytest.param(signal.SIGINT, "first changes", marks=pytest.mark.soak("faults")),
        pytest.param(signal.SIGTERM, "first changes", marks=pytest.mark.soak("faults")),
        (signal.SIGKILL, "starting Spark"),
        pytest.param(signal.SIGKILL, "first changes", marks=pytest.mark.soak("faults")),
    ],
)
def test_nothing_is_left_when_it_is_interrupted(
    tmp_path: Path, ending: signal.Signals, phase: str
) -> None:
    """Ctrl-C and SIGTERM, also repeated, end everything in order.

    After a kill the servers end by themselves.
    """
    with running_demo(tmp_path, "--json", "--rows", "5000") as demo:
        assert demo.stderr
        while phase not in (line := demo.stderr.readline()):
            assert line, "the demo ended"
        eventually(lambda: len(left_over(str(tmp_path))) > 3, what="what shall be ended")
        time.sleep(3)

        def ended() -> bool:
            demo.send_signal(ending)
            return ending == signal.SIGINT or demo.poll() is not None

        eventually(ended, what="the end", every=0.3)
        demo.communicate(timeout=240)

    assert demo.returncode == (-ending if ending == signal.SIGKILL else 130)
    assert nothing_left(tmp_path)


def test_a_home_with_files_is_refused(tmp_path: Path) -> None:
    """A demo never mixes with the state of another installation."""
    (tmp_path / "state.db").touch()
    with running_demo(tmp_path, "--home", str(tmp_path)) as demo:
        output, progress = demo.communicate(timeout=240)

    assert demo.returncode == 1
    assert "name a new or an empty directory" in output + progress
