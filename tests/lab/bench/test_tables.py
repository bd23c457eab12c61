"""Tests of the benchmarks of tables: options, and small real runs, which only `make soak` makes."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from deltaforge_dagster.cli.main import app
from deltaforge_lab.bench.table_sinks import TABLES
from deltaforge_lab.bench.tables import TABLE_PAIRS

MARKS = {"pg": pytest.mark.postgres, "mysql": pytest.mark.mysql}


@pytest.mark.parametrize(
    "words",
    [
        ["pg-delta", "--mode", "round"],
        ["pg-delta", "--rows", "10"],
        ["pg-objects", "--mode", "current"],
        ["pg-clickhouse", "--mode", "history"],
        ["changes", "--sink", "csv"],
        ["changes", "--sink", "clickhouse", "--mode", "history"],
        ["changes", "--table-rows", "2000", "--changes", "1990", "--commits", "1"],
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
        pytest.param(pair, TABLES[kind].modes[-(source == "pg")], marks=MARKS[source], id=pair)
        for pair, (source, kind) in TABLE_PAIRS.items()
    ],
)
def test_every_pair_is_measured(pair: str, mode: str) -> None:
    """A small backlog arrives completely, which the command checks, and the last line has every number."""
    from_journal = pair.endswith("delta")
    options = ["--rows", "3000", "--mode", mode, "--json"]
    options += ["--from-journal"] if from_journal else []

    outcome = CliRunner().invoke(app, ["bench", pair, *options])

    assert outcome.exit_code == 0, outcome.output
    found = json.loads(outcome.stdout.splitlines()[-1])
    assert (found["pair"], found["mode"], found["rows"]) == (pair, mode, 3000)
    assert found["from_journal"] == from_journal
    assert found["events_per_second"] == pytest.approx(3000 / found["seconds"], rel=0.01)
    assert {"run", "spark", "source"} <= set(found["cpu_seconds_per_million"])
    assert min(found["cpu_seconds_per_million"][name] for name in ("run", "spark")) > 0
    assert 300 < found["peak_rss_mb"] <= sum(found["peak_rss_mb_by"].values()) + 1
    for kind in ("read", "write"):
        raw, ratio = found["limits"][f"raw_{kind}_per_second"], found["limits"][f"{kind}_ratio"]
        assert raw > 0
        assert ratio == pytest.approx(found["events_per_second"] / raw, abs=0.001)


@pytest.mark.spark
@pytest.mark.postgres
@pytest.mark.timeout(900)
@pytest.mark.soak("benchmarks")
@pytest.mark.parametrize("kind", ["iceberg", "postgres", "clickhouse"])
def test_changes_of_a_table_are_measured(kind: str) -> None:
    """Updates, deletes and inserts arrive, in a backlog and in a small commit; the command checks the table's rows."""
    options = ["--sink", kind, "--table-rows", "3000", "--changes", "1000"]
    options += ["--commit-changes", "10", "--commits", "1", "--json"]

    outcome = CliRunner().invoke(app, ["bench", "changes", *options])

    assert outcome.exit_code == 0, outcome.output
    found = json.loads(outcome.stdout.splitlines()[-1])
    assert (found["table_rows"], found["commit_changes"]) == (3000, 10)
    assert (found["backlog"]["pair"], found["backlog"]["rows"]) == (f"pg-{kind}", 1000)
    assert found["backlog"]["limits"] is None
    assert min(found["commit_seconds"], found["commit_cpu_seconds"]) > 0
