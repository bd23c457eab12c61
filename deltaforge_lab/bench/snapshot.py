"""`deltaforge bench snapshot`: read a table in chunks as a snapshot's tasks do; deliver nothing.

Each reader is a process with its own connection, like Spark's workers. The limit is the same table,
sent whole by the server to one client that discards the bytes. The readers' processor seconds show
the cost of reading, even on a busy machine.
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

from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.resources.platform import build_source
from deltaforge_dagster.sources.snapshot import Chunk, Snapshots, SnapshotSource
from deltaforge_lab.bench.drain import progress
from deltaforge_lab.bench.installation import Say
from deltaforge_lab.bench.results import show
from deltaforge_lab.bench.shapes import SHAPES, Shape
from deltaforge_lab.bench.sources import STARTS

_PIPELINE = """\
metadata: {{name: bench, tenant: acme}}
spec:
  source: {source}
  sinks: [{{type: file, config: {{id: unused, path: unused}}}}]
"""
_WARM_ROWS = 1_000


@dataclass(frozen=True, slots=True)
class SnapshotResult:
    """The measured values.

    Attributes:
        source: `postgres` or `mysql`.
        rows: Rows of the table.
        shape: Shape of the table.
        readers: Number of processes that read chunks.
        chunks: Number of chunks in the plan.
        plan_seconds: Time for planning, which is not part of the rate.
        rows_per_second: Rows read and converted to the change frame per second of wall-clock time.
        raw_rows_per_second: Rows received by one client and discarded per second of wall-clock
            time.
        ratio: `rows_per_second / raw_rows_per_second`.
        cpu_seconds_per_million: Processor seconds of all readers per million rows.
        peak_rss_mb: Peak memory of the largest reader, in MiB.
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
    source: Annotated[
        Literal["postgres", "mysql"], typer.Option(help="Database of the table.")
    ] = "postgres",
    rows: Annotated[int, typer.Option(min=1_000, help="Number of rows in the table.")] = 1_000_000,
    shape: Annotated[
        Literal["orders6", "wide10"], typer.Option(help="Columns of the table.")
    ] = "wide10",
    readers: Annotated[
        int, typer.Option(min=1, max=64, help="Number of processes that read chunks.")
    ] = 1,
    chunk_size: Annotated[int, typer.Option(min=100, help="Rows per chunk.")] = 100_000,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on the last line.")
    ] = False,
) -> None:
    """Measure reading a table in chunks: rate, cost, and the limit of receiving the table."""
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
        if (total := sum(part.rows for part in done)) != rows:
            raise DeltaforgeError(f"{total:,} of {rows:,} rows were read")
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
    """The result of one reader: rows, seconds of processor time, peak memory in MiB."""

    rows: int
    cpu: float
    peak_rss_mb: int


def _pool(readers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(readers, multiprocessing.get_context("spawn"))


def _warm_up(pool: ProcessPoolExecutor, readers: int, snapshots: Snapshots, watermark: str) -> None:
    """Have every reader load its kernels.

    There are two small chunks per reader, since one reader may take several.
    """
    small = next(iter(snapshots.plan(None, _WARM_ROWS)))
    list(pool.map(_read, [(snapshots, watermark, [small])] * readers * 2))


def _read(part: tuple[Snapshots, str, Sequence[Chunk]]) -> _Part:
    """Read chunks as a Spark task does."""
    snapshots, watermark, chunks = part
    began = time.process_time()
    rows = 0
    with snapshots.reader() as reader:
        for chunk in chunks:
            rows += sum(batch.num_rows for batch in reader.read(chunk, watermark).batches)
    return _Part(rows, time.process_time() - began, _peak_rss_mb())


def _peak_rss_mb() -> int:
    """Return the peak resident memory of this process in MiB.

    It is VmHWM in "/proc/pid/status" (proc(5)).
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) >> 10
    return 0
