"""Today's chain over segments as they were captured, beside what the journal has recorded of them.

What comes out of it lies in files of the journal that no row names: they go as soon as it is
delivered, and those of a run that was killed are swept like any orphan.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.job_size import first_together
from deltaforge_dagster.pipeline.process.chain_jobs import run_job
from deltaforge_dagster.pipeline.process.chains import chain_of
from deltaforge_dagster.pipeline.process.segment_job import ProcessingJob, processed_by
from deltaforge_dagster.pipeline.spark_session import SessionProvider
from deltaforge_dagster.state.records import Processed, SegmentRow
from deltaforge_dagster.state.store import StateStore

_SEGMENTS_PER_JOB = 64


class Reprocessing:
    """Makes of a pipeline's segments what its file says now.

    Args:
        spec: The pipeline; without processors segments are what was captured.
        store: Where segments are listed.
        journal: Where they are, and where the output goes.
        sessions: Where the Spark session comes from.
        run_id: What scripts remember is theirs.
    """

    def __init__(
        self,
        spec: PipelineSpec,
        store: StateStore,
        journal: Journal,
        sessions: SessionProvider,
        run_id: str,
    ) -> None:
        self._pipeline = spec.metadata.name
        self._chain = chain_of(spec)
        self._max_bytes = spec.spec.engine.deliver.max_bytes
        self._store = store
        self._journal = journal
        self._sessions = sessions
        self._run_id = run_id

    def groups(self, segments: Sequence[SegmentRow]) -> Generator[list[SegmentRow]]:
        """Yield consecutive segments, as many as one job takes, as their output of the chain.

        The files of a group are there until the next one is asked for, or the generator closed.

        Raises:
            ProcessorFailed: A processor broke.
            SparkUnavailable: Spark failed.
        """
        while segments:
            group = first_together(segments, _SEGMENTS_PER_JOB, self._max_bytes)
            with self._made(group) as made:
                yield made
            segments = segments[len(group) :]

    @contextmanager
    def _made(self, rows: Sequence[SegmentRow]) -> Iterator[list[SegmentRow]]:
        if not self._chain.processors:
            yield [replace(row, chain_hash="") for row in rows]
            return
        pipeline, lease = (
            self._store.pipelines.get(self._pipeline),
            self._store.leases.get(self._pipeline),
        )
        assert pipeline is not None
        job = ProcessingJob(
            self._chain,
            self._run_id,
            self._journal.url,
            self._pipeline,
            pipeline.uid,
            0 if lease is None else lease.epoch,
            [(row.segment, row.path) for row in rows],
        )
        what = f"segments {rows[0].segment} to {rows[-1].segment}"
        made = processed_by(run_job(self._sessions, job, len(rows), len(rows), what))
        try:
            yield [_with(row, one).delivered for row, one in zip(rows, made, strict=True)]
        finally:
            for one in made:
                if one.path is not None:
                    self._journal.delete(one.path)


def _with(row: SegmentRow, made: Processed) -> SegmentRow:
    return replace(
        row,
        chain_hash=made.chain_hash,
        processed_path=made.path,
        processed_checksum=made.checksum,
        processed_content_hash=made.content_hash,
        processed_rows=made.rows,
        processed_bytes=made.bytes,
    )
