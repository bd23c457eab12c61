"""Since when Dagster's definitions are older than a pipeline's file."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"


def upgrade() -> None:
    """Add the column; the next tick fills it."""
    op.add_column("pipeline", sa.Column("outdated_since", sa.Double))
