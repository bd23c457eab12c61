"""Tests of the comparison with another program, which is always a real one."""

from __future__ import annotations

import json
import os
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import redis
from typer.testing import CliRunner

from deltaforge_dagster.cli.main import app
from deltaforge_dagster.errors import DeltaforgeError, SettingsError
from deltaforge_lab.bench import peer
from deltaforge_lab.bench.cost.processes import usages
from deltaforge_lab.bench.drain import pair_servers
from deltaforge_lab.bench.installation import installed
from deltaforge_lab.bench.peer import OwnRun, Program, drain, establish
from deltaforge_lab.bench.shapes import SHAPES
from deltaforge_lab.bench.sinks import DESTINATION, BenchSink, KafkaBench, RedisBench
from deltaforge_lab.bench.sources import BenchSource

PATIENCE = 300.0

_ADDS = """
import os, sys, redis
client = redis.Redis.from_url(os.environ["SINK"])
def add(count):
    with client.pipeline() as together:
        for _ in range(count):
            together.xadd("peer", {"a": "b"})
        together.execute()
"""

_WAITS = "import signal\nsignal.pause()\n"

_STARTS_TWICE = """
from pathlib import Path
if Path("started").exists():
    add(1)
    print("second start")
Path("started").touch()
"""

_TINY_TRANSACTION = """
import os
from confluent_kafka import Producer
producer = Producer({"bootstrap.servers": os.environ["SINK"], "transactional.id": "tiny"})
producer.init_transactions(120)
producer.begin_transaction()
producer.produce("peer", b"a", partition=0)
producer.produce("peer", b"b", partition=0)
producer.commit_transaction(120)
"""


_SECOND_INSTALLATION = """
export DELTAFORGE_HOME="$DELTAFORGE_BENCH_HOME/deltaforge"
cat >"$DELTAFORGE_BENCH_HOME/second.yaml" <<END
metadata: {name: second, tenant: bench}
spec:
  source: {type: mysql, config: {id: shop, dsn: "$DELTAFORGE_BENCH_SOURCE", tables: [$DELTAFORGE_BENCH_TABLE]}}
  sinks:
    - type: kafka
      config:
        id: sink
        brokers: "$DELTAFORGE_BENCH_SINK"
        topic: $DELTAFORGE_BENCH_DESTINATION
        exactly_once: true
END
exec "$1" -m deltaforge_dagster run "$DELTAFORGE_BENCH_HOME/second.yaml" --until-caught-up
"""


class Counted(BenchSource):
    """A source that only counts the rows that are written; its server is this process."""

    def __init__(self) -> None:
        self.server = SimpleNamespace(pid=os.getpid())  # type: ignore[assignment]
        self.rows = 0

    @contextmanager
    def _writer(self) -> Iterator[Callable[[str], object]]:
        yield lambda _: None

    def _insert(self, first: int, rows: int) -> str:
        assert first == self.rows + 1
        self.rows += rows
        return ""


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Return a source without a server."""
    monkeypatch.setattr(Counted, "__abstractmethods__", frozenset())
    return Counted()  # type: ignore[abstract]


@pytest.fixture
def sink() -> Iterator[RedisBench]:
    """Start a Redis server."""
    with closing(RedisBench()) as server:
        yield server


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[BenchSink, str], Program]:
    """Return a function that makes a program of Python's text, which sends everything at once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(peer, "_QUIET_SECONDS", 0.05)

    def program(sink: BenchSink, text: str) -> Program:
        command = [sys.executable, "-c", text]
        environment = {**os.environ, "SINK": sink.address}
        return Program.of(command, "peer", directory=tmp_path, environment=environment)

    return program


Python = Callable[[BenchSink, str], Program]


