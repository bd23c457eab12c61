"""What the commits of sinks that write tables have reached, and what they have added."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "lake_commit",
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
    )
    op.create_table(
        "lake_write",
        sa.Column("pipeline", sa.Text, primary_key=True),
        sa.Column("sink", sa.Text, primary_key=True),
        sa.Column("source", sa.Text, primary_key=True),
        sa.Column("segment", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("destination", sa.JSON, nullable=False),
        sa.Column("columns", sa.JSON, nullable=False),
        sa.Column("changes", sa.BigInteger, nullable=False),
        sa.Column("position", sa.Text, nullable=False),
        sa.Column("changed_at", sa.Double, nullable=False),
        sa.Column("written_at", sa.Double, nullable=False),
        sa.Column("published", sa.Boolean, nullable=False),
    )
