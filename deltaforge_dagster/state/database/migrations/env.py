"""Runs the migrations on the connection passed by `state.database.migrate`, in its transaction."""

from __future__ import annotations

from alembic import context

from deltaforge_dagster.state.database.migrate import VERSION_TABLE
from deltaforge_dagster.state.database.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=VERSION_TABLE,
)
context.run_migrations()
