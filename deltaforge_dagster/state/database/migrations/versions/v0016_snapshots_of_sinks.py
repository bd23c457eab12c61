"""Snapshots for some sinks only: which sinks are due to get one, and which sinks a segment is for."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    """Add the columns; existing snapshots and segments are for all sinks."""
    op.add_column(
        "checkpoint",
        sa.Column("snapshot_due", sa.Boolean, nullable=False, server_default=sa.false()),
    )
    op.add_column("snapshot", sa.Column("sinks", sa.JSON, nullable=False, server_default="[]"))
    op.add_column(
        "snapshot",
        sa.Column("since_segment", sa.BigInteger, nullable=False, server_default="0"),
    )
    op.add_column("segment", sa.Column("sinks", sa.JSON, nullable=False, server_default="[]"))
