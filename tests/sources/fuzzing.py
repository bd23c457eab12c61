"""Running a program that decodes mutated logs, with its own way of compiling kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def fuzz(
    program: str, recorded: Path, tmp_path: Path, count: int, seed: int, **environment: str
) -> dict[str, int]:
    """Run the program over so many mutations of what was recorded; return how often each outcome was."""
    ran = subprocess.run(
        [
            sys.executable, "-W", "error", "-m", program,
            str(recorded), str(count), str(seed),
        ],
        env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert ran.returncode == 0, f"seed {seed}: {ran.stderr[-3000:]}"
    outcomes: dict[str, int] = json.loads(ran.stdout)
    return outcomes
