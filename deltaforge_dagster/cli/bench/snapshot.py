"""`deltaforge bench snapshot`: a table read in chunks, as a snapshot's tasks read it, and nothing behind it.

Each reader is a process with a connection of its own, as Spark's workers are. Beside it stands the
limit: the same table, sent whole by the server to one client that throws the bytes away. The
readers' processor seconds say what their part costs, also on a busy machine.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from deltaforge_dagster.cli.bench.drain import progress
from deltaforge_dagster.cli.bench.installation import Say
from deltaforge_dagster.cli.bench.results import show
from deltaforge_dagster.cli.bench.shapes import SHAPES, Shape
from deltaforge_dagster.cli.bench.sources import STARTS
from deltaforge_dagster.config.load import load_pipeline
from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.sources.build import build_source
from deltaforge_dagster.sources.snapshot import Chunk, Snapshots, SnapshotSource

_PIPELINE = """\
metadata: {{name: bench, tenant: acme}}
spec:
  source: {source}
  sinks: [{{type: file, config: {{id: unused, path: unused}}}}]
"""
_WARM_ROWS = 1_000


@dataclass(frozen=True, slots=True)
class SnapshotResult:
    """What was measured.

    Attributes:
        source: `postgres` or `mysql`.
        rows: Rows of the table.
        shape: Its shape.
        readers: Processes that read chunks.
        chunks: Chunks of the plan.
        plan_seconds: How long planning took; not part of the rate.
        rows_per_second: Read and converted to the change frame, by the clock.
        raw_rows_per_second: Sent to one client and thrown away, by the clock.
        ratio: `rows_per_second / raw_rows_per_second`.
        cpu_seconds_per_million: Of all readers, per million rows.
        peak_rss_mb: Most memory of one reader.
        cores: Processors that this process may use.
    """

    source: str
    rows: int
    shape: str
    readers: int
    chunks: int
    plan_seconds: float
    rows_per_second: int
    raw_rows_per_second: int
    ratio: float
    cpu_seconds_per_million: float
    peak_rss_mb: int
    cores: int


def snapshot(
    *,
    source: Annotated[Literal["postgres", "mysql"], typer.Option(help="Whose table.")] = "postgres",
    rows: Annotated[int, typer.Option(min=1_000, help="Rows of the table.")] = 1_000_000,
    shape: Annotated[
        Literal["orders6", "wide10"], typer.Option(help="What the table looks like.")
    ] = "wide10",
    readers: Annotated[
        int, typer.Option(min=1, max=64, help="How many processes read chunks.")
    ] = 1,
    chunk_size: Annotated[int, typer.Option(min=100, help="Rows of a chunk.")] = 100_000,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on the last line.")
    ] = False,
) -> None:
    """Read a table in chunks: rate, cost, and the limit of the server's own sending."""
    with progress(quiet=as_json) as say:
        result = measure(source, rows, SHAPES[shape], say, readers=readers, chunk_rows=chunk_size)
    show(result, f"snapshot from {source}, {rows:,} rows {shape}", as_json=as_json)


def measure(
    kind: Literal["postgres", "mysql"],
    rows: int,
    shape: Shape,
    say: Say,
    *,
    readers: int,
    chunk_rows: int,
) -> SnapshotResult:
    """Start a server, read a table of `rows` rows in chunks, and read it raw.

    Raises:
        DeltaforgeError: The server does not start, or not every row was read.
    """
    with ExitStack() as owned:
        folder = Path(owned.enter_context(tempfile.TemporaryDirectory(prefix="df-snapshot-")))
        say("starting the server")
        server = owned.enter_context(closing(STARTS["pg" if kind == "postgres" else kind]()))
        server.create(shape)
        for written in server.write(1, rows):
            say(f"filling the table: {written:,} of {rows:,} rows")
        path = folder / "pipeline.yaml"
        path.write_text(_PIPELINE.format(source=server.block))
        source = owned.enter_context(closing(build_source(load_pipeline(path).spec)))
        assert isinstance(source, SnapshotSource)
        source.ensure_start()
        snapshots = source.snapshots()
        watermark = snapshots.watermark()
        began = time.monotonic()
        chunks = list(snapshots.plan(None, chunk_rows))
        plan_seconds = time.monotonic() - began
        pool = owned.enter_context(_pool(readers))
        say("warming up")
        _warm_up(pool, readers, snapshots, watermark)
        say(f"reading {rows:,} rows")
        began = time.monotonic()
        parts = [(snapshots, watermark, chunks[number::readers]) for number in range(readers)]
        done = list(pool.map(_read, parts))
        seconds = time.monotonic() - began
        if (found := sum(part.rows for part in done)) != rows:
            raise DeltaforgeError(f"{found:,} of {rows:,} rows were read")
        say("reading the raw table")
        raw_seconds = server.read_table_raw()
        return SnapshotResult(
            source=kind,
            rows=rows,
            shape=shape.name,
            readers=readers,
            chunks=len(chunks),
            plan_seconds=round(plan_seconds, 2),
            rows_per_second=round(rows / seconds),
            raw_rows_per_second=round(rows / raw_seconds),
            ratio=round(raw_seconds / seconds, 3),
            cpu_seconds_per_million=round(sum(part.cpu for part in done) / rows * 1e6, 3),
            peak_rss_mb=max(part.peak_rss_mb for part in done),
            cores=len(os.sched_getaffinity(0)),
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """What one reader has read: rows, seconds of processor time, its most memory."""

    rows: int
    cpu: float
    peak_rss_mb: int


def _pool(readers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(readers, multiprocessing.get_context("spawn"))


def _warm_up(pool: ProcessPoolExecutor, readers: int, snapshots: Snapshots, watermark: str) -> None:
    """Let every reader load its kernels: a small chunk each, twice, for one may take two."""
    small = next(iter(snapshots.plan(None, _WARM_ROWS)))
    list(pool.map(_read, [(snapshots, watermark, [small])] * readers * 2))


def _read(part: tuple[Snapshots, str, Sequence[Chunk]]) -> _Part:
    """Read chunks as a task does."""
    snapshots, watermark, chunks = part
    began = time.process_time()
    rows = 0
    with snapshots.reader() as reader:
        for chunk in chunks:
            rows += sum(batch.num_rows for batch in reader.read(chunk, watermark).batches)
    return _Part(rows, time.process_time() - began, _peak_rss_mb())


def _peak_rss_mb() -> int:
    """Return this process's own high-water mark (proc(5), "/proc/pid/status": VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) >> 10
    return 0
