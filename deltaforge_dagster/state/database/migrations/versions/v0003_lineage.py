"""What of a checkpoint says whether the position counts that its sink keeps itself."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add the columns; all that was delivered until now was delivered at least once."""
    op.add_column("checkpoint", sa.Column("lineage", sa.Text))
    op.add_column(
        "checkpoint",
        sa.Column("overrules", sa.Boolean, nullable=False, server_default=sa.true()),
    )
    op.add_column("checkpoint", sa.Column("skip", sa.Text))
    op.add_column("checkpoint", sa.Column("notice", sa.Text))
