"""Tests of the benchmarks of pairs: options, and small real runs."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import pytest
from typer.testing import CliRunner

from deltaforge_dagster.cli.main import app
from deltaforge_lab.bench import drain
from deltaforge_lab.bench.cost.stages import STAGES, stage_of, stage_seconds
from deltaforge_lab.bench.cost.threads import ThreadUsage
from deltaforge_lab.bench.drain import PAIRS
from deltaforge_lab.bench.installation import Acknowledged, Installation
from deltaforge_lab.bench.sources import BenchSource

SERVERS = {"pg": pytest.mark.postgres, "mysql": pytest.mark.mysql}
SINKS = {"redis": pytest.mark.redis, "kafka": pytest.mark.kafka, "nats": pytest.mark.nats}

LATER = 10_000
"""A timeout in seconds that no drain in a test reaches."""

SHORT = {"pg-nats"}
"""Only `make soak` measures the other pairs; the gate covers capture from MySQL (`test_capture.py`)."""


@pytest.mark.parametrize(
    "options",
    [
        ["--rows", "10"],
        ["--shape", "round"],
        ["--rows", "many"],
        ["--writers", "0"],
        ["--max-bytes", "0"],
        ["--timeout", "0"],
        ["--avro", "--peer", "x"],
    ],
)
def test_wrong_options_start_nothing(options: list[str]) -> None:
    """Invalid options are refused before a server is started."""
    assert CliRunner().invoke(app, ["bench", "pg-redis", *options]).exit_code == 2


def test_acknowledgements_are_counted_with_their_times() -> None:
    """The first and the last acknowledgement are recorded; a reset clears them."""
    done = Acknowledged()
    done.add(3)
    first = done.first_at
    done.add(4)

    assert (done.rows, done.first_rows) == (7, 3)
    assert done.first_at == first <= done.last_at
    done.reset()
    assert done.rows == 0


class Endless:
    """A run that continues until its end is requested."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self.reason = ""

    def request_end(self, reason: str) -> None:
        """Record the request."""
        self.reason = reason
        self._asked.set()

    def execute(self) -> Endless:
        """Wait for the request."""
        assert self._asked.wait(300)
        return self


def test_a_drain_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the run is requested at the timeout; the caller finds what is missing."""
    endless = Endless()
    monkeypatch.setattr(Installation, "run", lambda *_, **__: endless)

    Installation.__new__(Installation).catch_up(0.001)

    assert endless.reason == "asked"


class Written(BenchSource):
    """A source that records which writer wrote which rows."""

    def __init__(self) -> None:
        self.statements: list[tuple[int, str]] = []
        self.writers = 0
        self._all = threading.Barrier(3)

    @contextmanager
    def _writer(self) -> Iterator[Callable[[str], object]]:
        self.writers += 1
        number = self.writers

        def execute(statement: str) -> None:
            self._all.wait(300)
            self.statements.append((number, statement))

        yield execute

    def _insert(self, first: int, rows: int) -> str:
        return f"{first}+{rows}"


def test_writers_share_the_backlog(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each writer has its own connection, writers work concurrently, and every transaction is written once."""
    monkeypatch.setattr(Written, "__abstractmethods__", frozenset())
    source = Written()  # type: ignore[abstract]

    seen = list(source.write(5, 5_500, 3))

    assert sorted(seen) == seen
    assert (seen[-1], source.writers) == (5_500, 3)
    assert {writer for writer, _ in source.statements} == {1, 2, 3}
    assert sorted(statement for _, statement in source.statements) == [
        "1005+1000", "2005+1000", "3005+1000", "4005+1000", "5+1000", "5005+500"
    ]  # fmt: skip


@pytest.mark.spark
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("pair", "options"),
    [
        pytest.param(
            pair,
            ["--exactly-once", "--shape", "wide10"]
            if pair in {"mysql-kafka", "mysql-redis"}
            else ["--avro"]
            if pair == "pg-kafka"
            else ["--writers", "3", "--max-bytes", "100000", "--timeout", "500"],
            marks=[
                SERVERS[source],
                SINKS[sink],
                *([] if pair in SHORT else [pytest.mark.soak("benchmarks")]),
            ],
            id=pair,
        )
        for pair, (source, sink) in PAIRS.items()
    ],
)
def test_every_pair_is_measured(
    pair: str, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small backlog arrives completely, and the last line has every number, none of them zero.

    The raw writes, which the same sink acknowledges later, do not count. Every stage of the run is found by
    the names of its threads.
    """
    write_raw = drain._write_raw

    def much_later(installation: Installation) -> float:
        installation.acknowledged.last_at += LATER
        return write_raw(installation)

    monkeypatch.setattr(drain, "_write_raw", much_later)
    found_stages: set[str] = set()

    def recorded(
        threads: Iterable[ThreadUsage], store: Mapping[int, float], *, run: float, spark: float
    ) -> dict[str, float]:
        threads = list(threads)
        found_stages.update(stage_of(one.name) for one in threads)
        assert store.keys() & {one.id for one in threads if stage_of(one.name) == "capture"}
        return stage_seconds(threads, store, run=run, spark=spark)

    monkeypatch.setattr(drain, "stage_seconds", recorded)

    outcome = CliRunner().invoke(app, ["bench", pair, "--rows", "3000", "--json", *options])

    assert outcome.exit_code == 0, outcome.output
    found = json.loads(outcome.stdout.splitlines()[-1])
    assert (found["pair"], found["rows"]) == (pair, 3000)
    assert found["exactly_once"] == ("--exactly-once" in options)
    assert found["avro"] == ("--avro" in options)
    given = (3, 100_000) if "--writers" in options else (1, None)
    assert (found["writers"], found["max_bytes"]) == given
    assert 0 < found["first_seconds"] <= found["seconds"] < LATER
    assert found["events_per_second"] == pytest.approx(3000 / found["seconds"], rel=0.01)
    assert set(found["cpu_seconds_per_million"]) == {"run", "spark", "source", "sink"}
    assert found["cpu_seconds_per_million"]["run"] > 0
    assert found_stages == set(STAGES) - {"store"}
    assert tuple(found["stage_seconds_per_million"]) == STAGES
    assert sum(found["stage_seconds_per_million"].values()) == pytest.approx(
        found["cpu_seconds_per_million"]["run"] + found["cpu_seconds_per_million"]["spark"],
        abs=0.01,
    )
    busiest = found["busiest_threads"]
    assert set(busiest) == {"run", "spark", "source", "sink"}
    serial = max(busiest["run"]["seconds_per_million"], busiest["spark"]["seconds_per_million"])
    assert found["serial_seconds_per_million"] == serial > 0
    assert found["ceiling_events_per_second"] == round(1e6 / serial)
    assert 300 < found["peak_rss_mb"] <= sum(found["peak_rss_mb_by"].values()) + 1
    limits = found["limits"]
    assert limits["raw_read_per_second"] > 0
    assert limits["raw_write_per_second"] > 0
    assert limits["read_ratio"] == pytest.approx(
        found["events_per_second"] / limits["raw_read_per_second"], abs=0.01
    )
    assert limits["write_ratio"] > 0
