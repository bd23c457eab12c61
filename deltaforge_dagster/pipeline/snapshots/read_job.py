"""The Spark job that reads chunks of a snapshot and writes their staging files.

A file does not count until the snapshot's run has recorded it. So a task that outlives its run, or
reads a chunk that another task has read meanwhile, only leaves an orphaned file.

Workers import this module: it needs no Spark.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster import errors
from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.sources.snapshot import Chunk, ChunkReader, SnapshotSource
from deltaforge_dagster.state.snapshot_records import PlannedChunk

REPORT = pa.schema(
    [
        pa.field("chunk", pa.string()),
        pa.field("written", pa.string()),
        pa.field("error", pa.string()),
        pa.field("text", pa.string()),
    ]
)
"""Columns of a task's report.

`chunk` is the chunk's index. `written` is the `WrittenChunk`, JSON text, or else `error` and `text`
are class and text of the error.
"""


@dataclass(frozen=True, slots=True)
class WrittenChunk:
    """A chunk in its staging file; fields as in `state.snapshot_records.StagedChunk`."""

    path: str | None
    checksum: str
    rows: int
    bytes: int
    read_view: str
    position: str
    described: str
    seconds: float


@dataclass(frozen=True, slots=True)
class StageJob:
    """A Spark job with one task: some chunks of one table to read.

    It is pickled for Spark together with the source's credentials, which therefore never appear in
    a query plan.

    Attributes:
        source: Reads the tables.
        watermark: The newest result of `Snapshots.watermark`.
        journal_url: The journal to write staging files to.
        pipeline: Name of the pipeline.
        snapshot: Number of the snapshot.
        chunks: The chunks to read, in this order.
    """

    source: SnapshotSource
    watermark: str
    journal_url: str
    pipeline: str
    snapshot: int
    chunks: Sequence[PlannedChunk]

    def run(self, numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Read the chunks; Spark calls this in a job with a single task and a single input row.

        Yields:
            A row of `REPORT` for each chunk, up to one that cannot be read.
        """
        for _ in numbers:
            at = 0  # the index with which an error before the first chunk is reported
            try:
                with self.source.snapshots().reader() as reader:
                    for at, chunk in enumerate(self.chunks):
                        written = json.dumps(asdict(self._stage(reader, chunk)))
                        yield _report(at, written=written)
            except DeltaforgeError as error:  # Spark would hide a raised error's class
                yield _report(at, error=type(error).__name__, text=str(error))

    def _stage(self, reader: ChunkReader, planned: PlannedChunk) -> WrittenChunk:
        began = time.monotonic()
        journal = Journal(self.journal_url)
        writer = journal.stager(self.pipeline, self.snapshot, planned.number)
        try:
            chunk = Chunk.from_json(planned.plan)
            read = reader.read(chunk, self.watermark)
            for rows in read.batches:
                if chunk.keys is not None:
                    rows = _with_keys(rows, chunk.keys)  # noqa: PLW2901
                if rows.num_rows:
                    writer.write(rows)
        except BaseException:
            writer.abort()
            raise
        file = None
        if writer.rows:
            file = writer.close()
        else:
            writer.abort()
        return WrittenChunk(
            path=file.path if file else None,
            checksum=file.checksum if file else "",
            rows=file.rows if file else 0,
            bytes=file.bytes if file else 0,
            read_view=read.read_view.to_json(),
            position=read.position.to_json(),
            described=read.table.to_json(),
            seconds=time.monotonic() - began,
        )


def written_by(report: pa.Table) -> tuple[list[tuple[int, WrittenChunk]], DeltaforgeError | None]:
    """Return the chunks that a task wrote, with their indexes, and the error that stopped it."""
    written: list[tuple[int, WrittenChunk]] = []
    for row in report.to_pylist():
        if row["error"] is not None:
            return written, getattr(errors, row["error"])(row["text"])
        written.append((int(row["chunk"]), WrittenChunk(**json.loads(row["written"]))))
    return written, None


def _with_keys(rows: pa.RecordBatch, keys: Sequence[str]) -> pa.RecordBatch:
    return rows.filter(pc.is_in(rows.column("key"), value_set=pa.array(keys, pa.string())))


def _report(
    chunk: int, *, written: str | None = None, error: str | None = None, text: str | None = None
) -> pa.RecordBatch:
    row = {"chunk": str(chunk), "written": written, "error": error, "text": text}
    return pa.RecordBatch.from_pylist([row], REPORT)
