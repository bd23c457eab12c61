"""Dead letters that left the queue without being delivered."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    """Make the table; nothing is known of dead letters that left the queue before."""
    op.create_table(
        "undelivered",
        sa.Column("pipeline", sa.Text, primary_key=True),
        sa.Column("sink", sa.Text, primary_key=True),
        sa.Column("segment", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("fate", sa.Text, primary_key=True),
        sa.Column("ordinals", sa.JSON, nullable=False),
    )
