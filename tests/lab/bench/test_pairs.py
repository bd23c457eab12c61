"""Tests of what the commands of pairs print."""

from __future__ import annotations

import pytest
from rich.console import Console
from typer.testing import CliRunner

from deltaforge_dagster.cli.main import app
from deltaforge_lab.bench import pairs
from deltaforge_lab.bench.drain import BusiestThread, Drain
from deltaforge_lab.bench.limits import MachineLimits
from deltaforge_lab.bench.peer import Comparison, ProgramDrain

DRAIN = Drain(
    pair="pg-redis",
    rows=1000,
    shape="orders6",
    exactly_once=False,
    sensing=False,
    avro=False,
    writers=1,
    max_bytes=None,
    seconds=2.5,
    first_seconds=0.5,
    events_per_second=400,
    steady_events_per_second=450,
    cpu_seconds_per_million={"run": 3.0, "spark": 2.0},
    stage_seconds_per_million={"capture": 1.25, "other": 3.75},
    busiest_threads={"run": BusiestThread("deliver bench sink", 1.5)},
    serial_seconds_per_million=1.5,
    ceiling_events_per_second=666_667,
    peak_rss_mb=1000,
    peak_rss_mb_by={"run": 400, "spark": 600},
    limits=MachineLimits(5000, 6000, 0.08, 0.07),
    cores=2,
)


def _program(rate: int, own: float) -> ProgramDrain:
    cost = {"program": own, "source": 0.5, "sink": 2.0}
    return ProgramDrain(1000 / rate, 0.25, rate, rate + 1, cost, 300, 0)


COMPARISON = Comparison(
    pair="pg-redis",
    rows=1000,
    shape="orders6",
    exactly_once=False,
    sensing=False,
    writers=1,
    max_bytes=None,
    command="peer --fast",
    deltaforge=[_program(900, 5.0), _program(700, 6.0), _program(800, 7.0)],
    peer=[_program(400, 3.0), _program(300, 3.5), _program(350, 4.0)],
    ratios={
        "events_per_second": 2.25,
        "steady_events_per_second": None,
        "cpu_seconds_per_million": 1.714,
    },
    cores=2,
)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("│")[1:-1]]


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Have both measurements return a prepared result, and return what they are given."""
    given: dict[str, object] = {}

    def measure(*_: object, **options: object) -> Drain:
        given.update(options)
        return DRAIN

    def compare(*positional: object, **options: object) -> Comparison:
        given.update(options, command=positional[3])
        return COMPARISON

    monkeypatch.setattr(pairs, "measure", measure)
    monkeypatch.setattr(pairs, "compare", compare)
    monkeypatch.setattr(pairs, "Console", lambda: Console(width=200))
    return given


def test_a_drain_is_printed_with_its_stages_and_its_ceiling(printed: dict[str, object]) -> None:
    """The table names the busiest thread, and the stages."""
    outcome = CliRunner().invoke(app, ["bench", "pg-redis", "--rows", "1000"])

    assert "command" not in printed
    rows = [_cells(line) for line in outcome.output.splitlines() if line.startswith("│")]
    assert ["of run and Spark, capture", "1.25"] in rows
    assert ["busiest thread of run", "1.50 (deliver bench sink)"] in rows
    assert ["ceiling by the busiest of run and Spark", "666,667"] in rows


def test_a_comparison_is_printed_as_medians(printed: dict[str, object]) -> None:
    """Both programs have a column, and the ratio stands beside them if there is one."""
    options = ["--peer", "peer --fast", "--peer-destination", "there", "--rounds", "5"]
    outcome = CliRunner().invoke(app, ["bench", "pg-redis", "--rows", "1000", *options])

    assert printed["command"] == "peer --fast"
    assert (printed["destination"], printed["rounds"]) == ("there", 5)
    rows = [_cells(line) for line in outcome.output.splitlines() if line.startswith("│")]
    assert ["events per second", "800", "350", "2.25"] in rows
    assert ["without the time to the first", "801", "351", ""] in rows
    assert ["cpu seconds per million, program and Spark", "6.00", "3.50", "1.71"] in rows
    assert ["extra messages", "0", "0", ""] in rows
