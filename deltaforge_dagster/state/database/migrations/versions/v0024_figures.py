"""What a lake table consists of after a commit."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"


def upgrade() -> None:
    """Add the column."""
    op.add_column("lake_write", sa.Column("figures", sa.JSON))
