"""A sink that is down under load, with `confirm: auto`: the primary keeps little log, and nothing is lost.

The long form is the scenario `log` of the soak: ten minutes at 5,000 changes a second, with a limit that is reached after a few
of them if only what was delivered is confirmed; also with the run killed every minute.
"""

from __future__ import annotations

import dataclasses
import json
import math
import threading
import time
from collections.abc import Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Self

import psycopg
import pytest

from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.pipeline.health.health import health
from deltaforge_dagster.state.store import StateStore
from deltaforge_lab.servers.postgres import PostgresServer
from tests.e2e.deployment import eventually
from tests.fix_postgres import StartPostgres
from tests.fix_spark import SparkAddress
from tests.kills import child

pytestmark = [pytest.mark.spark, pytest.mark.postgres]

MIB = 1 << 20
BATCHES = 10
"""Transactions a second."""

PIPELINE = """\
metadata: {{name: down, tenant: acme}}
spec:
  source:
    type: postgres
    config: {{id: db, dsn: "{dsn}", slot: down, publication: down, tables: [public.changes]}}
  sinks:
    - {{type: file, config: {{id: lines, path: "{lines}"}}}}
  engine:
    run: {{idle_seconds: 300, lease_seconds: 20, renew_seconds: 1}}
    deliver: {{backoff_max_seconds: 5}}
    journal: {{durable_disk: true, confirm_above: {above}}}
    dagster: {{sensor_interval_seconds: {look_seconds}}}
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Scale:
    """How much is written, and how much log the server may keep.

    Attributes:
        seconds: For how long the sink is down.
        rate: Changes a second.
        limit: `max_slot_wal_keep_size`, in MiB.
        above: `confirm_above`, in MiB.
        most: How much log the slot may retain at any time, in MiB.
        look_seconds: How often a run looks at the log.
        kill_seconds: How often the run is killed; None for never.
        characters: How long a row's text is.
    """

    seconds: float
    rate: int
    limit: int
    above: int
    most: int
    look_seconds: int
    kill_seconds: float | None = None
    characters: int = 32


SHORT = Scale(8, 2000, 96, 4, 48, 1, characters=600)
LONG = Scale(600, 5000, 256, 32, 64, 5)


@dataclasses.dataclass
class Watched:
    """What was seen of the slot while the sink was down.

    Attributes:
        retained: The most log that it retained, in bytes.
        states: The states that it had (`wal_status`).
        alerted_at: How much it retained when status first warned; None if it never did.
    """

    retained: int = 0
    states: set[str] = dataclasses.field(default_factory=set)
    alerted_at: int | None = None


class Outage:
    """A pipeline under load whose sink is down.

    Args:
        server: Its source.
        folder: Has the pipeline file, state, journal and lines.
        spark: The Spark server.
        scale: How much of everything.
    """

    def __init__(
        self, server: PostgresServer, folder: Path, spark: SparkAddress, scale: Scale
    ) -> None:
        self.scale = scale
        self.dsn = server.create_database()
        self.lines = folder / "lines.jsonl"
        self.fault = folder / "faults" / "lines"
        self.fault.parent.mkdir()
        self.file = folder / "down.yaml"
        self.file.write_text(
            PIPELINE.format(
                dsn=self.dsn,
                lines=self.lines,
                above=scale.above * MIB,
                look_seconds=scale.look_seconds,
            )
        )
        self.environment = {
            "DELTAFORGE_HOME": str(folder / "home"),
            "DELTAFORGE_SINK_FAULTS": str(self.fault.parent),
            **spark.settings(folder / "home"),
        }
        self.store = StateStore.open(Settings.from_env(self.environment).state_url)
        self.written = 0
        self.watched = Watched()
        self._runs = 0
        self._run: ForkServerProcess | None = None
        self._over = threading.Event()
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute("CREATE TABLE changes (id bigint PRIMARY KEY, v text)")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        if self._run is not None:
            self._run.kill()
            self._run.join()
        self.store.close()

    def begin(self, *, until_caught_up: bool = False) -> ForkServerProcess:
        """Begin a run, after the one before was killed or has ended."""
        if self._run is not None:
            self._run.kill()
            self._run.join()
        self._runs += 1
        run_id = f"run-{self._runs}"
        self._run = child.start(
            self.file, self.environment, run_id, until_caught_up=until_caught_up
        )
        return self._run

    def last(self) -> None:
        """Let everything be written, the sink down and runs killed all the while; then the sink is back."""
        watcher = threading.Thread(target=self._watch)
        watcher.start()
        try:
            with psycopg.connect(self.dsn, autocommit=True) as connection:
                self._write(connection)
                eventually(
                    lambda: self._early_after_more(connection), what="the early confirmation"
                )
                eventually(
                    lambda: self._freed(connection),
                    what="the log that the server frees while the sink is down",
                )
        finally:
            self._over.set()
            watcher.join()
        assert not self.lines.exists()
        self.fault.unlink()
        eventually(
            lambda: not self._early() and self._delivered(), seconds=1800, what="the deliveries"
        )

    def _write(self, connection: psycopg.Connection) -> None:
        self.begin()
        began = time.monotonic()
        kill_at = began + (self.scale.kill_seconds or math.inf)
        while (now := time.monotonic()) < began + self.scale.seconds:
            self._insert(connection)
            if now >= kill_at:
                kill_at += self.scale.kill_seconds or math.inf
                self.begin()
            due = began + self.written / self.scale.rate
            time.sleep(max(0.0, due - time.monotonic()))

    def _insert(self, connection: psycopg.Connection) -> None:
        rows = self.scale.rate // BATCHES
        connection.execute(
            "INSERT INTO changes SELECT n, repeat(md5(n::text), %s) FROM generate_series(%s::int8, %s) n",
            (self.scale.characters // 32, self.written + 1, self.written + rows),
        )
        self.written += rows

    def _early(self) -> bool:
        return self.store.pipelines.early_confirmation("down") is not None

    def _delivered(self) -> bool:
        """Whether everything that was written is captured, and in the sink."""
        row = self.store.pipelines.get("down")
        assert row is not None
        captured = sum(one.rows for one in self.store.ranges.read("down"))
        whole = self.store.checkpoints.read("down")["lines"].whole_segment
        return captured >= self.written and whole == row.next_segment - 1

    def _watch(self) -> None:
        loaded = load_pipeline(self.file)
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            while not self._over.wait(0.2):
                retained, state = self._retained(connection)
                self.watched.retained = max(self.watched.retained, retained)
                self.watched.states.add(state)
                problems = health(self.store, loaded).problems
                if any(one.subject in {"source log", "confirm"} for one in problems):
                    self.watched.alerted_at = self.watched.alerted_at or retained

    def _early_after_more(self, connection: psycopg.Connection) -> bool:
        """Whether the log is confirmed early; a busy machine has written less than the threshold."""
        self._insert(connection)
        return self._early()

    def _freed(self, connection: psycopg.Connection) -> bool:
        """Whether the slot retains little, after some more changes.

        The server forgets what was confirmed with a record of running transactions, which a
        checkpoint writes; it ignores such a record while the one before is not confirmed. It may
        be in the last of the log, of which too little is unconfirmed to be confirmed early: hence
        the changes.
        """
        self._insert(connection)
        connection.execute("CHECKPOINT")
        return self._retained(connection)[0] < self.scale.above * MIB

    @staticmethod
    def _retained(connection: psycopg.Connection) -> tuple[int, str]:
        row = connection.execute(
            "SELECT pg_current_wal_lsn() - restart_lsn, wal_status FROM pg_replication_slots"
            " WHERE slot_name = 'down'"
        ).fetchone()
        assert row is not None
        assert row[0] is not None, row
        return int(row[0]), str(row[1])

    def ids(self) -> Iterator[int]:
        """Yield the keys in the sink, in order."""
        with self.lines.open() as file:
            for line in file:
                yield json.loads(line)["after"]["id"]


@pytest.mark.parametrize(
    "scale",
    [
        pytest.param(SHORT, id="short"),
        pytest.param(
            LONG, id="ten minutes", marks=[pytest.mark.soak("log"), pytest.mark.timeout(5400)]
        ),
        pytest.param(
            dataclasses.replace(LONG, kill_seconds=60.0),
            id="ten minutes, killed",
            marks=[pytest.mark.soak("log"), pytest.mark.timeout(5400)],
        ),
    ],
)
def test_the_primary_keeps_little_log(
    start_postgres: StartPostgres, spark_server: SparkAddress, tmp_path: Path, scale: Scale
) -> None:
    """The slot is never near its limit, status warns before half of it, and the sink then gets everything, in order."""
    server = start_postgres(
        {
            "max_slot_wal_keep_size": f"{scale.limit}MB",
            "max_wal_size": "128MB",
            "checkpoint_timeout": "30s",
        }
    )
    with Outage(server, tmp_path, spark_server, scale) as outage:
        first = outage.begin(until_caught_up=True)
        first.join()
        assert first.exitcode == 0
        outage.fault.write_text("fail_before")
        outage.last()

        watched = outage.watched
        assert watched.states <= {"reserved", "extended"}
        assert watched.retained < scale.most * MIB
        assert watched.alerted_at is not None
        assert watched.alerted_at < scale.limit * MIB / 2
        expected = 0
        for number in outage.ids():
            assert number <= expected + 1, f"{number} follows {expected}"
            expected = max(expected, number)
        assert expected == outage.written
        segments = outage.store.segments.read("down")
        size = sum(one.bytes for one in segments)
        print(  # noqa: T201 - what docs/operations.md extrapolates
            f"{outage.written:,} changes, most log {watched.retained / MIB:.1f} MiB, warned at "
            f"{watched.alerted_at / MIB:.1f} MiB, journal {size / outage.written * 1e6 / MIB:.1f} MiB per million"
        )
