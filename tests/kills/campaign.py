"""A campaign: one pipeline under load, and runs of it that are killed one after the other."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
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
from tests.kills import child
from tests.kills.checker import Life, Verdict, check_delivery, check_repeats
from tests.kills.ends import Database, Destination
from tests.kills.workload import Workload

PIPELINE = """\
metadata: {{name: kills, tenant: acme}}
spec:
  source: {source}
  sinks:
    - {sink}
  engine:
    run: {{idle_seconds: 300, lease_seconds: 2, renew_seconds: 0.5}}
    range: {{max_seconds: 1}}
    deliver: {{backoff_initial_seconds: 0.2, backoff_max_seconds: 1}}
"""

NAME = "kills"


@dataclass(frozen=True, slots=True)
class Observed:
    """What the source had forgotten at one moment, and what the sink had right after it."""

    confirmed: int
    lengths: tuple[int, ...]


@dataclass
class Campaign:
    """A pipeline from `database` to `destination`, and its runs.

    Attributes:
        folder: Holds the pipeline file, the state and the journal.
        exactly_once: Whether the sink keeps its own position.
        lives: The runs that have ended.
        observed: What a watcher saw of the source's confirmed position.
    """

    folder: Path
    database: Database
    destination: Destination
    exactly_once: bool
    spark_remote: str | None
    seed: int = 0
    lives: list[Life] = field(default_factory=list)
    observed: list[Observed] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.file = self.folder / f"{NAME}.yaml"
        self.file.write_text(
            PIPELINE.format(
                source=self.database.source(NAME),
                sink=self.destination.sink(exactly_once=self.exactly_once),
            )
        )
        self.environment = {"DELTAFORGE_HOME": str(self.folder / "home")}
        if self.spark_remote is not None:
            self.environment["DELTAFORGE_SPARK_REMOTE"] = self.spark_remote
        self.settings = Settings.from_env(self.environment)
        self.store = StateStore.open(self.settings.state_url)
        self.journal = Journal(self.settings.journal_url)
        self.rng = random.Random(self.seed)
        self.workload = Workload([self.database.connect() for _ in range(2)], self.seed)
        self._children: list[ForkServerProcess] = []
        self._began: tuple[int, tuple[int, ...]] = (0, ())
        self._began_at = 0.0

    @contextmanager
    def under_load(self) -> Iterator[None]:
        """Fix where the pipeline starts, then write, and watch what the source forgets."""
        self.begin(until_caught_up=True)
        self.ended("catching up with nothing")
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

    def begin(self, step: str | None = None, *, until_caught_up: bool = False) -> ForkServerProcess:
        """Start a run, which dies or stops at a failpoint if `step` names one."""
        self.destination.settle()
        self._began = (self.acknowledged(), self.destination.lengths())
        environment = self.environment | ({} if step is None else {VARIABLE: step})
        run_id = f"run-{len(self._children) + 1}"
        self._began_at = time.monotonic()
        self._children.append(
            child.start(self.file, environment, run_id, until_caught_up=until_caught_up)
        )
        return self._children[-1]

    def ended(self, how: str, seconds: float = 60) -> int | None:
        """Wait for the end of the run that was started last; return its exit code."""
        process = self._children[-1]
        process.join(seconds)
        assert process.exitcode is not None, f"{how}: not in {seconds:.0f} s\n{self.report()}"
        outcome = self.outcome(process)
        assert "broken" not in outcome, f"{outcome['broken']}\n{self.report()}"
        if process.exitcode == 0:
            how = f"{outcome.get('reason')}: {outcome.get('error') or outcome.get('capture_error')}"
        self.lives.append(Life(how, time.monotonic() - self._began_at, *self._began))
        return process.exitcode

    def kill_at(self, step: str) -> None:
        """Let runs begin until one has died at a failpoint."""
        deadline = time.monotonic() + 120
        while True:
            self.begin(step)
            if self.ended(step) == -signal.SIGKILL:
                return
            # It lost its lease on a busy machine before it got there.
            assert time.monotonic() < deadline, f"{step} was not reached\n{self.report()}"

    def kill_at_random(self) -> None:
        """Let a run work for a moment, and kill it."""
        process = self.begin()
        self.wait_until_held()
        moment = self.rng.uniform(0, 2.5)
        process.join(moment)
        process.kill()
        self.ended(f"SIGKILL after {moment:.2f} s")

    def wait_until_held(self) -> None:
        """Wait until the run that was started last holds the lease, or has ended."""
        name = self._children[-1].name

        def held() -> bool:
            lease = self.store.lease(NAME)
            return lease is not None and lease.run_id == name

        eventually(
            lambda: held() or self._children[-1].exitcode is not None, what="the run", every=0.01
        )

    def catch_up(self) -> dict[str, Any]:
        """Let a run deliver everything that is there, and return its outcome."""
        deadline = time.monotonic() + 180
        while True:
            process = self.begin(until_caught_up=True)
            assert self.ended("the end of its work", 120) == 0, self.report()
            outcome = self.outcome(process)
            if outcome.get("reason") == "caught up" and not outcome["behind"]:
                return outcome
            assert time.monotonic() < deadline, f"{outcome}\n{self.report()}"

    def outcome(self, process: ForkServerProcess) -> dict[str, Any]:
        """Return how a run ended by its own account; nothing when it was killed."""
        report = self.folder / f"{process.name}.json"
        return dict(json.loads(report.read_text())) if report.exists() else {}

    def check(self) -> Verdict:
        """Prove what must hold of everything that arrived, once nothing is behind."""
        self.destination.settle()
        partitions = self.destination.arrived()
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
        checkpoint = self.store.checkpoints(NAME).get("sink")
        if checkpoint is None:
            return 0
        rows = self.store.segments(NAME, last=checkpoint.whole_segment)
        partial = 0 if checkpoint.complete else checkpoint.ordinal + 1
        return sum(row.rows for row in rows) + partial

    def journaled(self) -> list[str]:
        """Return the event id of every captured change, in log order."""
        batches = [
            batch
            for row in self.store.segments(NAME)
            for batch in self.journal.batches(row, ["event_id"])
        ]
        return [str(one) for one in pa.Table.from_batches(batches)["event_id"].to_pylist()]

    def report(self) -> str:
        """Return what happened, life by life."""
        lines = [f"{self.workload.rows} changes, seed {self.seed}, lives:"]
        lines += [
            f"  began with {life.acknowledged} acknowledged, {sum(life.lengths)} messages in the "
            f"sink; lived {life.seconds:.1f} s; ended by {life.ended}"
            for life in self.lives
        ]
        return "\n".join(lines)

    def close(self) -> None:
        """End every run, also a stopped one."""
        for process in self._children:
            if process.exitcode is None:
                process.kill()
                process.join()
            process.close()
        self.store.close()

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(0.05):
            confirmed = self.database.confirmed()
            if confirmed is not None:
                self.observed.append(Observed(confirmed, self.destination.lengths()))

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


def stopped(pid: int) -> bool:
    """Say whether a process is stopped by a signal."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def signal_to(process: ForkServerProcess, number: signal.Signals) -> None:
    """Send a signal to a run."""
    assert process.pid is not None
    os.kill(process.pid, number)
