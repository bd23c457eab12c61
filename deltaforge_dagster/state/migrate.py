"""Brings the tables of a state store to the version that this code speaks.

Opening a store does it, in one transaction that only one process at a time can hold (SQLite:
`BEGIN IMMEDIATE`; PostgreSQL: an advisory lock, manual section "Explicit Locking"), so any number
of processes may start at once, and a crash leaves the old version whole.
"""

from __future__ import annotations

import functools
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

from deltaforge_dagster.errors import SettingsError
from deltaforge_dagster.state.database import Database

VERSION_TABLE = "df_version"
"""Ours alone: Dagster's own tables, perhaps in the same database, use Alembic's default name."""

_LOCK = 0x6466_7374_6174_65  # "dfstate"


def migrate(database: Database) -> None:
    """Make or upgrade the tables; returns at once when they are up to date.

    Raises:
        SettingsError: The tables are of a version that this code does not know.
        StoreUnavailable: The database cannot be reached, or another process holds the lock.
    """
    with database.read() as connection:
        if _version(connection) == _known_versions()[0]:
            return
    with database.write() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
        version = _version(connection)
        if version is not None and version not in _known_versions():
            raise SettingsError(
                f"state store {database.where}: its tables are of version {version}, which this "
                "release does not know; a newer release has upgraded them, so install that one"
            )
        config = _config()
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.set_main_option("path_separator", "os")
    return config


@functools.cache  # a sensor opens the store at each tick, and to read the files takes most of that
def _known_versions() -> tuple[str, ...]:
    """Return the versions that this code knows, the newest first."""
    script = ScriptDirectory.from_config(_config())
    return tuple(one.revision for one in script.walk_revisions())


def _version(connection: Connection) -> str | None:
    context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
    return context.get_current_revision()
