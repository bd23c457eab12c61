"""Columns in which older rows of a table have no value."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"


def upgrade() -> None:
    """Add the column."""
    op.add_column("lake_write", sa.Column("lacking", sa.JSON))
