"""What the newest look at the source found, when somebody looked, and where the pipeline's file is."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    """Add the columns; nobody has looked, or noted files, yet."""
    op.add_column("pipeline", sa.Column("findings", sa.Text))
    op.add_column("pipeline", sa.Column("ticked_at", sa.Double))
    op.add_column("pipeline", sa.Column("source_seen_at", sa.Double))
    op.add_column("pipeline", sa.Column("file", sa.Text))
