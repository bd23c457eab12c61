"""Tests of `deltaforge sensing`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deltaforge_dagster.cli.main import app
from deltaforge_dagster.state.store import StateStore
from tests.pipeline.sensed import documents, pipeline, sense

DOC = "public.orders:doc"


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StateStore]:
    """A store in which sensing has processed orders."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("DELTAFORGE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DELTAFORGE_PIPELINES", str(tmp_path / "pipelines"))
    (tmp_path / "pipelines").mkdir()
    opened = StateStore.open(f"sqlite:///{tmp_path}/home/state.db")
    sense(opened, pipeline(tmp_path / "pipelines"), documents(31))
    yield opened
    opened.close()


def said(*command: str) -> str:
    """Return the output of a command that succeeds."""
    result = CliRunner().invoke(app, ["sensing", *command])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_list() -> None:
    """`list` shows every schema and the progress of sensing, as text and as JSON."""
    text = said("list", "orders")
    assert DOC in text
    assert "31 of 31" in text
    found = json.loads(said("list", "orders", "--json"))
    assert [one["table"] for one in found["schemas"]] == [DOC]
    assert (found["problem"], found["segments_skipped"]) == (None, 0)


def test_show() -> None:
    """`show` prints the fields of one schema."""
    text = said("show", "orders", DOC)
    assert "one of new, paid" in text
    assert "of object" in text
    found = json.loads(said("show", "orders", DOC, "--json"))
    assert [one["name"] for one in found["fields"]] == ["state", "items", "at"]
    assert found["evolutions"] == []


def test_schema(tmp_path: Path) -> None:
    """`schema` writes JSON Schema to standard output or to a file."""
    said("schema", "orders", DOC, "--output", str(tmp_path / "doc.json"))
    assert (tmp_path / "doc.json").read_text() == said("schema", "orders", DOC)
    assert json.loads(said("schema", "orders", DOC))["required"] == ["items"]


def test_drift() -> None:
    """`drift` shows differences by column, for all tables or for one."""
    text = said("drift", "orders")
    assert "unexpected_null 1" in text
    assert "Rows that differ: 1 of 31 analyzed." in text
    found = json.loads(said("drift", "orders", "public.orders", "--json"))
    assert [one["column"] for one in found["tables"][0]["columns"]] == ["id", "gone"]


def test_refusals(tmp_path: Path) -> None:
    """Unknown schemas, and pipelines without sensing, are errors of one line."""
    unknown = CliRunner().invoke(app, ["sensing", "show", "orders", "nothing"])
    assert unknown.exit_code == 2
    assert f"nothing is known of 'nothing' (there is: public.orders, {DOC})" in unknown.stderr
    pipeline(tmp_path / "pipelines", "enabled: false")
    off = CliRunner().invoke(app, ["sensing", "list", "orders"])
    assert off.exit_code == 2
    assert "schema sensing is not enabled" in off.stderr
