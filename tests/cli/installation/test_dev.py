"""Tests of what `deltaforge dev` refuses before it starts anything."""

from __future__ import annotations

import fcntl
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from deltaforge_dagster.cli import main


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation with an empty directory for pipelines."""
    (tmp_path / "pipelines").mkdir()
    monkeypatch.setenv("DELTAFORGE_PIPELINES", str(tmp_path / "pipelines"))
    monkeypatch.setenv("DELTAFORGE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which another socket listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def dev(port: int) -> Result:
    """Call the command through the shell interface."""
    return CliRunner().invoke(main.app, ["dev", "--port", str(port)])


def test_a_port_that_is_taken(taken: int, home: Path) -> None:
    """One message names the option; neither Spark nor Dagster is started."""
    result = dev(taken)

    assert result.exit_code == 2, result.output
    assert f"error: --port {taken}: Address already in use; choose another" in result.stderr
    assert "Starting" not in result.output
    assert not (home / "spark").exists()


def test_a_home_where_another_works(taken: int, home: Path) -> None:
    """A second `dev` is refused only while the first one holds the home directory."""
    home.mkdir()
    with (home / "dev.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused = dev(taken)
    after = dev(taken)

    assert refused.exit_code == 2, refused.output
    assert f"another `deltaforge dev` is running in {home}" in refused.stderr
    assert "--port" in after.stderr


def test_a_directory_without_pipelines(taken: int, tmp_path: Path) -> None:
    """The command reports an empty directory, since the UI would show nothing."""
    assert f"{tmp_path / 'pipelines'} has no pipeline file yet" in dev(taken).output


def test_a_broken_file(taken: int, tmp_path: Path) -> None:
    """The file's problems are printed in full, including brackets."""
    (tmp_path / "pipelines" / "orders.yaml").write_text(
        "metadata: {name: orders, tenant: acme}\nspec: {source: {type: x}, sinks: [{type: y}]}\n"
    )

    said = dev(taken).output

    assert "orders is left out: " in said
    assert "spec.sinks[0]: has an unknown type" in said
