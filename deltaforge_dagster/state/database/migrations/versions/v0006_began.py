"""Where a sink began that was added later, as text for people."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Add the column; null for existing sinks, of which it is not known."""
    op.add_column("checkpoint", sa.Column("began", sa.Text))
