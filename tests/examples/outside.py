"""Packages of `examples` that add a kind of sink or source, as they are where somebody has installed them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.examples.stage import EXAMPLES

Run = Callable[..., str]
"""Runs Python with these arguments, asserts the exit code `code` (0), and returns what it prints."""


def install(name: str, group: str, folder: Path) -> Path:
    """Put a package where Python finds it if the folder that is returned is on its path.

    Args:
        name: Its folder in `examples`, and the module that its entry point names.
        group: The group of its entry points.
        folder: Where to put it.
    """
    package, installed = EXAMPLES / name, folder / "site-packages"
    metadata = installed / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    for module in package.glob("*.py"):
        shutil.copy(module, installed)
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    entries = project["entry-points"][group].items()
    text = "".join(f"{entry} = {value}\n" for entry, value in entries)
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{text}")
    title = name.replace("_", "-")
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {title}\nVersion: 1.0\n")
    return installed


def running_in(folder: Path, installed: Path) -> Run:
    """Return what runs Python in a folder with the installation `home` and `pipelines`, and an installed package."""

    def child(*arguments: str, code: int = 0) -> str:
        paths = [str(installed), *filter(None, [os.environ.get("PYTHONPATH")])]
        done = subprocess.run(
            [sys.executable, *arguments],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(paths),
                "DELTAFORGE_HOME": str(folder / "home"),
                "DELTAFORGE_PIPELINES": str(folder / "pipelines"),
                "PYSPARK_PYTHON": sys.executable,
            },
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    return child


def command(run: Run, *arguments: str, code: int = 0) -> Any:
    """Run a command of `deltaforge`; return the last line that it prints, as JSON."""
    output = run("-m", "deltaforge_dagster", *arguments, code=code)
    return json.loads(output.splitlines()[-1])
