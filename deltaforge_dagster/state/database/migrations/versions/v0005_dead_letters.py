"""Dead letters, and the row that an exactly-once sink's own position names when its checkpoint is further."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Make the table, and add the columns."""
    op.create_table(
        "dead_letter",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True),
        sa.Column("pipeline", sa.Text, nullable=False),
        sa.Column("sink", sa.Text, nullable=False),
        sa.Column("event_id", sa.Text, nullable=False),
        sa.Column("segment", sa.BigInteger, nullable=False),
        sa.Column("ordinal", sa.BigInteger, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("error_kind", sa.Text, nullable=False),
        sa.Column("error_message", sa.Text, nullable=False),
        sa.Column("attempts", sa.BigInteger, nullable=False),
        sa.Column("table_name", sa.Text, nullable=False),
        sa.Column("row_key", sa.Text),
        sa.Column("old_key", sa.Text),
        sa.Column("holds", sa.Boolean, nullable=False),
        sa.Column("source_cursor", sa.Text, nullable=False),
        sa.Column("event", sa.Text, nullable=False),
        sa.Column("payload_truncated", sa.Boolean, nullable=False),
        sa.Column("path", sa.Text, nullable=False),
        sa.Column("checksum", sa.Text, nullable=False),
        sa.Column("place", sa.BigInteger, nullable=False),
        sa.Column("token", sa.Text),
        sa.Column("created_at", sa.Double, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index(
        "dead_letter_of_event", "dead_letter", ["pipeline", "sink", "event_id"], unique=True
    )
    op.create_index("dead_letter_of_pipeline", "dead_letter", ["pipeline", "seq"])
    op.add_column("checkpoint", sa.Column("sent_segment", sa.BigInteger))
    op.add_column("checkpoint", sa.Column("sent_ordinal", sa.BigInteger))
