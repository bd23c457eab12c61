"""Metrics, and for each segment when its first change arrived and why the segment ended."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    """Make the table, and both columns."""
    op.create_table(
        "metric",
        sa.Column("pipeline", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("labels", sa.Text, primary_key=True),
        sa.Column("value", sa.Double, nullable=False),
    )
    op.add_column("segment", sa.Column("received_at", sa.Double))
    op.add_column("segment", sa.Column("trigger", sa.Text))
