"""Tests of every command, including future ones: user errors are one message without a stack trace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.testing import CliRunner, Result

from deltaforge_dagster.cli import main
from deltaforge_dagster.state.store import StateStore

PIPELINE = """\
metadata: {name: orders, tenant: acme}
spec:
  source:
    type: postgres
    config:
      {id: db, dsn: "postgres://u:geheim@127.0.0.1:1/d", slot: s, publication: p, tables: [public.t]}
  sinks: [{type: redis, config: {id: redis, uri: "redis://127.0.0.1:1", stream: s}}]
"""

PRINTS_NO_DATA = {"bench", "demo", "dev", "schema", "sensing schema", "serve", "warm"}
"""Commands that run until they are stopped, measure something, or print another format."""


ANSWERS = {"check", "find"}
"""Commands for which exit code 1 may be a result."""


def leaves() -> Iterator[tuple[tuple[str, ...], TyperCommand]]:
    """Yield every command with the words that call it."""
    for name, (target, _) in main.COMMANDS.items():
        yield from _below((name,), main._load(target))


def _below(words: tuple[str, ...], command: Any) -> Iterator[tuple[tuple[str, ...], TyperCommand]]:
    if isinstance(command, TyperCommand):
        yield words, command
        return
    assert isinstance(command, TyperGroup)
    for name, one in command.commands.items():
        yield from _below((*words, name), one)


def call(words: tuple[str, ...], command: TyperCommand, pipeline: str) -> Result:
    """Call a command on a pipeline, with valid values for its other required parameters."""
    arguments: list[str] = []
    for parameter in command.params:
        if parameter.name == "pipeline":
            arguments.append(pipeline)
        elif parameter.required:
            if isinstance(parameter, TyperOption):
                arguments.append(parameter.opts[0])
            arguments.append("1")
    return CliRunner().invoke(main.app, [*words, *arguments])


def of_pipelines() -> list[tuple[tuple[str, ...], TyperCommand]]:
    """Return the commands that take one pipeline."""
    found = [
        (words, command)
        for words, command in leaves()
        if any(parameter.name == "pipeline" for parameter in command.params)
    ]
    assert len(found) > 25
    return found


def assert_one_sentence(words: tuple[str, ...], result: Result) -> None:
    """Assert that a failure is one message with a documented exit code."""
    said = f"{' '.join(words)}: {result.output}"
    assert isinstance(result.exception, SystemExit | None), (said, result.exception)
    assert result.exit_code in {0, 1, 2}, said
    if result.exit_code and words[0] not in ANSWERS:
        assert result.stderr.startswith("error: "), said
    for never in ("Traceback", "geheim", "secret"):
        assert never not in result.output, said


@pytest.fixture(autouse=True)
def installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with one valid pipeline file."""
    folder = tmp_path / "pipelines"
    folder.mkdir()
    (folder / "orders.yaml").write_text(PIPELINE)
    monkeypatch.setenv("DELTAFORGE_PIPELINES", str(folder))
    return folder


def begun(tmp_path: Path) -> None:
    """Create the state store of an installation in which the pipeline has run."""
    store = StateStore.open(f"sqlite:///{tmp_path}/home/state.db")
    store.pipelines.register("orders", "hash", ["redis"])
    store.close()


def test_an_unknown_pipeline(tmp_path: Path) -> None:
    """An unknown pipeline is wrong usage, with exit code 2."""
    begun(tmp_path)
    for words, command in of_pipelines():
        result = call(words, command, "nosuch")
        assert_one_sentence(words, result)
        assert result.exit_code == 2, (words, result.output)


def test_a_broken_file(tmp_path: Path, installation: Path) -> None:
    """Every command that needs the file reports the file's problem."""
    begun(tmp_path)
    (installation / "orders.yaml").write_text("metadata: {name: orders\n")
    for words, command in of_pipelines():
        assert_one_sentence(words, call(words, command, "orders"))


def test_a_store_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unreachable store is a failure, and the message does not contain the password."""
    monkeypatch.setenv("DELTAFORGE_STATE_URL", "postgresql://me:secret@127.0.0.1:1/state")
    for words, command in of_pipelines():
        result = call(words, command, "orders")
        assert_one_sentence(words, result)
    for words in (("status",), ("state", "backup", "copy.db")):
        result = CliRunner().invoke(main.app, words)
        assert_one_sentence(words, result)
        assert result.exit_code == 1


def test_a_home_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the path."""
    (tmp_path / "file").write_text("no directory")
    monkeypatch.setenv("DELTAFORGE_HOME", str(tmp_path / "file" / "home"))
    for words, command in of_pipelines():
        assert_one_sentence(words, call(words, command, "orders"))
    assert_one_sentence(("status",), CliRunner().invoke(main.app, ["status"]))


def test_usage_has_brackets_once() -> None:
    """Optional arguments have one pair of brackets in the usage line."""
    for words, _ in leaves():
        result = CliRunner().invoke(main.app, [*words, "--help"])
        assert result.exit_code == 0, words
        assert "[[" not in result.output, result.output


def test_data_comes_as_json_too() -> None:
    """Every command that prints data or reports what it did has `--json`."""
    without = {
        words
        for words, command in leaves()
        if not {words[0], " ".join(words)} & PRINTS_NO_DATA
        and not any("--json" in parameter.opts for parameter in command.params)
    }

    assert without == set()


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (KeyboardInterrupt(), 130, ""),
        (PermissionError(13, "Permission denied", "/x"), 1, "error: /x: Permission denied\n"),
    ],
)
def test_what_is_no_defect(
    monkeypatch: pytest.MonkeyPatch, raised: BaseException, code: int, said: str
) -> None:
    """Ctrl-C and file system errors have their own exit codes."""

    def broken(_target: str) -> Any:
        raise raised

    monkeypatch.setattr(main, "_load", broken)

    result = CliRunner().invoke(main.app, ["status"])

    assert (result.exit_code, result.stderr) == (code, said)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("deltaforge stat", ["state", "status"]),
        ("deltaforge sink ", ["attach", "pause", "resume"]),
        ("deltaforge status --w", ["--watch"]),
        ("deltaforge find or", ["orders"]),
    ],
)
def test_completion(words: str, expected: list[str]) -> None:
    """Shell completion offers commands, subcommands, options and names of pipelines."""
    typed = words.split(" ")
    environment = {
        "_DELTAFORGE_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(typed) - 1),
    }

    result = CliRunner().invoke(main.app, [], prog_name="deltaforge", env=environment)

    assert sorted(result.output.split()) == expected
