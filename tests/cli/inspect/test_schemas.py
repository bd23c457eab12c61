"""Tests of `deltaforge schemas` and `deltaforge hold approve`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from deltaforge_dagster.cli.main import app
from deltaforge_dagster.state.holds import SCHEMA
from deltaforge_dagster.state.records import HoldPart
from deltaforge_dagster.state.store import StateStore
from tests.state.make import NAME, held, position, table

TABLE = "public.orders"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StateStore]:
    """A store in which the second version of `orders` waits for approval and is no longer the newest form."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("DELTAFORGE_HOME", str(tmp_path / "home"))
    opened = StateStore.open(f"sqlite:///{tmp_path}/home/state.db")
    lease = held(opened)
    with opened.fenced(lease) as writer:
        for columns, at in (("a", 1), ("ab", 3), ("a", 5)):
            writer.schemas.register("acme", table(*columns), position(at), pause=True)
        writer.schemas.register("acme", table("x", name="items"), position(4), pause=True)
        part = HoldPart(SCHEMA, TABLE, "version 2 waits", position(2), "path", "sum", 12, 99)
        writer.holds.keep([part], position(5))
    yield opened
    opened.close()


def run(*command: str) -> Result:
    """Run a command."""
    return CliRunner().invoke(app, list(command))


def shown(*command: str) -> dict[str, Any]:
    """Run a command that succeeds; return its JSON output."""
    result = run(*command, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def test_list(store: StateStore) -> None:
    """`list` shows every table with its current version and the versions that wait for approval."""
    found = shown("schemas", "list", NAME)["tables"]
    assert [(one["name"], one["registry_version"], one["pending"]) for one in found] == [
        ("public.items", 1, []),
        (TABLE, 1, [2]),
    ]
    assert (found[1]["column_count"], found[1]["primary_key"]) == (1, ["a"])
    text = run("schemas", "list", NAME).stdout
    assert TABLE in text
    assert "version 2" in text


@pytest.mark.parametrize(
    ("options", "version"),
    [
        ((), 1),
        (("--version", "2"), 2),
        (("--sequence", "1"), 1),
        (("--sequence", "2"), 2),
        (("--position", position(4)), 2),
        (("--position", position(9)), 1),
    ],
)
def test_show(store: StateStore, options: tuple[str, ...], version: int) -> None:
    """`show` prints the current or the selected version with its columns."""
    found = shown("schemas", "show", NAME, TABLE, *options)
    assert (found["registry_version"], found["sequence"]) == (version, version)
    assert [one["name"] for one in found["columns"]] == list("ab")[:version]
    assert found["position"] == json.loads(position(2 * version - 1))
    assert found["pending"] is (version == 2)
    text = run("schemas", "show", NAME, TABLE, *options).stdout
    assert f"version {version} of 2" in text
    assert ("+ b int4" in text) is (version == 2)


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (("show", NAME, "public.none"), "captured no table"),
        (("show", NAME, TABLE, "--version", "7"), "no version 7"),
        (("show", NAME, TABLE, "--position", "nonsense"), "not a position"),
        (("show", NAME, TABLE, "--position", '{"file": "b.1", "pos": 4}'), "of this source"),
        (("show", NAME, TABLE, "--position", position(0)), "no version at that position"),
        (("show", NAME, TABLE, "--version", "1", "--sequence", "1"), "exclude one another"),
        (("list", "nobody"), "no pipeline"),
    ],
)
def test_what_is_not_there(store: StateStore, command: tuple[str, ...], problem: str) -> None:
    """Something that does not exist is one clear error with exit code 2."""
    result = run("schemas", *command)
    assert result.exit_code == 2
    assert problem in result.stderr


def test_history_and_diff(store: StateStore) -> None:
    """`history` shows what each version changed; `diff` compares any two versions."""
    found = shown("schemas", "history", NAME, TABLE)["versions"]
    assert [(one["version"], one["changes"]) for one in found] == [(1, []), (2, ["+ b int4"])]
    assert "waits for approval" in run("schemas", "history", NAME, TABLE).stdout
    found = shown("schemas", "diff", NAME, TABLE, "--from", "2", "--to", "1")
    assert found["changes"] == ["- b int4"]
    assert "No difference" in run("schemas", "diff", NAME, TABLE).stdout
    assert "+ b int4" in run("schemas", "diff", NAME, TABLE, "--to", "2").stdout


def test_approve(store: StateStore) -> None:
    """Approval releases the waiting changes once."""
    assert "schema public.orders" in run("hold", "list", NAME).stdout
    result = run("hold", "approve", NAME, TABLE)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{TABLE}: approved; the next run delivers 12 waiting changes.\n"
    assert [hold.state for hold in store.holds.read(NAME)] == ["released"]
    assert shown("schemas", "list", NAME)["tables"][1]["pending"] == []
    again = run("hold", "approve", NAME, TABLE)
    assert again.exit_code == 2
    assert "waits for approval" in again.stderr
