"""Further columns of a segment that describe the output of its processors."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Add the columns; null for existing segments, which are not processed yet or delivered as captured."""
    op.add_column("segment", sa.Column("processed_content_hash", sa.Text))
    op.add_column("segment", sa.Column("processed_bytes", sa.BigInteger))
    op.add_column("segment", sa.Column("processed_counts", sa.JSON))
