"""All tables of the state store, as release 0.1.0 has them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0.1.0"
down_revision = None

# SQLite assigns numbers automatically only in a column of exactly this type.
_SERIAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Make every table."""
    op.create_table(
        "checkpoint",
        sa.Column("pipeline", sa.Text, primary_key=True),
        sa.Column("sink", sa.Text, primary_key=True),
        sa.Column("segment", sa.BigInteger, nullable=False),
        sa.Column("ordinal", sa.BigInteger, nullable=False),
        sa.Column("complete", sa.Boolean, nullable=False),
        sa.Column("source_position", sa.Text),
        sa.Column("first_segment", sa.BigInteger, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("failures", sa.BigInteger, nullable=False),
        sa.Column("next_attempt_at", sa.Double, nullable=False),
        sa.Column("last_error", sa.Text),
        sa.Column("remedy", sa.JSON),
        sa.Column("failing_since", sa.Double),
        sa.Column("updated_at", sa.Double, nullable=False),
        sa.Column("incarnation", sa.Text),
        sa.Column("overrules", sa.Boolean, nullable=False),
        sa.Column("skip", sa.Text),
        sa.Column("notice", sa.Text),
        sa.Column("sent_segment", sa.BigInteger),
        sa.Column("sent_ordinal", sa.BigInteger),
        sa.Column("began", sa.Text),
        sa.Column("snapshot_due", sa.Boolean, server_default=sa.false(), nullable=False),
    )
    op.create_table(
        "chunk",
        sa.Column("pipeline", sa.Text, primary_key=True),
        sa.Column("snapshot", sa.BigInteger, autoincrement=False, primary_key=True),
        sa.Column("table_name", sa.Text, primary_key=True),
        sa.Column("number", sa.BigInteger, autoincrement=False, primary_key=True),
        sa.Column("plan", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("attempts", sa.BigInteger, nullable=False),
        sa.Column("path", sa.Text),
        sa.Column("checksum", sa.Text),
        sa.Column("rows", sa.BigInteger),
        sa.Column("bytes", sa.BigInteger),
        sa.Column("read_view", sa.Text),
        sa.Column("position", sa.Text),
        sa.Column("described", sa.Text),
        sa.Column("first_segment", sa.BigInteger),
        sa.Column("read_at", sa.Double),
        sa.Column("seconds", sa.Double),
        sa.Column("segment", sa.BigInteger),
        sa.Column("journaled_rows", sa.BigInteger),
    )
    op.create_table(
        "dead_letter",
        sa.Column("seq", _SERIAL, primary_key=True),
        sa.Column("pipeline", sa.Text, nullable=False),
        sa.Column("sink", sa.Text, nullable=False),
        sa.Column("event_id", sa.Text, nullable=False),
        sa.Column("segment", sa.BigInteger, nullable=False),
        sa.Column("ordinal", sa.BigInteger, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("error_kind", sa.Text, nullable=False),
        sa.Column("error_message", sa.Text, nullable=False),
        sa.Column("attempts", sa.BigInteger, nullable=False),
        sa.Column("table_name", sa.Text, nullable=False),
        sa.Column("row_key", sa.Text),
        sa.Column("old_key", sa.Text),
        sa.Column("holds", sa.Boolean, nullable=False),
        sa.Column("source_cursor", sa.Text, nullable=False),
        sa.Column("event", sa.Text, nullable=False),
        sa.Column("payload_truncated", sa.Boolean, nullable=False),
        sa.Column("path", sa.Text, nullable=False),
        sa.Column("checksum", sa.Text, nullable=False),
        sa.Column("place", sa.BigInteger, nullable=False),
        sa.Column("token", sa.Text),
        sa.Column("created_at", sa.Double, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index(
        "dead_letter_of_event", "dead_letter", ["pipeline", "sink", "event_id"], unique=True
    )
    op.create_index("dead_letter_of_pipeline", "dead_letter", ["pipeline", "seq"])
    op.create_table(
        "df_kv",
        sa.Column("ns", sa.Text, primary_key=True),
        sa.Column("key", sa.Text, primary_key=True),
        sa.Column("val", sa.LargeBinary, nullable=False),
        sa.Column("updated_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double),
    )
    op.create_table(
        "df_log",
        sa.Column("seq", _SERIAL, primary_key=True),
        sa.Column("ns", sa.Text, nullable=False),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("val", sa.LargeBinary, nullable=False),
        sa.Column("ts", sa.Double, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("df_log_of_key", "df_log", ["ns", "key", "seq"])
    op.create_table(
        "df_queue",
        sa.Column("id", _SERIAL, primary_key=True),
        sa.Column("ns", sa.Text, nullable=False),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("val", sa.LargeBinary, nullable=False),
        sa.Column("ts", sa.Double, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("df_queue_of_key", "df_queue", ["ns", "key", "id"])
    op.create_table(
        "df_slot",
        sa.Column("ns", sa.Text, primary_key=True),
        sa.Column("key", sa.Text, primary_key=True),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("state", sa.LargeBinary, nullable=False),
        sa.Column("updated_at", sa.Double, nullable=False),
    )
    op.create_table(
        "hold",
        sa.Column("pipeline", sa.Text, primary_key=True),
        sa.Column("kind", sa.Text, primary_key=True),
        sa.Column("subject", sa.Text, primary_key=True),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("since", sa.Double, nullable=False),
        sa.Column("since_position", sa.Text, nullable=False),
        sa.Column("events", sa.BigInteger, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("remedy", sa.Text),
        sa.Column("last_segment", sa.BigInteger),
    )
    op.create_table(
        "hold_part",
        sa.Column("pipeline", sa.Text, primary_key=True),
        sa.Column("path", sa.Text, primary_key=True),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("subject", sa.Text, nullable=False),
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.Column("checksum", sa.Text, nullable=False),
        sa.Column("events", sa.BigInteger, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "table_commit",
        sa.Column("pipeline", sa.Text, primary_key=True),
        sa.Column("sink", sa.Text, primary_key=True),
        sa.Column("destination", sa.Text, primary_key=True),
        sa.Column("segment", sa.BigInteger, nullable=False),
        sa.Column("planned_to", sa.BigInteger),
        sa.Column("owner", sa.Text),
        sa.Column("ends", sa.JSON, nullable=False),
        sa.Column("error", sa.Text),
        sa.Column("since", sa.Double),
        sa.Column("next_attempt_at", sa.Double, nullable=False),
        sa.Column("failures", sa.BigInteger, nullable=False),
        sa.Column("remedy", sa.JSON),
    )
    op.create_table(
        "table_pending",
        sa.Column("pipeline", sa.Text, primary_key=True),
        sa.Column("sink", sa.Text, primary_key=True),
        sa.Column("destination", sa.Text, primary_key=True),
        sa.Column("source", sa.JSON, nullable=False),
        sa.Column("segment", sa.BigInteger, nullable=False),
        sa.Column("changes", sa.BigInteger, nullable=False),
        sa.Column("since", sa.Double, nullable=False),
    )
    op.create_table(
        "table_resync",
        sa.Column("pipeline", sa.Text, primary_key=True),
        sa.Column("sink", sa.Text, primary_key=True),
        sa.Column("destination", sa.Text, primary_key=True),
        sa.Column("table_name", sa.Text, nullable=False),
        sa.Column("begun", sa.Boolean, nullable=False),
    )
    op.create_table(
        "table_write",
        sa.Column("pipeline", sa.Text, primary_key=True),
        sa.Column("sink", sa.Text, primary_key=True),
        sa.Column("source", sa.Text, primary_key=True),
        sa.Column("segment", sa.BigInteger, autoincrement=False, primary_key=True),
        sa.Column("destination", sa.JSON, nullable=False),
        sa.Column("columns", sa.JSON, nullable=False),
        sa.Column("changes", sa.BigInteger, nullable=False),
        sa.Column("position", sa.Text, nullable=False),
        sa.Column("changed_at", sa.Double, nullable=False),
        sa.Column("written_at", sa.Double, nullable=False),
        sa.Column("published", sa.Boolean, nullable=False),
        sa.Column("figures", sa.JSON(none_as_null=True)),
        sa.Column("lacking", sa.JSON(none_as_null=True)),
        sa.Column("int64_timestamps", sa.Boolean, server_default=sa.false(), nullable=False),
    )
    op.create_table(
        "lease",
        sa.Column("pipeline", sa.Text, primary_key=True),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("run_id", sa.Text),
        sa.Column("expires_at", sa.Double, nullable=False),
        sa.Column("session_id", sa.Text),
    )
    op.create_table(
        "metric",
        sa.Column("pipeline", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("labels", sa.Text, primary_key=True),
        sa.Column("value", sa.Double, nullable=False),
    )
    op.create_table(
        "pipeline",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("uid", sa.Text, nullable=False),
        sa.Column("spec_hash", sa.Text, nullable=False),
        sa.Column("start_position", sa.Text),
        sa.Column("captured_position", sa.Text),
        sa.Column("confirmed_position", sa.Text),
        sa.Column("next_segment", sa.BigInteger, nullable=False),
        sa.Column("next_range", sa.BigInteger, nullable=False),
        sa.Column("desired_state", sa.Text, nullable=False),
        sa.Column("probe_after", sa.Double, nullable=False),
        sa.Column("probe_wait", sa.Double, nullable=False),
        sa.Column("capture_pause", sa.Text),
        sa.Column("failure", sa.Text),
        sa.Column("findings", sa.Text),
        sa.Column("ticked_at", sa.Double),
        sa.Column("source_seen_at", sa.Double),
        sa.Column("file", sa.Text),
        sa.Column("outdated_since", sa.Double),
    )
    op.create_table(
        "published",
        sa.Column("pipeline", sa.Text, primary_key=True),
        sa.Column("range", sa.BigInteger, autoincrement=False, primary_key=True),
        sa.Column("asset", sa.Text, primary_key=True),
        sa.Column("published_at", sa.Double, nullable=False),
    )
    op.create_table(
        "range",
        sa.Column("pipeline", sa.Text, primary_key=True),
        sa.Column("range", sa.BigInteger, autoincrement=False, primary_key=True),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("spec_hash", sa.Text, nullable=False),
        sa.Column("first_segment", sa.BigInteger, nullable=False),
        sa.Column("last_segment", sa.BigInteger, nullable=False),
        sa.Column("start_position", sa.Text, nullable=False),
        sa.Column("end_position", sa.Text, nullable=False),
        sa.Column("rows", sa.BigInteger, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("counts", sa.JSON, nullable=False),
        sa.Column("schema_versions", sa.JSON, nullable=False),
        sa.Column("first_ts_us", sa.BigInteger, nullable=False),
        sa.Column("last_ts_us", sa.BigInteger, nullable=False),
        sa.Column("content_hash", sa.Text),
        sa.Column("close_reason", sa.Text),
        sa.Column("opened_at", sa.Double, nullable=False),
        sa.Column("closed_at", sa.Double),
    )
    op.create_index(
        "range_one_open",
        "range",
        ["pipeline"],
        unique=True,
        sqlite_where=sa.text("state = 'open'"),
        postgresql_where=sa.text("state = 'open'"),
    )
    op.create_table(
        "segment",
        sa.Column("pipeline", sa.Text, primary_key=True),
        sa.Column("segment", sa.BigInteger, autoincrement=False, primary_key=True),
        sa.Column("segment_id", sa.Text, nullable=False),
        sa.Column("range", sa.BigInteger, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("path", sa.Text, nullable=False),
        sa.Column("checksum", sa.Text, nullable=False),
        sa.Column("content_hash", sa.Text, nullable=False),
        sa.Column("rows", sa.BigInteger, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("start_position", sa.Text, nullable=False),
        sa.Column("end_position", sa.Text, nullable=False),
        sa.Column("counts", sa.JSON, nullable=False),
        sa.Column("schema_versions", sa.JSON, nullable=False),
        sa.Column("first_ts_us", sa.BigInteger, nullable=False),
        sa.Column("last_ts_us", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("chain_hash", sa.Text),
        sa.Column("processed_path", sa.Text),
        sa.Column("processed_checksum", sa.Text),
        sa.Column("processed_content_hash", sa.Text),
        sa.Column("processed_rows", sa.BigInteger),
        sa.Column("processed_bytes", sa.BigInteger),
        sa.Column("processed_counts", sa.JSON),
        sa.Column("received_at", sa.Double),
        sa.Column("trigger", sa.Text),
        sa.Column("sinks", sa.JSON, server_default="[]", nullable=False),
    )
    op.create_index("segment_of_range", "segment", ["pipeline", "range"])
    op.create_table(
        "snapshot",
        sa.Column("pipeline", sa.Text, primary_key=True),
        sa.Column("snapshot", sa.BigInteger, autoincrement=False, primary_key=True),
        sa.Column("tables", sa.JSON, nullable=False),
        sa.Column("condition", sa.Text),
        sa.Column("cause", sa.Text, nullable=False),
        sa.Column("spec_hash", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("problem", sa.Text),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("ended_at", sa.Double),
        sa.Column("sinks", sa.JSON, server_default="[]", nullable=False),
        sa.Column("since_segment", sa.BigInteger, server_default="0", nullable=False),
    )
    op.create_table(
        "stored_spec",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("document", sa.Text, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("updated_at", sa.Double, nullable=False),
    )
    op.create_table(
        "relocated_row",
        sa.Column("pipeline", sa.Text, primary_key=True),
        sa.Column("snapshot", sa.BigInteger, autoincrement=False, primary_key=True),
        sa.Column("table_name", sa.Text, primary_key=True),
        sa.Column("digest", sa.Text, primary_key=True),
        sa.Column("key", sa.Text, nullable=False),
    )
    op.create_table(
        "undelivered",
        sa.Column("pipeline", sa.Text, primary_key=True),
        sa.Column("sink", sa.Text, primary_key=True),
        sa.Column("segment", sa.BigInteger, autoincrement=False, primary_key=True),
        sa.Column("fate", sa.Text, primary_key=True),
        sa.Column("ordinals", sa.JSON, nullable=False),
    )
