"""The decoder against mutated logs of every kind of event: see `fuzz_events`.

`test_fuzz` is about the values in rows, and has every access to memory checked.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sources.mysql.fuzz_events import main


def test_mutated_logs(seed: int) -> None:
    """Each input gives rows of valid JSON or an error of the tree."""
    outcomes = main(4000, seed)

    assert {"NoneType", "CorruptLog", "UnsupportedEvent"} <= set(outcomes)
    assert outcomes["NoneType"] > 100


@pytest.mark.soak("fuzz")
@pytest.mark.timeout(8 * 3600)
def test_mutated_logs_at_length(tmp_path: Path, seed: int) -> None:
    """As above, ten million times, with every access to memory checked."""
    for number in range(100):
        subprocess.run(
            [
                sys.executable, "-W", "error", "-m", "tests.sources.mysql.fuzz_events",
                "100000", str(seed + 100_000 * number),
            ],
            env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "NUMBA_BOUNDSCHECK": "1"},
            check=True,
        )  # fmt: skip
