"""`deltaforge bench capture`: capture a backlog into the journal without delivering it.

One thread reads, decodes and journals, as in a run, in segments as large as the defaults allow.
With `--parallel`, Spark tasks do this, as in a run whose sinks wait for the backlog.

The limit is the same log received by a client that discards the bytes. The ratio of the two rates
shows the cost of capturing when the server is the bottleneck. The processor seconds show the cost
otherwise, even on a busy machine.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.installation.spark_server import SparkServer
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.capture.backlog import Backlog
from deltaforge_dagster.pipeline.capture.capture import Capture, CaptureOptions
from deltaforge_dagster.pipeline.capture.committer import Ranges
from deltaforge_dagster.pipeline.control.work import register
from deltaforge_dagster.pipeline.run_context import ActiveLease, LeasedRun
from deltaforge_dagster.resources.platform import build_source
from deltaforge_dagster.resources.spark import SparkSessions
from deltaforge_dagster.sources.base import SectionedSource, Source
from deltaforge_dagster.state.store import StateStore
from deltaforge_lab.bench.cost.processes import Sampler
from deltaforge_lab.bench.drain import progress
from deltaforge_lab.bench.installation import Say
from deltaforge_lab.bench.results import show
from deltaforge_lab.bench.shapes import SHAPES, Shape
from deltaforge_lab.bench.sources import STARTS, BenchSource

_PIPELINE = """\
metadata: {{name: bench, tenant: acme}}
spec:
  source: {source}
  sinks: [{{type: file, config: {{id: unused, path: unused}}}}]
