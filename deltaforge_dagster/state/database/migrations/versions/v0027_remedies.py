"""The commands that fix the last error of a sink, or of a table that is held."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"


def upgrade() -> None:
    """Add the columns."""
    op.add_column("checkpoint", sa.Column("remedy", sa.JSON))
    op.add_column("lake_commit", sa.Column("remedy", sa.JSON))
