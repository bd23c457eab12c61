"""Tests of the capture benchmark: small real runs, and refused options."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from deltaforge_dagster.cli.main import app


@pytest.mark.parametrize("options", [["--rows", "10"], ["--shape", "round"], ["--source", "x"]])
def test_wrong_options_start_nothing(options: list[str]) -> None:
    """Invalid options are refused before a server is started."""
    assert CliRunner().invoke(app, ["bench", "capture", *options]).exit_code == 2


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("postgres", marks=[pytest.mark.postgres, pytest.mark.soak("benchmarks")]),
        pytest.param("mysql", marks=pytest.mark.mysql),
    ],
)
def test_a_backlog_is_captured_whole(source: str) -> None:
    """Every change is in the journal, and no result is zero."""
    ran = CliRunner().invoke(
        app, ["bench", "capture", "--source", source, "--rows", "3000", "--json"]
    )

    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.output.splitlines()[-1])
    assert (found["source"], found["rows"]) == (source, 3000)
    assert found["shape"] == "wide10"
    for name in ("segments", "rows_per_second", "raw_rows_per_second", "ratio", "journal_bytes"):
        assert found[name] > 0
    assert set(found["cpu_seconds_per_million"]) == {"capture", "source"}
