"""Tests of the benchmarks of tables: options, and small real runs, which only `make soak` makes."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from deltaforge_dagster.cli.main import app
from deltaforge_lab.bench.lake import LAKE_PAIRS

MARKS = {"pg": pytest.mark.postgres, "mysql": pytest.mark.mysql}


@pytest.mark.parametrize(
    "words",
    [
        ["pg-delta", "--mode", "round"],
        ["pg-delta", "--rows", "10"],
        ["lake", "--format", "csv"],
        ["lake", "--table-rows", "2000", "--changes", "1990", "--commits", "1"],
    ],
)
def test_wrong_options_start_nothing(words: list[str]) -> None:
    """Invalid options are refused before a server is started."""
    assert CliRunner().invoke(app, ["bench", *words]).exit_code == 2


@pytest.mark.spark
@pytest.mark.timeout(900)
@pytest.mark.soak("benchmarks")
@pytest.mark.parametrize(
    ("pair", "mode"),
    [
        pytest.param(pair, mode, marks=MARKS[source], id=f"{pair}-{mode}")
        for (pair, (source, _)), mode in zip(
            LAKE_PAIRS.items(), ("history", "changelog", "current", "history"), strict=True
        )
    ],
)
def test_every_pair_is_measured(pair: str, mode: str) -> None:
    """A small backlog arrives completely, which the command checks, and the last line has every number."""
    options = ["--rows", "3000", "--mode", mode, "--json"]

    outcome = CliRunner().invoke(app, ["bench", pair, *options])

    assert outcome.exit_code == 0, outcome.output
    found = json.loads(outcome.stdout.splitlines()[-1])
    assert (found["pair"], found["mode"], found["rows"]) == (pair, mode, 3000)
    assert found["events_per_second"] == pytest.approx(3000 / found["seconds"], rel=0.01)
    assert set(found["cpu_seconds_per_million"]) == {"run", "spark", "source"}
    assert min(found["cpu_seconds_per_million"].values()) > 0
    assert 300 < found["peak_rss_mb"] <= sum(found["peak_rss_mb_by"].values()) + 1


@pytest.mark.spark
@pytest.mark.postgres
@pytest.mark.timeout(900)
@pytest.mark.soak("benchmarks")
def test_changes_of_a_table_are_measured() -> None:
    """Updates, deletes and inserts arrive, in a backlog and in a small commit; the command checks the table's rows."""
    options = ["--format", "iceberg", "--table-rows", "3000", "--changes", "1000"]
    options += ["--commit-changes", "10", "--commits", "1", "--json"]

    outcome = CliRunner().invoke(app, ["bench", "lake", *options])

    assert outcome.exit_code == 0, outcome.output
    found = json.loads(outcome.stdout.splitlines()[-1])
    assert (found["table_rows"], found["commit_changes"]) == (3000, 10)
    assert (found["backlog"]["pair"], found["backlog"]["rows"]) == ("pg-iceberg", 1000)
    assert min(found["commit_seconds"], found["commit_cpu_seconds"]) > 0
