"""Snapshots, and the chunks in which they are read."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0007"


def upgrade() -> None:
    """Make both tables."""
    op.create_table(
        "snapshot",
        sa.Column("pipeline", sa.Text, primary_key=True),
        sa.Column("snapshot", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("tables", sa.JSON, nullable=False),
        sa.Column("condition", sa.Text),
        sa.Column("cause", sa.Text, nullable=False),
        sa.Column("spec_hash", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("problem", sa.Text),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("ended_at", sa.Double),
    )
    op.create_table(
        "chunk",
        sa.Column("pipeline", sa.Text, primary_key=True),
        sa.Column("snapshot", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("table_name", sa.Text, primary_key=True),
        sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("plan", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("attempts", sa.BigInteger, nullable=False),
        sa.Column("path", sa.Text),
        sa.Column("checksum", sa.Text),
        sa.Column("rows", sa.BigInteger),
        sa.Column("bytes", sa.BigInteger),
        sa.Column("sight", sa.Text),
        sa.Column("position", sa.Text),
        sa.Column("described", sa.Text),
        sa.Column("first_segment", sa.BigInteger),
        sa.Column("read_at", sa.Double),
        sa.Column("seconds", sa.Double),
        sa.Column("segment", sa.BigInteger),
        sa.Column("spliced_rows", sa.BigInteger),
    )
