"""Tests of `journal rebuild` with a real state store and journal directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deltaforge_dagster.cli.main import app
from deltaforge_dagster.state.store import StateStore
from tests.cli.operate.test_status import lines
from tests.state.make import NAME, capture, deliver, held, position


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StateStore]:
    """A store with three segments, of which the first two have files; sink `file` lacks the last two."""
    monkeypatch.setenv("COLUMNS", "200")
    opened = StateStore.open(f"sqlite:///{tmp_path}/home/state.db")
    lease = held(opened, "cache", "file")
    capture(opened, lease, 1, 2, 3)
    deliver(opened, lease, "cache", 3)
    deliver(opened, lease, "file", 1)
    row = opened.pipelines.get(NAME)
    assert row is not None
    folder = tmp_path / "home" / "journal" / NAME / row.uid
    folder.mkdir(parents=True)
    for number in (1, 2):
        (folder / f"{number:010d}-000001-{number:032x}.parquet").touch()
    with opened.fenced(lease) as writer:
        writer.pipeline.set_confirmed(position(1))
        writer.lease.release()
    yield opened
    opened.close()


def test_rebuild(store: StateStore, tmp_path: Path) -> None:
    """The command prints where capture continues, and deletes the rest of the old journal."""
    result = CliRunner().invoke(app, ["journal", "rebuild", NAME])

    assert result.exit_code == 0, result.output
    assert result.stdout == (
        "orders: dropped 3 segments of 1 range; the next run captures again from "
        "lsn 0/00000100 tx_id 1 on.\n"
    )
    assert list((tmp_path / "home" / "journal" / NAME).rglob("*.parquet")) == []
    assert store.segments.read(NAME) == []


def test_loss_must_be_asked_for(store: StateStore, tmp_path: Path) -> None:
    """Sinks that would lose changes are named; nothing changes without `--accept-loss`, which names them again."""
    lease = store.leases.acquire(NAME, "run-2", 60)
    assert lease is not None
    with store.fenced(lease) as writer:
        writer.pipeline.set_confirmed(position(3))
        writer.lease.release()

    refused = CliRunner().invoke(app, ["journal", "rebuild", NAME])
    assert refused.exit_code == 2
    assert "sinks file lack changes" in refused.stderr
    assert len(store.segments.read(NAME)) == 3
    assert len(list((tmp_path / "home" / "journal" / NAME).rglob("*.parquet"))) == 2

    done = CliRunner().invoke(app, ["journal", "rebuild", NAME, "--accept-loss"])
    assert done.exit_code == 0, done.output
    assert "file: never gets the changes before that position that it lacks." in done.stdout


def test_status_shows_what_was_lost(store: StateStore) -> None:
    """`status` marks a sink that lost data, and since when, although the sink continues."""
    lease = store.leases.acquire(NAME, "run-2", 60)
    assert lease is not None
    with store.fenced(lease) as writer:
        writer.checkpoints.resume_at("cache", 2, 0, False, notice="the sink had lost data")

    shown = lines("status")
    assert ["cache", "2 row 0", "2 segments, 5 rows"] in [line[:3] for line in shown]
    (lost,) = [line[0] for line in shown if line[0].startswith("warning: sink cache: ")]
    assert lost.startswith("warning: sink cache: the sink had lost data (for ")
