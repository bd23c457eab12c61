"""Encode journal segments into messages with Spark; deliverers map the result and send it.

One Spark job encodes consecutive segments for all sinks of the pipeline. Its tasks read the segment
files, make each distinct envelope, destination and key once (`messages`), and write the result as
Arrow files into the journal's `prepared` folder. The run maps these files into memory, so that
neither Spark nor the run holds a large result. Few rows need no job: the run reads and encodes them
itself, which takes a tenth of the time.

For messages in Avro, the tasks get the table versions that the rows refer to, which are read from
the state store when a new one occurs.

One small job checks once for each session that a Spark server that the installation did not start
has our package and the journal's folder. A wrong image, or a volume that is not mounted there, is
then reported by a clear error and not by a failed task.
"""

from __future__ import annotations

import functools
import logging
import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from urllib.parse import quote

import pyarrow as pa
from pyspark.errors import AnalysisException, PySparkException, PythonException
from pyspark.sql.types import LongType, StringType, StructField, StructType

from deltaforge_dagster import __version__
from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.errors import (
    JournalDamaged,
    SettingsError,
    SparkUnavailable,
    Terminal,
)
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.encode import files as encoded_files
from deltaforge_dagster.pipeline.encode.files import BatchSlice, Spares, write_probe
from deltaforge_dagster.pipeline.encode.messages import (
    FRAME_COLUMNS,
    Job,
    MessagePlan,
    Share,
    as_frame,
)
from deltaforge_dagster.pipeline.encode.segments import EmptyKeys, EncodedSegments
from deltaforge_dagster.pipeline.run_context import SessionProvider, spark_condition
from deltaforge_dagster.pipeline.spark_client import SparkSession
from deltaforge_dagster.state.records import SegmentRow
from deltaforge_dagster.state.schemas import SchemaRepository
from deltaforge_dagster.tables import TableSchema, fingerprints
from deltaforge_dagster.typed_rows.tables import VersionName

logger = logging.getLogger(__name__)

SMALL_ROWS = 2_000
SMALL_BYTES = 256 << 10
"""Limits of what is encoded in the run.

The bytes are compressed; lz4 compresses by at most 255 to 1, so the rows take less than 70 MB.
"""

PART_ROW_GROUPS = 6
PART_ROWS = 300_000
"""Largest part of a segment that is encoded at once, in whole row groups; larger segments are
encoded in parts. An ordinary segment has four or five row groups and about 200,000 rows, whose
messages may need many times the bytes.
"""

_ONE_PART_BYTES = 256 << 10
"""A segment file up to this size never has more than `PART_ROW_GROUPS` row groups, however well it
is compressed."""

TASK_BYTES = 8 << 20
"""Bytes of segment files per task: two tasks for an ordinary segment of a backlog."""

_SPARE_FILES = 8
"""Number of encoded files kept to be overwritten, about 70 MB each in a backlog."""

AT_HAND = SegmentRow(
    segment=0, segment_id="", path="", checksum="", content_hash="", rows=0, bytes=0,
    start_position="", end_position="", counts={}, schema_versions={}, first_ts_us=0, last_ts_us=0,
    range=0, epoch=0, created_at=0.0,
)  # fmt: skip
"""Placeholder for rows that are in no segment; no segment of a journal has the number 0."""

_SLICES = StructType(
    [
        StructField(column.name, LongType() if column.type == pa.int64() else StringType())
        for column in encoded_files.SLICES
    ]
)


def are_few(segments: Sequence[SegmentRow]) -> bool:
    """Return whether segments have too few rows to be worth a Spark job.

    A Spark job for them costs more than doing its work in the run.
    """
    rows, size = sum(row.rows for row in segments), sum(row.bytes for row in segments)
    return rows <= SMALL_ROWS and size <= SMALL_BYTES


