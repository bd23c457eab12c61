"""A separate installation for one benchmark: a home directory, Spark, and one pipeline.

Runs execute in this process without Dagster, as `deltaforge run` executes them within its Dagster
job. Dagster's processes do no work per event, so leaving them out does not change the results.
"""

from __future__ import annotations

import dataclasses
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from deltaforge_dagster.config.file.load import LoadedPipeline, load_pipeline
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.installation.spark_server import SparkServer
from deltaforge_dagster.pipeline.control.closed_ranges import pending
from deltaforge_dagster.pipeline.run.live import LiveRun, RunOutcome
from deltaforge_dagster.pipeline.run_context import RunContext, RunOptions
from deltaforge_dagster.resources.platform import Opened, Platform
from deltaforge_dagster.resources.run_context import build_run_context
from deltaforge_dagster.sinks.base import SendGuard, Sink, SinkBatch
from deltaforge_dagster.state.store import StateStore
from deltaforge_lab.bench.sources import BenchSource

PIPELINE = "bench"

Say = Callable[[str], None]


class Installation:
    """An open installation with one pipeline, from a source to a sink.

    Attributes:
        acknowledged: What the sink has acknowledged since `acknowledged.reset()`.
        spark: The Spark server.
        context: The context of its runs.
    """

    def __init__(self, opened: Opened, loaded: LoadedPipeline, spark: SparkServer) -> None:
        self.spark = spark
        self.acknowledged = Acknowledged()
        self._opened = opened
        self._loaded = loaded
        context = build_run_context(opened, loaded)
        self.context: RunContext = dataclasses.replace(
            context,
            build_sink=lambda sink_id: _RecordingSink(
                context.build_sink(sink_id), self.acknowledged
            ),
        )

    @property
    def store(self) -> StateStore:
        """The state store."""
        return self._opened.store

    @property
    def loaded(self) -> LoadedPipeline:
        """The pipeline."""
        return self._loaded

    def run(self, *, until_caught_up: bool) -> LiveRun:
        """Return a run that has not started yet."""
        observer = _Publisher(self.store)
        run_id = str(uuid.uuid4())
        options = RunOptions(run_id, observer, until_caught_up=until_caught_up)
        return LiveRun(self._loaded, self.context, options)

    def catch_up(self, timeout: float | None = None) -> RunOutcome:
        """Execute a run until everything is captured and delivered, or for `timeout` seconds."""
        run = self.run(until_caught_up=True)
        clock = threading.Timer(timeout or 0, run.request_end, ["asked"])
        if timeout is not None:
            clock.start()
        try:
            return run.execute()
        finally:
            clock.cancel()


class Acknowledged:
    """How many messages a sink has acknowledged, and when (`time.monotonic`)."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset the counts."""
        self.rows = self.first_rows = 0
        self.first_at = self.last_at = 0.0

    def add(self, rows: int) -> None:
        """Record that a batch of `rows` messages was acknowledged now."""
        now = time.monotonic()
        if not self.rows:
            self.first_at, self.first_rows = now, rows
        self.rows += rows
        self.last_at = now


class _RecordingSink:
    """Wraps a sink and records its acknowledgements."""

    def __init__(self, sink: Sink, acknowledged: Acknowledged) -> None:
        self._sink = sink
        self._acknowledged = acknowledged

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sink, name)

    def send(self, batch: SinkBatch, guard: SendGuard) -> int:
        """Send the batch and record its acknowledgement."""
        last = self._sink.send(batch, guard)
        self._acknowledged.add(batch.num_rows)
        return last


class _SinkBlock(Protocol):
    """A sink that can return its entry in the pipeline file."""

    def block(self, *, exactly_once: bool) -> str:
        """Return the entry, in YAML's flow style."""


class _Publisher:
    """An observer that marks ranges as published at once, in place of Dagster."""

    def __init__(self, store: StateStore) -> None:
        self._store = store

    def range_opened(self, number: int) -> None:
        """Do nothing."""

    def warn(self, message: str) -> None:
        """Do nothing."""

    def publish(self) -> None:
        """Mark everything that is due as published."""
        for publication in pending(self._store, PIPELINE):
            self._store.ranges.mark_published(PIPELINE, publication.range, publication.asset)


@contextmanager
def installed(
    source: BenchSource,
    sink: _SinkBlock,
    *,
    exactly_once: bool = False,
    sensing: bool = False,
    max_bytes: int | None = None,
    jars: Sequence[Path] = (),
    say: Say,
) -> Iterator[Installation]:
    """Yield an installation in a temporary directory, with Spark running and a fixed start.

    `max_bytes` is the value of `spec.batch.max_bytes`, and `jars` are Spark's.
    """
    with ExitStack() as owned:
        home = Path(owned.enter_context(tempfile.TemporaryDirectory(prefix="deltaforge-bench-")))
        say("starting Spark")
        spark = SparkServer.ensure(home, jars=jars)
        owned.callback(spark.stop)
        file = home / f"{PIPELINE}.yaml"
        file.touch(mode=0o600)
        file.write_text(
            f"metadata: {{name: {PIPELINE}, tenant: bench}}\n"
            f"spec:\n  source: {source.block}\n"
            f"  sinks: [{sink.block(exactly_once=exactly_once)}]\n"
            f"  schema_sensing: {{enabled: {str(sensing).lower()}}}\n"
            + (f"  batch: {{max_bytes: {max_bytes}}}\n" if max_bytes is not None else "")
        )
        settings = Settings.from_env({"DELTAFORGE_HOME": str(home)})
        opened = owned.enter_context(Platform(settings, single_process=True).open())
        installation = Installation(opened, load_pipeline(file), spark)
        say("compiling kernels; a first run fixes the start position")
        installation.catch_up()
        yield installation
