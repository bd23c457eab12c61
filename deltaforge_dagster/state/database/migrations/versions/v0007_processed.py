"""What processors made of a segment: the rest of what describes it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Add the columns; what was captured before is delivered as it is, or processed yet."""
    op.add_column("segment", sa.Column("processed_content_hash", sa.Text))
    op.add_column("segment", sa.Column("processed_bytes", sa.BigInteger))
    op.add_column("segment", sa.Column("processed_counts", sa.JSON))
