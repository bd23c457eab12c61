"""The tables of pipelines, leases, ranges, segments, checkpoints and publication, and the four primitives."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Make every table."""
    _make_tables_of_the_run()
    _make_primitives()


def _make_tables_of_the_run() -> None:
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
        sa.Column("want", sa.Text, nullable=False),
        sa.Column("probe_after", sa.Double, nullable=False),
        sa.Column("probe_wait", sa.Double, nullable=False),
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
        "range",
        sa.Column("pipeline", sa.Text, primary_key=True),
        sa.Column("range", sa.BigInteger, primary_key=True, autoincrement=False),
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
        sa.Column("segment", sa.BigInteger, primary_key=True, autoincrement=False),
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
        sa.Column("processed_path", sa.Text),
        sa.Column("processed_checksum", sa.Text),
        sa.Column("processed_rows", sa.BigInteger),
        sa.Column("chain_hash", sa.Text),
    )
    op.create_index("segment_of_range", "segment", ["pipeline", "range"])
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
        sa.Column("updated_at", sa.Double, nullable=False),
    )
    op.create_table(
        "published",
        sa.Column("pipeline", sa.Text, primary_key=True),
        sa.Column("range", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("asset", sa.Text, primary_key=True),
        sa.Column("published_at", sa.Double, nullable=False),
    )


def _make_primitives() -> None:
    serial = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
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
        sa.Column("seq", serial, primary_key=True),
        sa.Column("ns", sa.Text, nullable=False),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("val", sa.LargeBinary, nullable=False),
        sa.Column("ts", sa.Double, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("df_log_of_key", "df_log", ["ns", "key", "seq"])
    op.create_table(
        "df_slot",
        sa.Column("ns", sa.Text, primary_key=True),
        sa.Column("key", sa.Text, primary_key=True),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("state", sa.LargeBinary, nullable=False),
        sa.Column("updated_at", sa.Double, nullable=False),
    )
    op.create_table(
        "df_queue",
        sa.Column("id", serial, primary_key=True),
        sa.Column("ns", sa.Text, nullable=False),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("val", sa.LargeBinary, nullable=False),
        sa.Column("ts", sa.Double, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("df_queue_of_key", "df_queue", ["ns", "key", "id"])