def test_a_program_that_does_not_exist_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names what was looked for."""
    monkeypatch.setattr("deltaforge_lab.bench.drain.SOURCES", {})

    outcome = CliRunner().invoke(app, ["bench", "pg-redis", "--peer", "no-such-program --fast"])

    assert outcome.exit_code == 2
    assert "--peer: there is no program 'no-such-program' to execute" in outcome.output


@pytest.mark.parametrize(
    ("command", "destination", "message"),
    [
        ("", "peer", "no program"),
        ("'x", "peer", "No closing quotation"),
        ("true", "bench", "'bench'"),
    ],
)
def test_wrong_commands_start_nothing(
    command: str, destination: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty or broken command line is refused, and a destination that is already DeltaForge's."""
    monkeypatch.setattr("deltaforge_lab.bench.drain.SOURCES", {})
    with pytest.raises(SettingsError, match=message):
        peer.compare(
            "pg-redis",
            1000,
            SHAPES["orders6"],
            command,
            destination=destination,
            rounds=1,
            exactly_once=False,
            sensing=False,
            writers=1,
            max_bytes=None,
            timeout=None,
            say=lambda _: None,
        )


@pytest.mark.redis
def test_a_program_is_measured_and_then_ended(
    source: Counted, sink: RedisBench, python: Python
) -> None:
    """Only new messages count, messages beyond the backlog are reported, and the program is gone afterwards."""
    client = redis.Redis.from_url(sink.address)
    for _ in range(5):
        client.xadd("peer", {"old": "1"})
    text = f"{_ADDS}\nprint(os.getpid(), file=open('pid', 'w'), flush=True)\nadd(3)\n{_WAITS}"

    found = drain(python(sink, text), source, sink, 2, PATIENCE)
    client.close()

    assert found.extra_messages == 1
    assert 0 < found.first_seconds <= found.seconds
    assert found.events_per_second == pytest.approx(2 / found.seconds, abs=1)
    assert set(found.cpu_seconds_per_million) == {"program", "source", "sink"}
    assert found.own_cpu_seconds == found.cpu_seconds_per_million["program"] > 0
    assert found.peak_rss_mb > 1
    assert int(Path("pid").read_text()) not in usages()


@pytest.mark.redis
def test_a_program_that_exits_when_it_is_done(
    source: Counted, sink: RedisBench, python: Python
) -> None:
    """What it sent before it exited counts."""
    found = drain(python(sink, f"{_ADDS}\nadd(4)"), source, sink, 4, PATIENCE)

    assert found.extra_messages == 0


@pytest.mark.redis
def test_a_program_that_ends_too_early(source: Counted, sink: RedisBench, python: Python) -> None:
    """The error has its exit code, what has arrived, and the end of its output."""
    text = f"{_ADDS}\nadd(2)\nprint('no such slot')\nsys.exit(3)"
    with pytest.raises(DeltaforgeError) as drained:
        drain(python(sink, text), source, sink, 5, PATIENCE)
    assert str(drained.value) == (
        "the peer ended with exit code 3 with 2 of 5 messages in 'peer'; its output ends: no such slot"
    )

    with pytest.raises(DeltaforgeError, match=r"exit code 4 before anything arrived; .* oh$"):
        establish(python(sink, "print('oh')\nexit(4)"), source, sink, PATIENCE)


@pytest.mark.redis
def test_a_program_that_delivers_too_little(
    source: Counted, sink: RedisBench, python: Python
) -> None:
    """The wait ends at the timeout, with what has arrived."""
    waits = python(sink, _WAITS)
    with pytest.raises(DeltaforgeError, match=r"still running after 0.001 s .*, with 0 of 5 mess"):
        drain(waits, source, sink, 5, 0.001)
    with pytest.raises(
        DeltaforgeError, match=r"nothing of the peer has arrived in 'peer' after 0.0"
    ):
        establish(waits, source, sink, 0.001)


@pytest.mark.redis
def test_a_program_is_started_again_until_a_row_arrives(
    source: Counted, sink: RedisBench, python: Python
) -> None:
    """A program that exits with 0 when it has caught up may find its place in one start, and deliver in the next."""
    written = establish(python(sink, _ADDS + _STARTS_TWICE), source, sink, PATIENCE)

    assert written == source.rows > 0
    assert sink.count("peer") == 1


