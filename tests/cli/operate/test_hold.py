"""Tests of `deltaforge hold`, and of holds in `status`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deltaforge_dagster.cli.main import app
from deltaforge_dagster.state.records import HoldPart
from deltaforge_dagster.state.store import StateStore
from tests.state.make import NAME, held, position

TABLE = "shop.orders"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StateStore]:
    """A store with one held table."""
    monkeypatch.setenv("COLUMNS", "200")
    opened = StateStore.open(f"sqlite:///{tmp_path}/home/state.db")
    lease = held(opened, "cache")
    part = HoldPart("table", TABLE, "nobody knows it", position(1), "path", "sum", 12, 2048)
    with opened.fenced(lease) as writer:
        writer.holds.keep([part], position(2))
        writer.lease.release()
    yield opened
    opened.close()


def test_holds_are_shown(store: StateStore) -> None:
    """`hold list` and `status` show the table, the state, the number of events and the reason."""
    for command, code in ((["hold", "list", NAME], 0), (["status"], 1)):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == code, result.output
        assert f"table {TABLE}" in result.stdout
        assert "12" in result.stdout
        assert "nobody knows it" in result.stdout


def test_release(store: StateStore, tmp_path: Path) -> None:
    """The statement is stored with the release; unknown tables and conflicting options are refused."""
    file = tmp_path / "orders.sql"
    file.write_text("CREATE TABLE orders (id int PRIMARY KEY)")
    refused = CliRunner().invoke(app, ["hold", "release", NAME, "shop.items"])
    assert refused.exit_code == 2
    assert "holds no table 'shop.items'" in refused.stderr
    both = ["hold", "release", NAME, TABLE, "--catalog", "--create-table", str(file)]
    assert "exclude one another" in CliRunner().invoke(app, both).stderr

    result = CliRunner().invoke(app, ["hold", "release", NAME, TABLE, "--create-table", str(file)])

    assert result.exit_code == 0, result.output
    assert result.stdout == f"{TABLE}: the next run delivers 12 held events.\n"
    (hold,) = store.holds.read(NAME)
    assert hold.state == "released"
    assert json.loads(str(hold.remedy)) == {
        "db": "shop",
        "table": "orders",
        "create_table": file.read_text(),
    }
    listed = json.loads(CliRunner().invoke(app, ["hold", "list", NAME, "--json"]).stdout)["holds"]
    assert [one["mend"] for one in listed] == [hold.remedy]  # scripts parse it by this name
