"""The state store's tables, for both SQLite and PostgreSQL.

Four tables hold the primitives (`primitives`), the others the state of pipelines. Columns have the
names of the fields in `records`, where they are documented. `migrations` creates these tables; a
test proves that both agree, so a change here needs a new migration.

Times are seconds since 1970 by the database's clock (`database.clock`); positions are JSON text.
Rows are read as the frozen values of `records`.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TypeVar

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Connection,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    false,
    select,
    text,
)

from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.state.records import (
    CheckpointRow,
    DeadLetterRow,
    HoldPartRow,
    HoldRow,
    LeaseRow,
    PipelineRow,
    RangeRow,
    SegmentRow,
)

metadata = MetaData()

# SQLite assigns numbers automatically only in a column of exactly this type.
_SERIAL = BigInteger().with_variant(Integer(), "sqlite")

pipelines = Table(
    "pipeline",
    metadata,
    Column("name", Text, primary_key=True),
    Column("uid", Text, nullable=False),
    Column("spec_hash", Text, nullable=False),
    Column("start_position", Text),
    Column("captured_position", Text),
    Column("confirmed_position", Text),
    Column("next_segment", BigInteger, nullable=False),
    Column("next_range", BigInteger, nullable=False),
    Column("desired_state", Text, nullable=False),
    Column("probe_after", Double, nullable=False),
    Column("probe_wait", Double, nullable=False),
    Column("capture_pause", Text),
    Column("failure", Text),  # `records.Failure`
    Column("findings", Text),  # `records.NotedFinding`, a list
    Column("ticked_at", Double),
    Column("source_seen_at", Double),
    Column("file", Text),
    Column("outdated_since", Double),
)

stored_specs = Table(
    "stored_spec",
    metadata,
    Column("name", Text, primary_key=True),
    Column("document", Text, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("updated_at", Double, nullable=False),
)

leases = Table(
    "lease",
    metadata,
    Column("pipeline", Text, primary_key=True),
    Column("epoch", BigInteger, nullable=False),
    Column("run_id", Text),
    Column("expires_at", Double, nullable=False),
    Column("session_id", Text),
)

ranges = Table(
    "range",
    metadata,
    Column("pipeline", Text, primary_key=True),
    Column("range", BigInteger, primary_key=True, autoincrement=False),
    Column("state", Text, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("spec_hash", Text, nullable=False),
    Column("first_segment", BigInteger, nullable=False),
    Column("last_segment", BigInteger, nullable=False),
    Column("start_position", Text, nullable=False),
    Column("end_position", Text, nullable=False),
    Column("rows", BigInteger, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("counts", JSON, nullable=False),
    Column("schema_versions", JSON, nullable=False),
    Column("first_ts_us", BigInteger, nullable=False),
    Column("last_ts_us", BigInteger, nullable=False),
    Column("content_hash", Text),
    Column("close_reason", Text),
    Column("opened_at", Double, nullable=False),
    Column("closed_at", Double),
)
# The database itself guarantees that at most one range of a pipeline is open.
Index(
    "range_one_open",
    ranges.c.pipeline,
    unique=True,
    sqlite_where=text("state = 'open'"),
    postgresql_where=text("state = 'open'"),
)

segments = Table(
    "segment",
    metadata,
    Column("pipeline", Text, primary_key=True),
    Column("segment", BigInteger, primary_key=True, autoincrement=False),
    Column("segment_id", Text, nullable=False),
    Column("range", BigInteger, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("path", Text, nullable=False),
    Column("checksum", Text, nullable=False),
    Column("content_hash", Text, nullable=False),
    Column("rows", BigInteger, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("start_position", Text, nullable=False),
    Column("end_position", Text, nullable=False),
    Column("counts", JSON, nullable=False),
    Column("schema_versions", JSON, nullable=False),
    Column("first_ts_us", BigInteger, nullable=False),
    Column("last_ts_us", BigInteger, nullable=False),
    Column("created_at", Double, nullable=False),
    # What sinks receive of the segment, once that is decided (`records.SegmentRow`).
    Column("chain_hash", Text),
    Column("processed_path", Text),
    Column("processed_checksum", Text),
    Column("processed_content_hash", Text),
    Column("processed_rows", BigInteger),
    Column("processed_bytes", BigInteger),
    Column("processed_counts", JSON),
    Column("received_at", Double),
    Column("trigger", Text),
    Column("sinks", JSON, nullable=False, server_default="[]"),
)
Index("segment_of_range", segments.c.pipeline, segments.c.range)

checkpoints = Table(
    "checkpoint",
    metadata,
    Column("pipeline", Text, primary_key=True),
    Column("sink", Text, primary_key=True),
    Column("segment", BigInteger, nullable=False),
    Column("ordinal", BigInteger, nullable=False),
    Column("complete", Boolean, nullable=False),
    Column("source_position", Text),
    Column("first_segment", BigInteger, nullable=False),
    Column("state", Text, nullable=False),  # `records.Attachment`
    Column("failures", BigInteger, nullable=False),
    Column("next_attempt_at", Double, nullable=False),
    Column("last_error", Text),
    Column("remedy", JSON),  # commands that fix the last error
    Column("failing_since", Double),
    Column("updated_at", Double, nullable=False),
    Column("incarnation", Text),
    Column("overrules", Boolean, nullable=False),
    Column("skip", Text),
    Column("notice", Text),
    Column("sent_segment", BigInteger),
    Column("sent_ordinal", BigInteger),
    Column("began", Text),
    Column("snapshot_due", Boolean, nullable=False, server_default=false()),
)

published = Table(
    "published",
    metadata,
    Column("pipeline", Text, primary_key=True),
    Column("range", BigInteger, primary_key=True, autoincrement=False),
    Column("asset", Text, primary_key=True),
    Column("published_at", Double, nullable=False),
)

holds = Table(
    "hold",
    metadata,
    Column("pipeline", Text, primary_key=True),
    Column("kind", Text, primary_key=True),
    Column("subject", Text, primary_key=True),
    Column("state", Text, nullable=False),  # `records.HoldState`
    Column("reason", Text, nullable=False),
    Column("since", Double, nullable=False),
    Column("since_position", Text, nullable=False),
    Column("events", BigInteger, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("remedy", Text),
    Column("last_segment", BigInteger),
)

hold_parts = Table(
    "hold_part",
    metadata,
    Column("pipeline", Text, primary_key=True),
    Column("path", Text, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("number", BigInteger, nullable=False),
    Column("checksum", Text, nullable=False),
    Column("events", BigInteger, nullable=False),
    Column("bytes", BigInteger, nullable=False),
)

dead_letters = Table(
    "dead_letter",
    metadata,
    Column("seq", _SERIAL, primary_key=True),
    Column("pipeline", Text, nullable=False),
    Column("sink", Text, nullable=False),
    Column("event_id", Text, nullable=False),
    Column("segment", BigInteger, nullable=False),
    Column("ordinal", BigInteger, nullable=False),
    Column("state", Text, nullable=False),  # `records.DeadLetterState`
    Column("error_kind", Text, nullable=False),
    Column("error_message", Text, nullable=False),
    Column("attempts", BigInteger, nullable=False),
    Column("table_name", Text, nullable=False),
    Column("row_key", Text),
    Column("old_key", Text),
    Column("holds", Boolean, nullable=False),
    Column("source_cursor", Text, nullable=False),
    Column("event", Text, nullable=False),
    Column("payload_truncated", Boolean, nullable=False),
    Column("path", Text, nullable=False),
    Column("checksum", Text, nullable=False),
    Column("place", BigInteger, nullable=False),
    Column("token", Text),
    Column("created_at", Double, nullable=False),
    sqlite_autoincrement=True,
)
Index(
    "dead_letter_of_event",
    dead_letters.c.pipeline,
    dead_letters.c.sink,
    dead_letters.c.event_id,
    unique=True,
)
Index("dead_letter_of_pipeline", dead_letters.c.pipeline, dead_letters.c.seq)

undelivered = Table(
    "undelivered",
    metadata,
    Column("pipeline", Text, primary_key=True),
    Column("sink", Text, primary_key=True),
    Column("segment", BigInteger, primary_key=True, autoincrement=False),
    Column("fate", Text, primary_key=True),  # `undelivered.Fate`
    Column("ordinals", JSON, nullable=False),  # [first, last] of consecutive ordinals, in order
)

table_commits = Table(
    "table_commit",
    metadata,
    Column("pipeline", Text, primary_key=True),
    Column("sink", Text, primary_key=True),
    # A table that is suspended, as a JSON array; empty for the front (`table_commits`).
    Column("destination", Text, primary_key=True),
    Column("segment", BigInteger, nullable=False),
    Column("planned_to", BigInteger),
    Column("owner", Text),
    Column("ends", JSON, nullable=False),
    Column("error", Text),
    Column("since", Double),
    Column("next_attempt_at", Double, nullable=False),
    Column("failures", BigInteger, nullable=False),
    Column("remedy", JSON),  # commands that let a suspended table go on
)

table_pending = Table(
    "table_pending",
    metadata,
    Column("pipeline", Text, primary_key=True),
    Column("sink", Text, primary_key=True),
    Column("destination", Text, primary_key=True),  # as in `table_commit`
    Column("source", JSON, nullable=False),
    Column("segment", BigInteger, nullable=False),
    Column("changes", BigInteger, nullable=False),
    Column("since", Double, nullable=False),
)

table_resyncs = Table(
    "table_resync",
    metadata,
    Column("pipeline", Text, primary_key=True),
    Column("sink", Text, primary_key=True),
    Column("destination", Text, primary_key=True),  # as in `table_commit`
    Column("table_name", Text, nullable=False),  # full name in the source
    Column("begun", Boolean, nullable=False),
)

table_writes = Table(
    "table_write",
    metadata,
    Column("pipeline", Text, primary_key=True),
    Column("sink", Text, primary_key=True),
    # Schema and table in the source, as a JSON array.
    Column("source", Text, primary_key=True),
    Column("segment", BigInteger, primary_key=True, autoincrement=False),
    Column("destination", JSON, nullable=False),
    Column("columns", JSON, nullable=False),
    Column("changes", BigInteger, nullable=False),
    Column("position", Text, nullable=False),
    Column("changed_at", Double, nullable=False),
    Column("written_at", Double, nullable=False),
    Column("published", Boolean, nullable=False),
    Column("figures", JSON(none_as_null=True)),
    Column("lacking", JSON(none_as_null=True)),
    Column("int64_timestamps", Boolean, nullable=False, server_default=false()),
)

snapshots = Table(
    "snapshot",
    metadata,
    Column("pipeline", Text, primary_key=True),
    Column("snapshot", BigInteger, primary_key=True, autoincrement=False),
    Column("tables", JSON, nullable=False),
    Column("condition", Text),
    Column("cause", Text, nullable=False),
    Column("spec_hash", Text, nullable=False),
    Column("state", Text, nullable=False),  # `snapshot_records.SnapshotState`
    Column("problem", Text),
    Column("created_at", Double, nullable=False),
    Column("ended_at", Double),
    Column("sinks", JSON, nullable=False, server_default="[]"),
    Column("since_segment", BigInteger, nullable=False, server_default="0"),
)

chunks = Table(
    "chunk",
    metadata,
    Column("pipeline", Text, primary_key=True),
    Column("snapshot", BigInteger, primary_key=True, autoincrement=False),
    Column("table_name", Text, primary_key=True),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("plan", Text, nullable=False),
    Column("state", Text, nullable=False),  # `snapshot_records.ChunkState`
    Column("attempts", BigInteger, nullable=False),
    # Set once the chunk has been read (`snapshot_records.StagedChunk`).
    Column("path", Text),
    Column("checksum", Text),
    Column("rows", BigInteger),
    Column("bytes", BigInteger),
    Column("read_view", Text),
    Column("position", Text),
    Column("described", Text),
    Column("first_segment", BigInteger),
    Column("read_at", Double),
    Column("seconds", Double),
    # Set once the chunk is in the journal.
    Column("segment", BigInteger),
    Column("journaled_rows", BigInteger),
)

metrics = Table(
    "metric",
    metadata,
    Column("pipeline", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("labels", Text, primary_key=True),  # a JSON object, sorted by name
    Column("value", Double, nullable=False),
)

relocated_rows = Table(
    "relocated_row",
    metadata,
    Column("pipeline", Text, primary_key=True),
    Column("snapshot", BigInteger, primary_key=True, autoincrement=False),
    Column("table_name", Text, primary_key=True),
    Column("digest", Text, primary_key=True),  # of the key, which may be too long for an index
    Column("key", Text, nullable=False),
)

kv = Table(
    "df_kv",
    metadata,
    Column("ns", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    Column("val", LargeBinary, nullable=False),
    Column("updated_at", Double, nullable=False),
    Column("expires_at", Double),
)

log = Table(
    "df_log",
    metadata,
    Column("seq", _SERIAL, primary_key=True),
    Column("ns", Text, nullable=False),
    Column("key", Text, nullable=False),
    Column("val", LargeBinary, nullable=False),
    Column("ts", Double, nullable=False),
    sqlite_autoincrement=True,  # a number is never reused, even after its row is deleted
)
Index("df_log_of_key", log.c.ns, log.c.key, log.c.seq)

slot = Table(
    "df_slot",
    metadata,
    Column("ns", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    Column("version", BigInteger, nullable=False),
    Column("state", LargeBinary, nullable=False),
    Column("updated_at", Double, nullable=False),
)

queue = Table(
    "df_queue",
    metadata,
    Column("id", _SERIAL, primary_key=True),
    Column("ns", Text, nullable=False),
    Column("key", Text, nullable=False),
    Column("val", LargeBinary, nullable=False),
    Column("ts", Double, nullable=False),
    sqlite_autoincrement=True,
)
Index("df_queue_of_key", queue.c.ns, queue.c.key, queue.c.id)


Row = TypeVar(
    "Row",
    PipelineRow,
    LeaseRow,
    RangeRow,
    SegmentRow,
    CheckpointRow,
    HoldRow,
    HoldPartRow,
    DeadLetterRow,
)

_TABLES: dict[type, Table] = {
    PipelineRow: pipelines,
    LeaseRow: leases,
    RangeRow: ranges,
    SegmentRow: segments,
    CheckpointRow: checkpoints,
    HoldRow: holds,
    HoldPartRow: hold_parts,
    DeadLetterRow: dead_letters,
}


def read_rows(
    connection: Connection,
    kind: type[Row],
    *where: ColumnElement[bool],
    order: ColumnElement[int] | None = None,
    limit: int | None = None,
) -> list[Row]:
    """Return the rows of a kind that match all conditions.

    The fields of the kind are columns of the same name.
    """
    table = _TABLES[kind]
    names = [field.name for field in fields(kind)]
    query = select(*(table.c[name] for name in names)).where(*where).limit(limit).order_by(order)
    return [kind(**dict(zip(names, row, strict=True))) for row in connection.execute(query)]


def find_pipeline(connection: Connection, name: str) -> PipelineRow | None:
    """Return a pipeline, or None if it was never registered."""
    rows = read_rows(connection, PipelineRow, pipelines.c.name == name)
    return rows[0] if rows else None


def known_pipeline(connection: Connection, name: str) -> PipelineRow:
    """Return a pipeline that must exist.

    Raises:
        NotAllowed: It was never registered.
    """
    row = find_pipeline(connection, name)
    if row is None:
        raise NotAllowed(f"no pipeline {name!r} in the state store")
    return row


def read_checkpoints(connection: Connection, pipeline: str) -> dict[str, CheckpointRow]:
    """Return the checkpoint of every sink of a pipeline."""
    rows = read_rows(connection, CheckpointRow, checkpoints.c.pipeline == pipeline)
    return {row.sink: row for row in rows}


def between(
    numbers: ColumnElement[int], first: int | None, last: int | None
) -> list[ColumnElement[bool]]:
    """Return the conditions that a number is in the range from `first` to `last`, inclusive."""
    conditions = []
    if first is not None:
        conditions.append(numbers >= first)
    if last is not None:
        conditions.append(numbers <= last)
    return conditions


def position_before(connection: Connection, pipeline: PipelineRow, segment: int) -> str | None:
    """Return the position at which `segment` starts.

    Raises:
        NotAllowed: The segment is neither in the journal nor the next one to be captured.
    """
    if segment == pipeline.next_segment:
        return pipeline.captured_position or pipeline.start_position
    query = select(segments.c.start_position).where(
        segments.c.pipeline == pipeline.name, segments.c.segment == segment
    )
    position = connection.execute(query).scalar()
    if position is None:
        raise NotAllowed(
            f"pipeline {pipeline.name!r}: segment {segment}, with which delivery would go on, is "
            f"not in the journal (the next one to be captured is {pipeline.next_segment})"
        )
    return str(position)
