"""Tests of `deltaforge pause`, `stop`, `start` and `resume` with a real state store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deltaforge_dagster.cli.main import app
from deltaforge_dagster.state.store import StateStore
from tests.cli.operate.test_status import lines

PIPELINE = """\
metadata: {{name: shop, tenant: acme}}
spec:
  source:
    type: postgres
    config:
      {{id: db, dsn: "postgres://u@localhost/d", slot: s, publication: p, tables: [t], snapshot: {{mode: {mode}}}}}
  sinks: [{{type: redis, config: {{id: redis, uri: "redis://localhost", stream: s}}}}]
"""


@pytest.fixture(params=["initial", "always"])
def mode(request: pytest.FixtureRequest) -> str:
    """The `snapshot.mode` of the file."""
    return str(request.param)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> Iterator[StateStore]:
    """An installation with one pipeline that has run."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("DELTAFORGE_PIPELINES", str(tmp_path / "shop.yaml"))
    (tmp_path / "shop.yaml").write_text(PIPELINE.format(mode=mode))
    opened = StateStore.open(f"sqlite:///{tmp_path}/home/state.db")
    opened.pipelines.register("shop", "hash", ["redis"])
    yield opened
    opened.close()


def desired(store: StateStore) -> str:
    """Return the desired state of the pipeline."""
    row = store.pipelines.get("shop")
    assert row is not None
    return row.desired_state


@pytest.mark.parametrize("begin", ["start", "resume"])
@pytest.mark.parametrize(("end", "wanted"), [("pause", "paused"), ("stop", "stopped")])
def test_a_pipeline_ends_and_goes_on(
    store: StateStore, mode: str, begin: str, end: str, wanted: str
) -> None:
    """Each command prints what it does; `start` requests one snapshot, and only with mode `always`."""
    (said,) = lines(end, "shop")
    assert said[0].startswith(f"shop is {wanted}")
    assert said[-1].endswith(f"deltaforge {'resume' if end == 'pause' else 'start'} shop")
    assert desired(store) == wanted

    snapshot = ", with a snapshot" if mode == "always" else ""
    assert lines(begin, "shop") == [[f"shop resumes{snapshot}."]]
    assert desired(store) == "running"
    assert [one.cause for one in store.snapshots.read("shop")] == ["always"] * (mode == "always")

    assert lines(begin, "shop") == [["shop is already running."]]
    lines("stop", "shop")
    lines(begin, "shop")
    assert len(store.snapshots.read("shop")) == (mode == "always")  # it is not finished yet


def test_a_pipeline_that_never_ran(store: StateStore) -> None:
    """An unknown pipeline is an error; `pause` and `stop` list the pipelines that have run."""
    for command in ("pause", "stop"):
        result = CliRunner().invoke(app, [command, "other"])
        assert result.exit_code == 2
        assert "no pipeline 'other' in the state store (there is: shop)" in result.output
    result = CliRunner().invoke(app, ["start", "other"])
    assert result.exit_code == 2
    assert "no pipeline 'other'" in result.output
