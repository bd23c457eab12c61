"""Findings of the last check of the source, the times of the last checks, and the path of the pipeline's file."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    """Add the columns; null until the next check."""
    op.add_column("pipeline", sa.Column("findings", sa.Text))
    op.add_column("pipeline", sa.Column("ticked_at", sa.Double))
    op.add_column("pipeline", sa.Column("source_seen_at", sa.Double))
    op.add_column("pipeline", sa.Column("file", sa.Text))
