"""Creates or upgrades the tables of a state store to the version of this code.

This happens when a store is opened, in one transaction that only one process at a time can hold
(SQLite: `BEGIN IMMEDIATE`; PostgreSQL: an advisory lock, manual section "Explicit Locking"). So any
number of processes may start at the same time, and a crash leaves the old version intact.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

from deltaforge_dagster.errors import SettingsError
from deltaforge_dagster.state.database.database import Database

VERSION_TABLE = "df_version"
"""Not Alembic's default name, which Dagster's own tables use, perhaps in the same database."""

_LOCK = 0x6466_7374_6174_65  # "dfstate"


def migrate(database: Database) -> None:
    """Create or upgrade the tables; return at once if they are up to date.

    Raises:
        SettingsError: The tables have a version that this code does not know.
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
            raise SettingsError(f"state store {database.where}: {_unknown(version)}")
        config = _config()
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def _unknown(version: str) -> str:
    """Return what to do about tables of a version that this code does not know."""
    if re.fullmatch(r"\d{4}", version):
        return (
            f"its tables are of development version {version}, from before release 0.1.0, and"
            " cannot be upgraded; use a new store, in which pipelines begin again"
        )
    return (
        f"its tables are of version {version}, which this release does not know; a newer release"
        " has upgraded them, so install that one"
    )


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.set_main_option("path_separator", "os")
    return config


# A sensor opens the store at each tick, and reading the files takes most of the time.
@functools.cache
def _known_versions() -> tuple[str, ...]:
    """Return the versions that this code knows, newest first."""
    script = ScriptDirectory.from_config(_config())
    return tuple(revision.revision for revision in script.walk_revisions())


def _version(connection: Connection) -> str | None:
    context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
    return context.get_current_revision()