"""
_WARM_ROWS = 20_000
_WARM_PARALLEL = 1_000_000
_PATIENCE = 60.0
_LOOK_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class CaptureResult:
    """The measured values.

    Attributes:
        source: `postgres` or `mysql`.
        rows: Changes of the backlog.
        shape: Shape of its table.
        rows_per_second: Changes read, decoded and journaled per second of wall-clock time.
        raw_rows_per_second: Changes received and discarded per second of wall-clock time.
        ratio: `rows_per_second / raw_rows_per_second`.
        cpu_seconds_per_million: Processor seconds of the capturing process and of the server, per
            million changes.
        raw_cpu_seconds_per_million: The same while the bytes are discarded.
        segments: Number of segments of the backlog.
        parallel_segments: Number of those segments that Spark tasks wrote.
        journal_bytes: Total size of their files.
        cores: Processors that this process may use.
    """

    source: str
    rows: int
    shape: str
    rows_per_second: int
    raw_rows_per_second: int
    ratio: float
    cpu_seconds_per_million: dict[str, float]
    raw_cpu_seconds_per_million: dict[str, float]
    segments: int
    parallel_segments: int
    journal_bytes: int
    cores: int


def capture(
    *,
    source: Annotated[
        Literal["postgres", "mysql"], typer.Option(help="Database whose log is captured.")
    ] = "postgres",
    rows: Annotated[
        int, typer.Option(min=1_000, help="Number of changes in the backlog.")
    ] = 1_000_000,
    shape: Annotated[
        Literal["orders6", "wide10"], typer.Option(help="Columns of the table.")
    ] = "wide10",
    parallel: Annotated[
        bool, typer.Option(help="Read the backlog with Spark tasks (MySQL only).")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on the last line.")
    ] = False,
) -> None:
    """Measure capturing a backlog into the journal: rate, cost, limit of receiving the log."""
    with progress(quiet=as_json) as say:
        result = measure(source, rows, SHAPES[shape], say, parallel=parallel)
    show(result, f"capture from {source}, {rows:,} changes {shape}", as_json=as_json)


def measure(
    kind: Literal["postgres", "mysql"], rows: int, shape: Shape, say: Say, *, parallel: bool
) -> CaptureResult:
    """Start a server, capture a backlog of `rows` changes, and read it raw.

    Raises:
        DeltaforgeError: The server does not start, or not every change was captured.
    """
    with ExitStack() as owned:
        folder = Path(owned.enter_context(tempfile.TemporaryDirectory(prefix="df-capture-")))
        say("starting the server")
        server = owned.enter_context(closing(STARTS["pg" if kind == "postgres" else kind]()))
        server.create(shape)
        groups = {"capture": os.getpid(), "source": server.server.pid}
        sessions = None
        if parallel:
            say("starting Spark")
            spark = SparkServer.ensure(folder)
            owned.callback(spark.stop)
            settings = Settings.from_env({"DELTAFORGE_HOME": str(folder)})
            sessions = SparkSessions(settings, None, lambda _session_id: None)
            groups["spark"] = spark.pid
        bench = owned.enter_context(closing(_Bench(server, folder, sessions)))
        warm = max(_WARM_ROWS, min(rows // 2, _WARM_PARALLEL)) if parallel else _WARM_ROWS
        say(f"warming up: {warm:,} changes")
        _fill(server, 1, warm)
        bench.capture(warm)
        before = bench.journal_bytes
        server.begin_backlog()
        for written in server.write(1 + warm, rows):
            say(f"filling the backlog: {written:,} of {rows:,} rows")
        server.end_backlog()
        say(f"capturing {rows:,} changes")
        with Sampler(groups, alone="capture", together=("capture",)) as captured:
            seconds, segments, of_tasks = bench.capture(rows)
        say("reading the raw log")
        with Sampler(groups, alone="capture", together=("capture",)) as raw:
            raw_seconds = server.read_raw()
        return CaptureResult(
            source=kind,
            rows=rows,
            shape=shape.name,
            rows_per_second=round(rows / seconds),
            raw_rows_per_second=round(rows / raw_seconds),
            ratio=round(raw_seconds / seconds, 3),
            cpu_seconds_per_million=_per_million(captured.cpu_seconds(), rows),
            raw_cpu_seconds_per_million=_per_million(raw.cpu_seconds(), rows),
            segments=segments,
            parallel_segments=of_tasks,
            journal_bytes=bench.journal_bytes - before,
            cores=len(os.sched_getaffinity(0)),
        )


class _Bench:
    """A pipeline that captures from one server repeatedly, each time from where it last ended.

    Args:
        server: The server.
        folder: Directory of the journal.
        sessions: The Spark sessions whose tasks read backlogs; None to read with one thread.
    """

    def __init__(self, server: BenchSource, folder: Path, sessions: SparkSessions | None) -> None:
        path = folder / "pipeline.yaml"
        path.write_text(_PIPELINE.format(source=server.block))
        self._loaded = load_pipeline(path)
        self._journal = Journal(f"file://{folder}/journal")
        self._sessions = sessions
        self._store = StateStore.open("memory")
        register(self._store, self._loaded)
        with closing(self._source()) as source:
            start = source.ensure_start()
            self._store.pipelines.set_start(
                self._loaded.name, start.to_json(), source.definitions(start)
            )

    def close(self) -> None:
        """Close the state store."""
        self._store.close()

    def capture(self, rows: int) -> tuple[float, int, int]:
        """Capture `rows` changes.

        Returns:
            The seconds, the number of segments, and how many of them tasks wrote.
        """
        name, spec = self._loaded.name, self._loaded.spec
        row = self._store.pipelines.get(name)
        lease = ActiveLease.acquire(
            self._store, name, "bench", seconds=30, renew_seconds=5, on_renewal=lambda: None
        )
        assert row is not None
        assert lease is not None
        run = LeasedRun(self._store, self._journal, lease, warn=lambda _: None)
        # As in a run whose sinks are faster than capture: only the first segment is closed before
        # it is full.
        limits = spec.spec.engine.segment.model_copy(update={"min_ms": 1000})
        backlog = None
        if self._sessions is not None:
            backlog = Backlog(run, self._sessions, uid=row.uid, limits=limits)
            with closing(self._source()) as source:  # as an earlier delivering run would have done
                if isinstance(source, SectionedSource):
                    backlog.warm_up(source).result()
        began = time.monotonic()
        ranges = Ranges(
            self._store,
            lease,
            spec_hash=self._loaded.hash,
            limits=spec.spec.engine.range,
            opened=lambda _: None,
        )
        capture = Capture(
            run,
            CaptureOptions(
                row=row,
                limits=limits,
                source_id=spec.spec.source.config.id,
                tenant=spec.metadata.tenant,
            ),
            build_source=self._source,
            ranges=ranges,
            someone_waits=lambda: True,
            segment_wanted=lambda: True,
            captured=lambda _: None,
            backlog=backlog,
        )
        try:
            while capture.rows < rows and capture.error is None:
                if time.monotonic() - capture.moved_at > _PATIENCE:
                    break
                time.sleep(_LOOK_SECONDS)
        finally:
            seconds = capture.moved_at - began
            capture.stop()
            ranges.close("bench")
            lease.release()
        if capture.rows != rows:
            reason = capture.error or "nothing more came"
            raise DeltaforgeError(f"{capture.rows:,} of {rows:,} changes were captured; {reason}")
        return seconds, capture.segments, 0 if backlog is None else backlog.segments

    @property
    def journal_bytes(self) -> int:
        """Size of the journal."""
        return self._store.segments.total_bytes(self._loaded.name)

    def _source(self) -> Source:
        return build_source(self._loaded.spec)


def _per_million(seconds: Mapping[str, float], rows: int) -> dict[str, float]:
    return {name: round(used / rows * 1e6, 3) for name, used in seconds.items()}


def _fill(server: BenchSource, first: int, rows: int) -> None:
    for _ in server.write(first, rows):
        pass
