"""Whether a lake table has no timestamps as INT96; those that are there already may have."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"


def upgrade() -> None:
    """Add the column."""
    column = sa.Column("int64_timestamps", sa.Boolean, nullable=False, server_default=sa.false())
    op.add_column("lake_write", column)
