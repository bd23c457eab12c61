"""Choose the mode in which changes are found, and the database engine for it.

Only Turso writes `turso_cdc`, so mode `native` reads a file with Turso's engine; the other modes
read it with SQLite, which can share the file with the application. On a server, all modes use the
same connection.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from deltaforge_dagster.errors import CorruptLog, SourceMisconfigured
from deltaforge_dagster.sources.tables import TablePatterns
from deltaforge_dagster.sources.turso import native, polling, triggers
from deltaforge_dagster.sources.turso.connection import (
    HranaDatabase,
    SqliteFile,
    TursoDatabase,
    TursoFile,
)
from deltaforge_dagster.sources.turso.native import NativeLog
from deltaforge_dagster.sources.turso.polling import PollingLog
from deltaforge_dagster.sources.turso.schema import DB, is_captured
from deltaforge_dagster.sources.turso.source_type import DatabaseFile, TursoSourceConfig
from deltaforge_dagster.sources.turso.triggers import TriggerLog

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Way:
    """A mode of finding changes.

    Attributes:
        mode: Its name.
        database: The database, with the engine that the mode needs.
        log: Finds changes in the database.
    """

    mode: str
    database: TursoDatabase
    log: NativeLog | TriggerLog | PollingLog


class Ways:
    """The modes of finding changes in one database.

    Args:
        config: `spec.source.config`.
    """

    def __init__(self, config: TursoSourceConfig) -> None:
        self._config = config
        self.patterns = TablePatterns(config.tables, unqualified=DB, system=())
        location = config.place
        if isinstance(location, DatabaseFile):
            self._shared: TursoDatabase = SqliteFile(location.path)
            self._native: TursoDatabase = TursoFile(location.path)
        else:
            token = config.auth_token
            self._shared = self._native = HranaDatabase(
                location.url, None if token is None else token.get_secret_value()
            )

    @property
    def where(self) -> str:
        """The file or URL."""
        return self._shared.where

    def captures(self, name: str) -> bool:
        """Return whether a table is captured."""
        return is_captured(self.patterns, name) and name != self._config.cdc_table_name

    def of(self, mode: str) -> Way:
        """Return the `Way` for the name of a mode."""
        where, captures = self._shared.where, self.captures
        match mode:
            case native.MODE:
                shows_ddl = self._config.native_cdc.level == "binlog"
                log = NativeLog(where, self._config.cdc_table_name, captures, shows_ddl)
                return Way(mode, self._native, log)
            case triggers.MODE:
                return Way(mode, self._shared, TriggerLog(where, captures))
            case _:
                column = self._config.tracking_column
                return Way(mode, self._shared, PollingLog(where, captures, column))

    def chosen(self, seconds: float) -> Way:
        """Return the mode in the pipeline file; for `auto`, the first that the database supports.

        Raises:
            DeltaforgeError: The database cannot be reached.
        """
        mode = self._config.cdc_mode
        if mode != "auto":
            return self.of(mode)
        way = self.of(self._detect(seconds))
        logger.info("%s: changes are found by mode %s", self.where, way.mode)
        return way

    def _detect(self, seconds: float) -> str:
        try:
            return self._detect_in(self._shared, seconds)
        except (SourceMisconfigured, CorruptLog):
            if self._native is self._shared:
                raise
            # The file may have a definition or a format that only Turso's engine can read.
            return self._detect_in(self._native, seconds)

    def _detect_in(self, database: TursoDatabase, seconds: float) -> str:
        exists: Callable[..., bool]
        with database.session(seconds) as session:
            for mode, exists in (
                (native.MODE, self.of(native.MODE).log.exists),  # type: ignore[union-attr]
                (triggers.MODE, self.of(triggers.MODE).log.exists),  # type: ignore[union-attr]
            ):
                if exists(session):
                    return mode
        return triggers.MODE if self._config.auto_create_triggers else polling.MODE

    def close(self) -> None:
        """Close connections that are kept between sessions."""
        self._shared.close()
        self._native.close()
