"""What `dg` says about the project; nothing is connected to."""

import subprocess
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]


@pytest.mark.parametrize("subject", ["yaml", "defs"])
def test_the_project_is_valid(subject: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Component files are well-formed, and everything loads."""
    monkeypatch.setenv("POSTGRES_DSN", "postgres://user@localhost/shop")
    monkeypatch.setenv("LAKE", "/srv/lake")

    done = subprocess.run(
        ["dg", "check", subject], cwd=PROJECT, check=False, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stdout + done.stderr
