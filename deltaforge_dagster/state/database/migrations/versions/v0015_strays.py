"""Relocated rows: rows that moved between chunks of a table while a snapshot read them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    """Make the table."""
    op.create_table(
        "stray",
        sa.Column("pipeline", sa.Text, primary_key=True),
        sa.Column("snapshot", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("table_name", sa.Text, primary_key=True),
        sa.Column("digest", sa.Text, primary_key=True),
        sa.Column("key", sa.Text, nullable=False),
    )
