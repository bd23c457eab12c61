"""When a sink began to fail."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"


def upgrade() -> None:
    """Add the column; for sinks that fail already, the time is not known."""
    op.add_column("checkpoint", sa.Column("failing_since", sa.Double))
