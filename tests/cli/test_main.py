"""Tests of the command line as a whole: list of commands, exit codes, errors, and fast imports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from deltaforge_dagster import __version__
from deltaforge_dagster.cli import main
from deltaforge_dagster.cli.installation import warm
from deltaforge_dagster.errors import SparkUnavailable
from deltaforge_dagster.installation import spark_recording
from deltaforge_dagster.pipeline.run import kernels
from tests.entry_points import pretend


def deltaforge(*arguments: object) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(main.app, [str(one) for one in arguments], prog_name="deltaforge")


def test_version() -> None:
    """`--version` prints the version."""
    result = deltaforge("--version")

    assert (result.exit_code, result.output) == (0, f"deltaforge {__version__}\n")


def test_help_lists_every_command() -> None:
    """`--help`, and a call without arguments, list the commands."""
    listed = deltaforge("--help")

    assert listed.exit_code == 0
    assert all(name in listed.output for name in main.COMMANDS)
    nothing = deltaforge()
    assert (nothing.exit_code, nothing.output.strip()) == (2, listed.output.strip())


def test_help_needs_nothing_heavy() -> None:
    """The list of commands is shown without importing the modules of commands."""
    code = (
        "import sys; from deltaforge_dagster.cli.main import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'dagster', 'numba', 'pandas', 'pyarrow', 'pydantic', 'pyspark', 'sqlalchemy'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stderr == "[]\n"


@pytest.mark.parametrize("command", main.COMMANDS)
def test_each_command_has_help(command: str) -> None:
    """Each command exists and has a help text."""
    result = deltaforge(command, "--help")

    assert result.exit_code == 0
    assert f"deltaforge {command} " in result.output


def test_a_broken_package_costs_its_own_commands_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it was and why it failed is said; every other command is there."""
    broken = ("shop-commands", "shop", "no_such_module:COMMANDS")
    added = ("lab", "lab", "deltaforge_lab.commands:COMMANDS")
    pretend(monkeypatch, "deltaforge.commands", broken, added, module=main)

    assert main._commands() == main.COMMANDS
    said = capsys.readouterr().err
    assert "warning: the commands of package shop-commands are missing" in said
    assert "no_such_module" in said


def test_usage_errors_end_with_2() -> None:
    """A wrong command, option or argument is a usage error."""
    assert deltaforge("stauts").exit_code == 2
    assert deltaforge("ranges").exit_code == 2
    assert deltaforge("ranges", "orders", "--limit", "0").exit_code == 2


def test_our_errors_are_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong usage exits with 2, a failure with 1; standard error has the message without a stack trace."""
    mistake = deltaforge("ranges", "orders")
    assert (mistake.exit_code, mistake.stdout) == (2, "")
    assert mistake.stderr == (
        f"error: no state in {tmp_path}/home/state.db: nothing has run here yet "
        "(deltaforge dev, deltaforge run), or DELTAFORGE_HOME is another directory\n"
    )

    monkeypatch.setenv("DELTAFORGE_STATE_URL", "postgresql://me:secret@127.0.0.1:1/state")
    failure = deltaforge("status")
    assert (failure.exit_code, failure.stdout) == (1, "")
    assert failure.stderr.startswith("error: ")
    assert "secret" not in failure.stderr
    assert "Traceback" not in failure.stderr


@pytest.mark.parametrize("command", ["dev", "run", "serve"])
def test_a_home_that_is_none(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the home directory names the path and the setting of the home directory."""
    home = tmp_path / "file"
    home.touch()
    path = tmp_path / "pipelines" / "orders.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        "metadata: {name: orders, tenant: acme}\n"
        "spec:\n"
        "  source: {type: mysql, config: {id: db, dsn: 'mysql://a:b@127.0.0.1:1/s', tables: [s.t]}}\n"
        "  sinks: [{type: redis, config: {id: r, uri: 'redis://127.0.0.1:1', stream: s}}]\n"
    )
    monkeypatch.setenv("DELTAFORGE_PIPELINES", str(path.parent))
    monkeypatch.setenv("DELTAFORGE_HOME", str(home))
    options = {"dev": [], "run": ["orders"], "serve": ["--port", "0", "--metrics-addr", "none"]}

    failure = deltaforge(command, *options[command])

    assert failure.exit_code == 1, failure.output
    assert str(home) in failure.stderr
    assert "DELTAFORGE_HOME must be a directory that this user may write to" in failure.stderr
    assert failure.stderr.count("error: ") == 1


def test_defects_keep_their_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any other exception is a defect and keeps its stack trace."""

    def broken(_target: str) -> typer.Typer:
        raise ZeroDivisionError

    monkeypatch.setattr(main, "_load", broken)

    assert isinstance(deltaforge("status").exception, ZeroDivisionError)


@pytest.mark.timeout(900)  # if nothing is compiled yet
def test_warm() -> None:
    """`warm` runs every kernel and prints how long it took."""
    result = deltaforge("warm", "--no-spark")

    assert result.exit_code == 0
    assert result.output.startswith("Kernels are ready (")


def test_warm_uses_two_processors_when_nothing_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts are compiled in parallel only if the cache has none of them."""
    asked: list[str] = []
    monkeypatch.setattr(kernels, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(kernels, "all_kernels", lambda: {"messages": lambda: None})
    monkeypatch.setattr(warm, "all_kernels", kernels.all_kernels)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(warm, "_compile_side_by_side", lambda: asked.append("compiled"))

    warm.warm(spark=False)
    warm.warm(spark=False)

    assert asked == ["compiled"]


@pytest.mark.parametrize(
    ("remote", "said"), [("", "Spark starts more slowly"), ("sc://elsewhere:15002", None)]
)
def test_warm_without_an_archive(
    monkeypatch: pytest.MonkeyPatch, remote: str, said: str | None
) -> None:
    """If Spark's classes cannot be archived, `warm` says why and succeeds; a server elsewhere needs no archive here."""

    def fail() -> bool:
        raise SparkUnavailable("Java makes no archive")

    monkeypatch.setattr(spark_recording, "record", fail)
    monkeypatch.setenv("DELTAFORGE_SPARK_REMOTE", remote)

    result = deltaforge("warm")

    assert result.exit_code == 0
    assert (said is None) == (result.stderr == "")
    assert said is None or (said in result.stderr and "Java makes no archive" in result.stderr)
