"""The oldest and the newest Dagster that `pyproject.toml` allows: what touches Dagster passes on both.

The lock file has one version between them. The others are installed, without their dependencies,
into an environment that falls back to this one's packages.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest

pytestmark = [pytest.mark.soak("dagster"), pytest.mark.timeout(4 * 3600)]

ROOT = Path(__file__).parents[1]
SUITES = (
    "assets",
    "cli",
    "e2e",
    "examples",
    "installation",
    "journeys",
    "project",
    "resources",
    "sensors",
)
CORE = ("dagster", "dagster-graphql", "dagster-pipes", "dagster-shared", "dagster-webserver")
OLDEST = "4"  # 1.13.3 refuses to depend on an asset with a dot in its key
LIBRARIES = ("dagster-postgres", "dagster-pyspark", "dagster-spark")


def run(*command: str | Path) -> str:
    """Execute a command in the project's folder; return what it printed, which fails the test if it fails."""
    done = subprocess.run(
        [str(part) for part in command],
        check=False, cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-20_000:]
    return done.stdout


def requirements(patch: str) -> Sequence[str]:
    """Return what pip installs for a release of Dagster 1.13: its libraries are numbered 0.29."""
    return [
        *(f"{name}==1.13.{patch}" for name in CORE),
        *(f"{name}==0.29.{patch}" for name in LIBRARIES),
    ]


@pytest.mark.parametrize("patch", [OLDEST, "*"], ids=["oldest", "newest"])
def test_what_touches_dagster_passes(patch: str, tmp_path: Path) -> None:
    """Definitions, sensors, commands, the launcher, journeys in the UI, and runs killed under a daemon."""
    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", environment)
    python = environment / "bin/python"
    pip = (python, "-m", "pip", "install", "--quiet", "--no-deps")
    run(*pip, *requirements(patch))
    # After the environment's own packages on the path.
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    (packages / "locked.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(*pip, "--editable", ROOT)
    version = run(python, "-c", "import dagster; print(dagster.__version__)").strip()
    assert version.startswith("1.13.")
    assert (version == f"1.13.{OLDEST}") == (patch == OLDEST)
    folders = [ROOT / "tests" / suite for suite in SUITES]
    run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not soak", *folders)
