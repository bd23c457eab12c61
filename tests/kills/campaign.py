"""A campaign: one pipeline under load, and runs of it that are killed one after the other."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pyarrow as pa

from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.failpoints import VARIABLE
from deltaforge_dagster.state.store import StateStore
from tests.e2e.deployment import eventually
from tests.fix_spark import SparkAddress
from tests.kills import child
from tests.kills.checker import Life, Verdict, check_delivery, check_repeats
from tests.kills.ends import Database, Destination, parse
from tests.kills.workload import Workload

PIPELINE = """\
metadata: {{name: {name}, tenant: acme}}
spec:
  source: {source}
  sinks:
    - {sink}
  engine:
    run: {{idle_seconds: 300, lease_seconds: {lease_seconds}, renew_seconds: 0.5}}
    range: {{max_seconds: 1}}
    deliver: {{backoff_initial_seconds: 0.2, backoff_max_seconds: 1}}
"""

PATIENCE_SECONDS = 1800.0
"""What ends a hang; on a machine with other work, runs take many times as long."""

BACKLOG_ROWS = 20_000
"""The writers wait while the sink lacks more than this."""


def lease_seconds() -> int:
    """Return how short a lease can be on this machine: a process that is ready waits for its turn, and must still renew it."""
    return max(2, round(os.getloadavg()[0] / (os.cpu_count() or 1)))


@dataclass(frozen=True, slots=True)
class Observed:
    """What the source had forgotten at one moment, and what the sink had right after it."""

    confirmed: int
    lengths: tuple[int, ...]


@dataclass(slots=True)
class Run:
    """One run: its process, its life, and the file of its outcome."""

    process: ForkServerProcess
    life: Life
    report: Path
    began_at: float = field(default_factory=time.monotonic)

    @property
    def outcome(self) -> dict[str, Any]:
        """How it ended by its own account; nothing when it was killed."""
        return dict(json.loads(self.report.read_text())) if self.report.exists() else {}

    def wait_until_stopped(self) -> bool:
        """Wait until it is stopped by a signal; say no when it has ended instead."""
        stat = Path(f"/proc/{self.process.pid}/stat")

        def stopped() -> bool:
            with contextlib.suppress(OSError):  # it ended just now
                return stat.read_text().rpartition(")")[2].split()[0] == "T"
            return False

        eventually(
            lambda: self.process.exitcode is not None or stopped(), what="the stop", every=0.02
        )
        return self.process.exitcode is None

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, if it has not ended."""
        assert self.process.pid is not None
        if self.process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):  # it ended just now
                os.kill(self.process.pid, number)


