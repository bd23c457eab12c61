"""Which tables of sinks that write tables have pending changes beside them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"


def upgrade() -> None:
    """Make the table."""
    op.create_table(
        "lake_pending",
        sa.Column("pipeline", sa.Text, primary_key=True),
        sa.Column("sink", sa.Text, primary_key=True),
        sa.Column("destination", sa.Text, primary_key=True),
        sa.Column("source", sa.JSON, nullable=False),
        sa.Column("segment", sa.BigInteger, nullable=False),
        sa.Column("changes", sa.BigInteger, nullable=False),
        sa.Column("since", sa.Double, nullable=False),
    )