class Encoder:
    """Encodes segments of one pipeline for all of its sinks; safe for several threads at once.

    Args:
        spec: The pipeline.
        journal: Holds the segments; encoded files go there as well.
        sessions: Provides the Spark session.
        run_id: Part of the names of the files, so that those of a dead run can be deleted.
        warn: Called with each warning.
        versions: The table versions of the pipeline, for messages in Avro.
    """

    def __init__(  # noqa: PLR0917 - what a run has
        self,
        spec: PipelineSpec,
        journal: Journal,
        sessions: SessionProvider,
        run_id: str,
        warn: Callable[[str], None] = logger.warning,
        versions: RegisteredVersions | None = None,
    ) -> None:
        self._pipeline = spec.metadata.name
        self._journal = journal
        self._sessions = sessions
        self._prefix = quote(run_id, safe="")
        self._probed: SparkSession | None = None
        self._spares = Spares(_SPARE_FILES)
        self._plan = MessagePlan.of(spec)
        self._empty_keys = EmptyKeys(warn)
        self._versions = versions

    def parts(self, segment: SegmentRow) -> list[range]:
        """Return the ranges of ordinals that are encoded at once.

        There is one for the whole segment, or there are several parts. A transaction of any size is
        one segment; in parts it needs no more memory and disk than ordinary segments.

        Raises:
            JournalDamaged: The file is missing or cannot be decoded.
            StoreUnavailable: The journal cannot be read now.
        """
        if segment.bytes <= _ONE_PART_BYTES:
            return [range(segment.rows)]
        groups = self._journal.row_groups(segment.path)
        if sum(groups) != segment.rows:
            raise JournalDamaged(
                f"segment {segment.segment}: its journal file holds {sum(groups)} rows, not the "
                f"{segment.rows} that the state store says"
            )
        starts = [0]
        ordinal = taken = 0
        for rows in groups:
            if taken == PART_ROW_GROUPS or (taken and ordinal + rows - starts[-1] > PART_ROWS):
                starts.append(ordinal)
                taken = 0
            ordinal += rows
            taken += 1
        return [range(*bounds) for bounds in pairwise([*starts, segment.rows])]

    def encode(
        self, segments: Sequence[SegmentRow], ordinals: range | None = None
    ) -> EncodedSegments:
        """Return the messages of consecutive segments, encoded in one Spark job or, if few, here.

        Args:
            segments: The segments.
            ordinals: Encode only these rows: one of the `parts` of a single segment.

        Raises:
            SparkUnavailable: Server or session is gone, or the job failed; a retry may help.
            JournalDamaged: A segment's file is missing, unreadable, or not what its row says.
            SettingsError: The server lacks our package, or does not share the journal with us.
        """
        small = are_few(segments)
        contained = (version for segment in segments for version in segment.schema_versions.items())
        plan = self._plan_for(
            (table, fingerprint)
            for table, versions in contained
            for fingerprint in fingerprints(versions)
        )
        try:
            if small:
                self._spares.clear()  # there is no backlog any more
                slices, batches = _messages(plan, self._rows_of(segments))
            else:
                slices, batches = self._write(self._session(), segments, ordinals, plan), []
        except PySparkException as error:
            self._sessions.lost(error)
            # Not chained: Spark's text of a failed task may quote a value of a row.
            raise _translated(error, segments) from None
        encoded = self._encoded(segments, slices, batches, ordinals, plan)
        try:
            encoded.check()
        except JournalDamaged:
            encoded.discard()
            raise
        return encoded

    def encode_rows(self, rows: pa.Table) -> EncodedSegments:
        """Return the messages of rows in memory, numbered from 0 in `AT_HAND`.

        This runs no Spark job.
        """
        plan = self._plan_for(_versions_in(rows))
        slices, batches = _messages(plan, as_frame(rows))
        return self._encoded([replace(AT_HAND, rows=rows.num_rows)], slices, batches, None, plan)

    def recycle(self, encoded: EncodedSegments) -> None:
        """Let later jobs overwrite the files of messages that nobody reads any more."""
        # Another server may run a task twice at the same time, and only local files can be
        # overwritten.
        if self._sessions.elsewhere or not self._journal.local:
            encoded.discard()
        else:
            self._spares.add(encoded.release())

    def close(self) -> None:
        """Delete the files that were kept to be overwritten."""
        self._spares.clear()

    def _encoded(
        self,
        segments: Sequence[SegmentRow],
        slices: Sequence[BatchSlice],
        batches: Sequence[pa.RecordBatch],
        ordinals: range | None,
        plan: MessagePlan,
    ) -> EncodedSegments:
        return EncodedSegments(
            segments,
            plan.routes,
            slices,
            batches,
            ordinals=ordinals,
            empty_keys=self._empty_keys,
        )

    def _plan_for(self, contained: Iterable[tuple[str, str]]) -> MessagePlan:
        """Return the plan for rows of these table versions: full names and fingerprints."""
        if not self._plan.avro:
            return self._plan
        assert self._versions is not None
        return self._plan.with_versions(self._versions.of(set(contained)))

    def _session(self) -> SparkSession:
        session = self._sessions.session()
        if self._sessions.elsewhere and session is not self._probed:
            folder = self._journal.encoded_dir(self._pipeline)
            check_server(session, folder, self._prefix)
            self._probed = session
        return session

    def _rows_of(self, segments: Sequence[SegmentRow]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of segments, read by this process."""
        for segment in segments:
            if segment.rows:
                yield from self._journal.share(
                    segment.path, FRAME_COLUMNS, ordinals=None, part=0, of=1
                )

    def _write(
        self,
        session: SparkSession,
        segments: Sequence[SegmentRow],
        ordinals: range | None,
        plan: MessagePlan,
    ) -> list[BatchSlice]:
        folder = self._journal.encoded_dir(self._pipeline)
        job = f"{self._prefix}.{uuid.uuid4().hex}"
        tasks = share_out(segments, ordinals)
        spares = self._spares.reuse(len(tasks))
        work = Job(self._journal.url, plan, tasks, folder, job, spares)
        try:
            report = (
                session.range(0, len(tasks), 1, len(tasks)).mapInArrow(work.run, _SLICES).toArrow()
            )
            slices = encoded_files.reported(report)
        except BaseException:
            encoded_files.remove_job(folder, job)
            encoded_files.remove(*spares)
            raise
        encoded_files.remove(*(set(spares) - {batch_slice.path for batch_slice in slices}))
        return slices


class RegisteredVersions:
    """The registered table versions of a pipeline; thread-safe.

    Args:
        schemas: The repository of table versions.
        pipeline: Name of the pipeline.
    """

    def __init__(self, schemas: SchemaRepository, pipeline: str) -> None:
        self._schemas = schemas
        self._pipeline = pipeline
        self._lock = threading.Lock()
        self._versions: dict[tuple[str, str], tuple[VersionName, TableSchema]] = {}
        self._looked_up: set[tuple[str, str]] = set()

    def of(self, wanted: Collection[tuple[str, str]]) -> list[tuple[VersionName, TableSchema]]:
        """Return table versions; those that were never registered are left out.

        Args:
            wanted: Pairs of a table's full name and the fingerprint of a version.

        Raises:
            StoreUnavailable: The state store cannot be read now.
        """
        with self._lock:
            # Read again for new names only: a version is registered before its rows are captured.
            if not self._looked_up >= set(wanted):
                self._versions = self._read()
                self._looked_up |= set(wanted)
            return [
                self._versions[version] for version in sorted(wanted) if version in self._versions
            ]

    def _read(self) -> dict[tuple[str, str], tuple[VersionName, TableSchema]]:
        return {
            (table.full_name, name): (VersionName(table.db, table.schema, table.table, name), table)
            for history in self._schemas.histories(self._pipeline)
            for table, name in (
                (version.table, version.stamp.fingerprint) for version in history.versions
            )
        }


def share_out(segments: Sequence[SegmentRow], ordinals: range | None = None) -> list[list[Share]]:
    """Distribute the row groups of segments among tasks of about the same size."""
    tasks: list[list[Share]] = []
    room = 0.0
    for row in segments:
        size = row.bytes if ordinals is None else row.bytes * len(ordinals) // row.rows
        shares = -(-size // TASK_BYTES)
        for part in range(shares):
            if room <= 0:
                tasks.append([])
                room = TASK_BYTES
            tasks[-1].append(Share(row.path, ordinals, part, shares))
            room -= size / shares
    return tasks


def check_server(session: SparkSession, folder: str, prefix: str) -> None:
    """Verify that executors have our version, and share the folder of encoded files with this run.

    Args:
        session: A session on the server.
        folder: Absolute path, or a URL that fsspec knows.
        prefix: Prefix of the probe file's name, so that a leftover one is swept.

    Raises:
        SettingsError: They have another version or do not share the folder; the message says what
            to fix.
        PySparkException: The server or the session is gone.
    """
    path = f"{folder}/{prefix}.{uuid.uuid4().hex}.probe.arrow"
    probe = functools.partial(write_probe, path)
    try:
        answer = session.range(0, 1, 1, 1).mapInArrow(probe, "version string").toArrow()
    except PythonException as error:
        raise SettingsError(_explained(str(error), folder)) from None
    (version,) = answer["version"].to_pylist()
    if version != __version__:
        encoded_files.remove(path)
        raise SettingsError(
            f"the Spark executors have deltaforge-dagster {version}, this run is {__version__}: "
            "install the same version in their image"
        )
    if not encoded_files.exists(path):
        raise SettingsError(
            f"the Spark executors do not share {folder} with this run: put the journal on a "
            "volume that both mount, or on object storage (DELTAFORGE_JOURNAL_URL)"
        )
    encoded_files.remove(path)


def _explained(text: str, folder: str) -> str:
    if "No module named 'deltaforge_dagster" in text:
        return (
            f"the Spark executors lack our package: install deltaforge-dagster {__version__} in "
            "their image"
        )
    return f"the Spark executors cannot write to {folder}, where encoded messages go"


def _versions_in(rows: pa.Table) -> Iterator[tuple[str, str]]:
    """Return the table versions of rows: full names and fingerprints."""
    names = (rows.column(name).to_pylist() for name in ("db", "schema", "table", "schema_version"))
    for db, schema, table, version in zip(*names, strict=True):
        if version is not None:
            yield f"{schema or db}.{table}", version


def _messages(
    plan: MessagePlan, frames: Iterable[pa.RecordBatch]
) -> tuple[list[BatchSlice], list[pa.RecordBatch]]:
    batches = list(plan.batches(frames))
    slices = [
        batch_slice
        for number, batch in enumerate(batches)
        for batch_slice in encoded_files.slices_of(batch, number, "")
    ]
    return slices, batches


def _translated(
    error: PySparkException, segments: Sequence[SegmentRow]
) -> SparkUnavailable | Terminal:
    subject = f"segments {segments[0].segment} to {segments[-1].segment}"
    condition = spark_condition(error)
    if isinstance(error, AnalysisException):
        return Terminal(f"{subject}: Spark does not accept the query ({condition})")
    return SparkUnavailable(f"{subject}: the Spark job failed ({condition}); see the server's log")
