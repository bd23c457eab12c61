"""The run's own code in a child process, made to be killed.

Children are forked from a server process that has imported everything and has machine code for
the kernels, so that one starts in a moment. Each is a process of its own with threads, connections
and files of its own, and SIGKILL ends it as it would end a Dagster run's.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.pipeline.control.closed_ranges import pending
from deltaforge_dagster.pipeline.encode import encoder
from deltaforge_dagster.pipeline.failpoints import failpoint
from deltaforge_dagster.pipeline.run.live import LiveRun, RunOutcome
from deltaforge_dagster.pipeline.run_context import RunOptions
from deltaforge_dagster.pipeline.snapshots.read import SnapshotRun
from deltaforge_dagster.resources.platform import Platform
from deltaforge_dagster.resources.run_context import build_run_context
from deltaforge_dagster.state.store import StateStore

BY_SPARK = "TESTS_BY_SPARK"
"""Environment variable: Spark encodes every segment of the run, however few rows it has."""

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["pytest", "tests.kills.preload"])


class Publisher:
    """Publishes as Dagster does: the event first, here a line of a file, then the row."""

    def __init__(self, store: StateStore, pipeline: str, events: Path) -> None:
        self._store = store
        self._pipeline = pipeline
        self._events = events

    def range_opened(self, number: int) -> None:
        """Nobody is told."""

    def warn(self, message: str) -> None:
        """Nobody is told."""

    def publish(self) -> None:
        """Publish what is due."""
        for one in pending(self._store, self._pipeline):
            with self._events.open("a") as file:
                file.write(f"{one.range} {one.asset}\n")
            failpoint("range-published")
            self._store.ranges.mark_published(self._pipeline, one.range, one.asset)


def start(
    pipeline: Path, environment: Mapping[str, str], run_id: str, *, until_caught_up: bool = False
) -> ForkServerProcess:
    """Start a run; its outcome, or `{"error": ...}`, will be in `<run id>.json` beside the file."""
    process = CONTEXT.Process(
        target=_execute, args=(pipeline, dict(environment), run_id, until_caught_up), name=run_id
    )
    process.start()
    return process


def start_reader(pipeline: Path, environment: Mapping[str, str], run_id: str) -> ForkServerProcess:
    """Start a run that reads the pipeline's unfinished snapshot; what ends it is its exit code."""
    process = CONTEXT.Process(target=_read, args=(pipeline, dict(environment)), name=run_id)
    process.start()
    return process


def _read(pipeline: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    loaded = load_pipeline(pipeline)
    with Platform(Settings.from_env()).open() as opened:
        context = build_run_context(opened, loaded)
        SnapshotRun(loaded, context, warn=lambda _: None, progress=lambda _: None).execute()


def _execute(
    pipeline: Path, environment: dict[str, str], run_id: str, until_caught_up: bool
) -> None:
    os.environ.update(environment)
    if BY_SPARK in os.environ:
        encoder.SMALL_ROWS = -1
    report = pipeline.with_name(f"{run_id}.json")
    try:
        outcome = dataclasses.asdict(_work(pipeline, run_id, until_caught_up))
    except DeltaforgeError as error:
        outcome = {"error": str(error)}
    except BaseException:
        report.write_text(json.dumps({"broken": traceback.format_exc()}))
        raise
    report.write_text(json.dumps(outcome))


def _work(pipeline: Path, run_id: str, until_caught_up: bool) -> RunOutcome:
    loaded = load_pipeline(pipeline)
    with Platform(Settings.from_env()).open() as opened:
        while True:
            run = LiveRun(
                loaded,
                build_run_context(opened, loaded),
                RunOptions(
                    run_id,
                    Publisher(opened.store, loaded.name, pipeline.with_suffix(".published")),
                    until_caught_up=until_caught_up,
                ),
            )
            signal.signal(signal.SIGTERM, lambda *_, run=run: run.request_end())
            outcome = run.execute()
            if outcome.had_lease:
                return outcome
            time.sleep(0.1)  # the lease of the one before has not expired yet
