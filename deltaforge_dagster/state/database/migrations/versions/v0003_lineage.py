"""Columns of a checkpoint that decide whether the position that its sink keeps itself counts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add the columns; every delivery before this version was at least once."""
    op.add_column("checkpoint", sa.Column("lineage", sa.Text))
    op.add_column(
        "checkpoint",
        sa.Column("overrules", sa.Boolean, nullable=False, server_default=sa.true()),
    )
    op.add_column("checkpoint", sa.Column("skip", sa.Text))
    op.add_column("checkpoint", sa.Column("notice", sa.Text))
