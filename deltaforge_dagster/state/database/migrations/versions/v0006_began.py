"""Where a sink began that was added later, for people."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Add the column; nobody knows any more how earlier sinks began."""
    op.add_column("checkpoint", sa.Column("began", sa.Text))
