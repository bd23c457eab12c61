"""Tests of the snapshot benchmark: small real runs, and refused options."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from deltaforge_dagster.cli.main import app


@pytest.mark.parametrize("options", [["--rows", "10"], ["--shape", "round"], ["--readers", "0"]])
def test_wrong_options_start_nothing(options: list[str]) -> None:
    """Invalid options are refused before a server is started."""
    assert CliRunner().invoke(app, ["bench", "snapshot", *options]).exit_code == 2


@pytest.mark.parametrize(
    ("source", "readers"),
    [
        pytest.param("postgres", 2, marks=pytest.mark.postgres),
        pytest.param("mysql", 1, marks=[pytest.mark.mysql, pytest.mark.soak("benchmarks")]),
    ],
)
def test_a_table_is_read_whole(source: str, readers: int) -> None:
    """Every row is read once, in several chunks, and no result is zero."""
    options = ["--source", source, "--rows", "3000", "--chunk-size", "700"]
    ran = CliRunner().invoke(
        app, ["bench", "snapshot", *options, "--readers", str(readers), "--json"]
    )

    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.output.splitlines()[-1])
    assert (found["source"], found["rows"], found["chunks"]) == (source, 3000, 5)
    assert (found["shape"], found["readers"]) == ("wide10", readers)
    for name in ("rows_per_second", "raw_rows_per_second", "ratio", "peak_rss_mb"):
        assert found[name] > 0
