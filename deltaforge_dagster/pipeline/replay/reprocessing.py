"""Run today's chain over captured segments, without changing the journal's recorded output.

The new output is in journal files without a row in the state store: they are deleted as soon as
their content was delivered, and those of a killed run are swept like any orphan.
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
from deltaforge_dagster.pipeline.process.stages import ProcessingJob, processed_by
from deltaforge_dagster.pipeline.spark_session import SessionProvider
from deltaforge_dagster.state.records import Processed, SegmentRow
from deltaforge_dagster.state.store import StateStore

_SEGMENTS_PER_JOB = 64


class Reprocessing:
    """Processes a pipeline's segments with the processors that its file has now.

    Args:
        spec: The pipeline; without processors its segments stay as captured.
        store: Lists the segments.
        journal: Holds the segments and the output.
        sessions: Provides the Spark session.
        run_id: Id of the run, to which the state of scripts belongs.
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
        """Yield processed segments in order, in groups as large as one Spark job covers.

        The files of a group exist until the next group is requested, or the generator is closed.

        Raises:
            ProcessorFailed: A processor failed.
            SparkUnavailable: Spark failed.
        """
        while segments:
            group = first_together(segments, _SEGMENTS_PER_JOB, self._max_bytes)
            with self._processed(group) as processed:
                yield processed
            segments = segments[len(group) :]

    @contextmanager
    def _processed(self, rows: Sequence[SegmentRow]) -> Iterator[list[SegmentRow]]:
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
        subject = f"segments {rows[0].segment} to {rows[-1].segment}"
        outputs = processed_by(run_job(self._sessions, job, len(rows), len(rows), subject))
        try:
            yield [
                _with_output(row, output).delivered
                for row, output in zip(rows, outputs, strict=True)
            ]
        finally:
            for output in outputs:
                if output.path is not None:
                    self._journal.delete(output.path)


def _with_output(row: SegmentRow, processed: Processed) -> SegmentRow:
    return replace(
        row,
        chain_hash=processed.chain_hash,
        processed_path=processed.path,
        processed_checksum=processed.checksum,
        processed_content_hash=processed.content_hash,
        processed_rows=processed.rows,
        processed_bytes=processed.bytes,
    )
