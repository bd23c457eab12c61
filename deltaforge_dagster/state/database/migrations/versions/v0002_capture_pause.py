"""Why capture is paused: the journal is full of segments that a sink still lacks."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add the reason to the pipeline; null while capture is not paused."""
    op.add_column("pipeline", sa.Column("capture_pause", sa.Text))