@dataclass
class Campaign:
    """A pipeline from `database` to `destination`, and its runs.

    Attributes:
        folder: Holds the pipeline file, the state and the journal.
        exactly_once: Whether the sink keeps its own position.
        spark: The Spark server; None for one of the campaign's own.
        by_spark: Whether Spark encodes few rows, too, in every run; otherwise it does in every second one.
        lease_seconds: The lease of its runs; a stall of the machine must not be as long.
        state_url: Where the state is; None for SQLite in the folder.
        moves: Whether rows get other keys.
        reshapes: Whether the table is emptied, gets more columns, and these get other names, by a single writer.
        body: The most characters that a row's text has.
        chunk_rows: How many rows a snapshot's chunk has.
        lives: The runs that have ended.
        observed: What a watcher saw of the source's confirmed position.
        name: The pipeline's; no other campaign's, whose position a shared sink still holds.
    """

    folder: Path
    database: Database
    destination: Destination
    exactly_once: bool
    spark: SparkAddress | None
    seed: int
    by_spark: bool = False
    lease_seconds: int = field(default_factory=lease_seconds)
    state_url: str | None = None
    moves: bool = False
    reshapes: bool = False
    body: int = 300
    chunk_rows: int = 10_000
    lives: list[Life] = field(default_factory=list)
    observed: list[Observed] = field(default_factory=list)
    name: str = field(default_factory=lambda: f"kills_{uuid.uuid4().hex[:8]}")

    def __post_init__(self) -> None:
        self.file = self.folder / f"{self.name}.yaml"
        self.file.write_text(
            PIPELINE.format(
                name=self.name,
                source=self.database.source(self.name, chunk_rows=self.chunk_rows),
                sink=self.destination.sink(exactly_once=self.exactly_once),
                lease_seconds=self.lease_seconds,
            )
        )
        self.environment = {"DELTAFORGE_HOME": str(self.folder / "home")}
        if self.state_url is not None:
            self.environment["DELTAFORGE_STATE_URL"] = self.state_url
        if self.spark is not None:
            self.environment |= self.spark.settings(self.folder / "home")
        self.settings = Settings.from_env(self.environment)
        self.store = StateStore.open(self.settings.state_url)
        self.journal = Journal(self.settings.journal_url)
        self.rng = random.Random(self.seed)
        connections = [self.database.connect() for _ in range(1 if self.reshapes else 2)]
        self.workload = Workload(
            connections, self.seed, moves=self.moves, reshapes=self.reshapes, body=self.body
        )
        self._runs: list[Run] = []
        self._readers: list[ForkServerProcess] = []

    def fill(self, changes: int) -> None:
        """Let the writers write so much before the pipeline begins."""
        self.workload.start()
        self.workload.room.set()
        eventually(lambda: self.workload.rows >= changes, what="rows")
        self.workload.room.clear()

    @contextmanager
    def under_load(self) -> Iterator[None]:
        """Fix where the pipeline starts, then write, and watch what the source forgets."""
        self.catch_up()
        over = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(over,), daemon=True)
        watcher.start()
        self.workload.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()
            self.workload.stop()

    def begin(self, step: str | None = None, *, until_caught_up: bool = False) -> Run:
        """Start a run, which dies or stops at a failpoint if `step` names one."""
        self.destination.settle()
        self.lives.append(Life(self.acknowledged(), self.destination.lengths()))
        environment = self.environment | ({} if step is None else {VARIABLE: step})
        if self.by_spark or len(self._runs) % 2:
            environment |= {child.BY_SPARK: "1"}
        run_id = f"run-{len(self._runs) + 1}"
        process = child.start(self.file, environment, run_id, until_caught_up=until_caught_up)
        self._runs.append(Run(process, self.lives[-1], self.file.with_name(f"{run_id}.json")))
        return self._runs[-1]

    def begin_reader(self, step: str | None = None) -> ForkServerProcess:
        """Start a run that reads the unfinished snapshot, which dies at a failpoint if `step` names one."""
        environment = self.environment | ({} if step is None else {VARIABLE: step})
        run_id = f"reader-{len(self._readers) + 1}"
        process = child.start_reader(self.file, environment, run_id)
        self._readers.append(process)
        return process

    def kill_at(self, step: str) -> None:
        """Let runs begin until one has died at a failpoint."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.wait(self.begin(step), step) != -signal.SIGKILL:
            # It lost its lease on a busy machine before it got there.
            assert time.monotonic() < deadline, f"{step} was not reached\n{self.report()}"

    def kill_at_random(self) -> None:
        """Let a run take its lease, or deliver something, then work for a moment, and kill it."""
        if self.rng.random() < 0.3:
            run, since = self.begin(), "it took the lease"
            self.wait_until_held(run)
        else:
            run, since = self.begin_and_deliver(), "its first delivery"
        moment = self.rng.uniform(0, 2)
        run.process.join(moment)
        run.process.kill()
        self.wait(run, f"SIGKILL {moment:.2f} s after {since}")

    def begin_and_deliver(self) -> Run:
        """Let runs begin until one has delivered something; return it, alive."""
        return self.deliver_more(self.begin())

    def deliver_more(self, run: Run) -> Run:
        """Wait until a run, or one begun when it ends, delivers something; return it, alive."""
        before = self.destination.lengths()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.destination.lengths() == before:
            assert time.monotonic() < deadline, f"no delivery\n{self.report()}"
            if run.process.exitcode is not None:
                if not run.life.ended:
                    self.wait(run, "itself")
                run = self.begin()
            time.sleep(0.05)
        return run

    def end(self, run: Run) -> None:
        """Ask a run to end, and wait for it."""
        run.send(signal.SIGTERM)
        self.wait(run, "SIGTERM")

    def stop_at(self, step: str) -> Run:
        """Let runs begin until one has stopped itself at a failpoint; return it."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            run = self.begin(f"{step}:{self.rng.randint(2, 4)}=stop")
            if run.wait_until_stopped():
                run.life.ended = f"stopped at {step}"
                return run
            self.wait(run, step)
            assert time.monotonic() < deadline, f"{step} was not reached\n{self.report()}"

    def stop_at_random(self) -> Run:
        """Let a run work for a moment, stop it, and return it."""
        while True:
            run = self.begin()
            self.wait_until_held(run)
            moment = self.rng.uniform(0.5, 2.5)
            run.process.join(moment)
            if run.process.exitcode is None:
                run.send(signal.SIGSTOP)
                run.wait_until_stopped()
                run.life.ended = f"SIGSTOP {moment:.2f} s after it took the lease"
                return run
            self.wait(run, "itself")

    def wait_until_held(self, run: Run) -> None:
        """Wait until a run holds the lease, or has ended."""

        def held() -> bool:
            lease = self.store.leases.get(self.name)
            return lease is not None and lease.run_id == run.process.name

        eventually(lambda: held() or run.process.exitcode is not None, what="the run", every=0.01)

    def catch_up(self) -> None:
        """Let a run deliver everything that is there."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            run = self.begin(until_caught_up=True)
            assert self.wait(run, "its work") == 0, self.report()
            if run.outcome.get("reason") == "caught up" and not run.outcome["behind"]:
                return
            assert time.monotonic() < deadline, self.report()

    def wait(self, run: Run, how: str, seconds: float = PATIENCE_SECONDS) -> int:
        """Wait for the end of a run, by `how`; return its exit code."""
        run.process.join(seconds)
        assert run.process.exitcode is not None, f"{how}: not in {seconds:.0f} s\n{self.report()}"
        said = run.outcome
        assert "broken" not in said, f"{said['broken']}\n{self.report()}"
        if run.process.exitcode == 0:
            how = f"{said.get('reason')} ({said.get('error') or said.get('capture_error')})"
        run.life.ended = f"{how}, {time.monotonic() - run.began_at:.1f} s"
        return run.process.exitcode

    def check(self) -> Verdict:
        """Prove what must hold of everything that arrived, once nothing is behind."""
        self.destination.settle()
        partitions = [[parse(one) for one in each] for each in self.destination.values()]
        try:
            verdict = check_delivery(partitions, self.workload.expected())
            if self.exactly_once:
                assert verdict.repeats == 0
            else:
                check_repeats(partitions, self.journaled(), self.lives)
            self._check_confirmed(partitions)
        except AssertionError as error:
            error.add_note(self.report())
            raise
        return verdict

    def acknowledged(self) -> int:
        """Return how many changes of the journal the checkpoint covers."""
        checkpoint = self.store.checkpoints.read(self.name).get("sink")
        if checkpoint is None:
            return 0
        rows = self.store.segments.read(self.name, last=checkpoint.whole_segment)
        partial = 0 if checkpoint.complete else checkpoint.ordinal + 1
        return sum(row.rows for row in rows) + partial

    def journaled(self) -> list[str]:
        """Return the event id of every captured change, in log order."""
        batches = [
            batch
            for row in self.store.segments.read(self.name)
            for batch in self.journal.batches(row, ["event_id"])
        ]
        return [str(one) for one in pa.Table.from_batches(batches)["event_id"].to_pylist()]

    def report(self) -> str:
        """Return what happened, life by life."""
        lines = [f"{self.workload.rows} changes, seed {self.seed}, lives:"]
        lines += [
            f"  {life.acknowledged} acknowledged, {sum(life.lengths)} messages; ended: {life.ended}"
            for life in self.lives
        ]
        lines += [f"  now: {one}" for one in self.store.checkpoints.read(self.name).values()]
        return "\n".join(lines)

    def close(self) -> None:
        """End every run, also a stopped one."""
        for process in [*(run.process for run in self._runs), *self._readers]:
            process.kill()
            process.join()
            process.close()
        self.store.close()

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(0.05):
            confirmed = self.database.confirmed()
            lengths = self.destination.lengths()
            if confirmed is not None:
                self.observed.append(Observed(confirmed, lengths))
            # A table's length is its commits.
            if (
                self.workload.rows - sum(lengths) < BACKLOG_ROWS
                or self.workload.rows - self.acknowledged() < BACKLOG_ROWS
            ):
                self.workload.room.set()
            else:
                self.workload.room.clear()

    def _check_confirmed(self, partitions: list[list[Any]]) -> None:
        """Prove that the source never forgot a change that the sink did not have."""
        first: dict[Any, tuple[int, int]] = {}
        for number, partition in enumerate(partitions):
            for place, one in enumerate(partition):
                first.setdefault(one.change, (number, place))
        for committed in self.workload.committed():
            places = [first[change] for change in committed.changes]
            for seen in self.observed:
                if seen.confirmed < committed.log_end:
                    continue
                missing = [
                    change
                    for change, (number, place) in zip(committed.changes, places, strict=True)
                    if place >= seen.lengths[number]
                ]
                assert not missing, f"{seen.confirmed:X} was confirmed, {missing[:3]} had not come"
                break  # the sink only grows
