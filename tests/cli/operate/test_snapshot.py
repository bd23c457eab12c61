"""Tests of `deltaforge snapshot` commands that need no database: request, status, cancel."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from deltaforge_dagster.cli.main import app
from deltaforge_dagster.state.snapshot_records import PlannedChunk, StagedChunk
from deltaforge_dagster.state.store import StateStore
from tests.state.make import position

PIPELINE = """\
metadata: {name: shop, tenant: acme}
spec:
  source:
    type: postgres
    config: {id: db, dsn: "postgres://u@localhost/d", slot: s, publication: p, tables: [t]}
  sinks: [{type: redis, config: {id: redis, uri: "redis://localhost", stream: s}}]
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation with one pipeline."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("DELTAFORGE_HOME", str(tmp_path))
    monkeypatch.setenv("DELTAFORGE_PIPELINES", str(tmp_path / "shop.yaml"))
    (tmp_path / "shop.yaml").write_text(PIPELINE)
    return tmp_path


def snapshot(*command: str) -> Result:
    """Run a command."""
    return CliRunner().invoke(app, ["snapshot", *command])


def test_a_snapshot_is_asked_for_once() -> None:
    """A request has tables and a condition; a second request is refused until the first is finished."""
    asked = snapshot(
        "start", "shop", "--tables", "public.a, public.b", "--where", "x > 1", "--json"
    )
    again = snapshot("start", "shop")

    row = json.loads(asked.output.splitlines()[-1])
    assert (row["snapshot"], row["state"], row["cause"]) == (1, "wanted", "command")
    assert (row["tables"], row["condition"]) == (["public.a", "public.b"], "x > 1")
    assert again.exit_code == 2
    assert "snapshot 1 is not finished" in again.output


def test_some_sinks_alone() -> None:
    """The output names the sinks and what reads the snapshot next; an unknown sink is an error."""
    wrong = snapshot("start", "shop", "--sinks", "redis, kafka")
    asked = snapshot("start", "shop", "--sinks", "redis")

    assert (wrong.exit_code, "has no sink 'kafka' (there is: redis)" in wrong.output) == (2, True)
    first, second = asked.output.splitlines()[-2:]
    assert first.startswith("Snapshot 1 of shop, for redis: asked for")
    assert second.startswith("The sensor starts it at its next tick (every 5 s, ")
    assert second.endswith("deltaforge snapshot run shop")


def test_how_far_it_is(home: Path) -> None:
    """`status` shows for each table the chunks to read, waiting and in the journal, as text and as JSON."""
    snapshot("start", "shop")
    snapshot("cancel", "shop")
    store = StateStore.open(f"sqlite:///{home}/state.db")
    number = store.snapshots.request("shop", cause="initial").snapshot
    chunks = [PlannedChunk("public.a", one, "{}") for one in (1, 2, 3)]
    store.snapshots.plan("shop", number, chunks)
    staged = StagedChunk("path", "sum", 1234, 10, "s", position(1), "{}", 1, 0.1)
    store.snapshots.stage("shop", number, chunks[0], staged)
    store.close()

    shown = snapshot("status", "shop").output
    assert f"Snapshot {number} of shop: being read (initial" in shown
    assert shown.splitlines()[-1].split() == ["public.a", "3", "2", "1", "0", "1,234"]
    found = json.loads(snapshot("status", "shop", "--json").output.splitlines()[-1])
    assert found["progress"]["public.a"] == {
        "planned": 2, "read": 1, "spliced": 0, "rows": 1234, "staged_bytes": 10,
    }  # fmt: skip


def test_a_finished_one_is_complete(home: Path) -> None:
    """The text output says `complete`, here and in `status`; the JSON output keeps `spliced`."""
    snapshot("start", "shop")
    store = StateStore.open(f"sqlite:///{home}/state.db")
    store.snapshots.plan("shop", 1, [])
    store.close()

    assert "Snapshot 1 of shop: complete (command" in snapshot("status", "shop").output
    assert "1 complete" in CliRunner().invoke(app, ["status", "shop"]).output
    assert json.loads(snapshot("status", "shop", "--json").output)["state"] == "spliced"


def test_cancelling() -> None:
    """An unfinished snapshot can be cancelled once; then another one may be requested."""
    snapshot("start", "shop")

    assert snapshot("cancel", "shop").output == "Snapshot 1 is cancelled.\n"
    again = snapshot("cancel", "shop")
    assert (again.exit_code, "has no unfinished snapshot" in again.output) == (2, True)
    assert "cancelled" in snapshot("status", "shop").output
    assert snapshot("start", "shop").exit_code == 0