@pytest.mark.soak("benchmarks")
@pytest.mark.kafka
def test_transactions_that_hide_the_end(source: Counted, python: Python) -> None:
    """In Kafka each partition of a transaction gets a mark; where they are many, there is no result."""
    with closing(KafkaBench()) as kafka:
        kafka.create("peer")
        with pytest.raises(DeltaforgeError, match=r"with 1 marks for 2 messages in 'peer'"):
            drain(python(kafka, _TINY_TRANSACTION), source, kafka, 2, PATIENCE)


@pytest.mark.soak("benchmarks")
@pytest.mark.spark
@pytest.mark.postgres
@pytest.mark.redis
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rounds", [1, 3])
def test_both_programs_drain_the_same_log(rounds: int) -> None:
    """In each round both deliver the whole backlog, each to its own stream, and nothing twice."""
    program = Path(__file__).with_name("peer_program.py")
    command = shlex.join([sys.executable, str(program)])
    options = ["--rows", "2000", "--rounds", str(rounds), "--peer", command, "--json"]

    outcome = CliRunner().invoke(app, ["bench", "pg-redis", *options])

    assert outcome.exit_code == 0, outcome.output
    found = json.loads(outcome.stdout.splitlines()[-1])
    assert (found["pair"], found["rows"], found["command"]) == ("pg-redis", 2000, command)
    for name in ("deltaforge", "peer"):
        assert [one["extra_messages"] for one in found[name]] == [0] * rounds
        assert all(0 < one["first_seconds"] <= one["seconds"] for one in found[name])
        assert all(one["cpu_seconds_per_million"]["program"] > 0 for one in found[name])
    assert "spark" in found["deltaforge"][0]["cpu_seconds_per_million"]
    assert "spark" not in found["peer"][0]["cpu_seconds_per_million"]
    rates = [
        our["events_per_second"] / their["events_per_second"]
        for our, their in zip(found["deltaforge"], found["peer"], strict=True)
    ]
    assert found["ratios"]["events_per_second"] == pytest.approx(
        statistics.median(rates), abs=0.001
    )


@pytest.mark.soak("benchmarks")
@pytest.mark.spark
@pytest.mark.postgres
@pytest.mark.redis
@pytest.mark.timeout(600)
def test_a_run_that_fails() -> None:
    """There is no result; the error is the run's."""
    with (
        pair_servers("pg-redis", SHAPES["orders6"], lambda _: None) as (source, sink),
        installed(source, sink, say=lambda _: None) as installation,
    ):
        ours = Program("DeltaForge", lambda: OwnRun(installation), DESTINATION)
        source.server.close()

        with pytest.raises(DeltaforgeError) as drained:
            drain(ours, source, sink, 5, PATIENCE)

    assert "DeltaForge ended with exit code 1 with 0 of 5 messages in 'bench'" in str(drained.value)
    assert "connection refused" in str(drained.value)


@pytest.mark.soak("benchmarks")
@pytest.mark.spark
@pytest.mark.mysql
@pytest.mark.kafka
@pytest.mark.timeout(1200)
def test_a_second_installation_is_a_peer(tmp_path: Path) -> None:
    """A program that exits when it has caught up, and commits transactions, can be compared as well."""
    script = tmp_path / "peer.sh"
    script.write_text(_SECOND_INSTALLATION)
    command = shlex.join(["sh", str(script), sys.executable])
    options = [
        "--rows",
        "20000",
        "--rounds",
        "2",
        "--peer",
        command,
        "--peer-destination",
        "second",
    ]

    outcome = CliRunner().invoke(
        app, ["bench", "mysql-kafka", *options, "--exactly-once", "--json"]
    )

    assert outcome.exit_code == 0, outcome.output
    found = json.loads(outcome.stdout.splitlines()[-1])
    for name in ("deltaforge", "peer"):
        assert [one["extra_messages"] for one in found[name]] == [0, 0]
