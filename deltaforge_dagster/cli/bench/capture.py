"""`deltaforge bench capture`: a backlog from the source into the journal, and nothing behind it.

One thread reads, decodes and journals, as a run's does, in segments as large as the defaults allow.
Beside it stands the limit: the same log, received by a client that throws the bytes away. Their
ratio says what our part costs where the server is the slower one; the processor seconds say what
it costs where it is not, also on a busy machine.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from deltaforge_dagster.cli.bench.drain import progress
from deltaforge_dagster.cli.bench.installation import Say
from deltaforge_dagster.cli.bench.processes import Sampler
from deltaforge_dagster.cli.bench.shapes import SHAPES, Shape
from deltaforge_dagster.cli.bench.sources import STARTS, BenchSource
from deltaforge_dagster.config.load import load_pipeline
from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.journal.files import Journal, SegmentWriter
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import ReadLimits
from deltaforge_dagster.sources.build import build_source
from deltaforge_dagster.tables import SchemaStamp, TableSchema

_PIPELINE = """\
metadata: {{name: bench, tenant: acme}}
spec:
  source: {source}
  sinks: [{{type: file, config: {{id: unused, path: unused}}}}]
"""
_WARM_ROWS = 20_000
_PATIENCE = 60.0


@dataclass(frozen=True, slots=True)
class CaptureResult:
    """What was measured.

    Attributes:
        source: `postgres` or `mysql`.
        rows: Changes of the backlog.
        shape: Shape of its table.
        rows_per_second: Read, decoded and journaled, by the clock.
        raw_rows_per_second: Received and thrown away, by the clock.
        ratio: `rows_per_second / raw_rows_per_second`.
        cpu_seconds_per_million: Of the capturing process and of the server, per million changes.
        raw_cpu_seconds_per_million: The same while the bytes are thrown away.
        segments: Segments that the backlog became.
        journal_bytes: Bytes of their files.
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
    journal_bytes: int
    cores: int


def capture(
    *,
    source: Annotated[Literal["postgres", "mysql"], typer.Option(help="Whose log.")] = "postgres",
    rows: Annotated[int, typer.Option(min=1_000, help="Changes of the backlog.")] = 1_000_000,
    shape: Annotated[
        Literal["orders6", "wide10"], typer.Option(help="What the table looks like.")
    ] = "wide10",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on the last line.")
    ] = False,
) -> None:
    """Capture a backlog into the journal: rate, cost, and the limit of the server's own decoding."""
    with progress(quiet=as_json) as say:
        result = measure(source, rows, SHAPES[shape], say)
    if as_json:
        typer.echo(json.dumps(asdict(result)))
        return
    table = Table("measure", "value", title=f"capture from {source}, {rows:,} changes {shape}")
    for name, value in asdict(result).items():
        table.add_row(
            name.replace("_", " "), f"{value:,}" if isinstance(value, int) else str(value)
        )
    Console().print(table)


def measure(kind: Literal["postgres", "mysql"], rows: int, shape: Shape, say: Say) -> CaptureResult:
    """Start a server, capture a backlog of `rows` changes, and read it raw.

    Raises:
        DeltaforgeError: The server does not start, or not every change was captured.
    """
    with ExitStack() as owned:
        folder = Path(owned.enter_context(tempfile.TemporaryDirectory(prefix="df-capture-")))
        say("starting the server")
        server = owned.enter_context(closing(STARTS["pg" if kind == "postgres" else kind]()))
        server.create(shape)
        bench = _Bench(server, folder)
        say("warming up")
        _fill(server, 1, _WARM_ROWS)
        bench.capture(_WARM_ROWS)
        server.begin_backlog()
        for written in server.write(1 + _WARM_ROWS, rows):
            say(f"filling the backlog: {written:,} of {rows:,} rows")
        server.end_backlog()
        say(f"capturing {rows:,} changes")
        groups = {"capture": os.getpid(), "source": server.server.pid}
        began = time.monotonic()
        with Sampler(groups, alone="capture", together=("capture",)) as captured:
            segments, size = bench.capture(rows)
        seconds = time.monotonic() - began
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
            journal_bytes=size,
            cores=len(os.sched_getaffinity(0)),
        )


class _Bench:
    """Captures from one server again and again, each time on from where it ended."""

    def __init__(self, server: BenchSource, folder: Path) -> None:
        path = folder / "pipeline.yaml"
        path.write_text(_PIPELINE.format(source=server.block))
        self._spec: PipelineSpec = load_pipeline(path).spec
        self._journal = Journal(f"file://{folder}/journal")
        self._segments = 0
        self._bytes = 0
        self._stamps = _Stamps()
        source = build_source(self._spec)
        self._end = source.ensure_start()
        self._stamps.define(source.definitions(self._end), self._end)
        source.close()

    def capture(self, rows: int) -> tuple[int, int]:
        """Journal so many changes; return the segments and bytes that they became."""
        limits = self._spec.spec.engine.segment
        before = self._segments, self._bytes
        reading = ReadLimits(max_events=limits.max_events, max_wait=limits.min_ms / 1000)
        writer: SegmentWriter | None = None
        taken = 0
        heard = time.monotonic()
        with closing(build_source(self._spec)) as source:
            for batch in source.read(self._end, reading, self._stamps):
                if batch.rows is not None:
                    writer = writer or self._open()
                    writer.write(batch.rows)
                    taken += batch.rows.num_rows
                    heard = time.monotonic()
                if writer is not None and batch.end is not None:
                    full = writer.rows >= limits.max_events or writer.bytes >= limits.max_bytes
                    if full or taken >= rows:
                        self._seal(writer, batch.end)
                        writer = None
                if (taken >= rows and writer is None) or time.monotonic() - heard > _PATIENCE:
                    break
        if taken != rows:
            raise DeltaforgeError(f"{taken:,} of {rows:,} changes were captured")
        return self._segments - before[0], self._bytes - before[1]

    def _open(self) -> SegmentWriter:
        return self._journal.writer("bench", "bench", self._segments + 1, 1)

    def _seal(self, writer: SegmentWriter, end: Position) -> None:
        self._bytes += writer.close().bytes
        self._segments += 1
        self._end = end


class _Stamps:
    """A registry in memory: what it is asked to keep is gone with the benchmark."""

    def __init__(self) -> None:
        self._known: dict[TableSchema, SchemaStamp] = {}
        self._definitions: dict[str, str] = {}

    def register(self, table: TableSchema, position: Position) -> SchemaStamp:
        """Number the versions as they come."""
        del position
        number = len(self._known) + 1
        return self._known.setdefault(table, SchemaStamp(f"sha256:{number:064d}", number, number))

    def define(self, definitions: Mapping[str, str | None], position: Position) -> None:
        """Keep what tables look like; nothing changes them here."""
        del position
        self._definitions |= {name: text for name, text in definitions.items() if text is not None}

    def defined(self, position: Position) -> dict[str, str]:
        """Return what tables look like."""
        del position
        return dict(self._definitions)

    def held(self) -> Mapping[str, str]:
        """Hold nothing back."""
        return {}


def _per_million(seconds: Mapping[str, float], rows: int) -> dict[str, float]:
    return {name: round(used / rows * 1e6, 3) for name, used in seconds.items()}


def _fill(server: BenchSource, first: int, rows: int) -> None:
    for _ in server.write(first, rows):
        pass
