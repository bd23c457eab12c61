"""Databases to read from, as the source contract wants them: Turso's change table, and triggers in SQLite."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import turso

from deltaforge_dagster.sources.turso.position import TursoPosition
from deltaforge_dagster.sources.turso.source import TursoSource
from deltaforge_dagster.sources.turso.source_type import TursoSourceConfig
from deltaforge_dagster.testing.sources import Bench

_REPEAT = re.compile(r"repeat\('x', (\d+)\)")


class FileBench(Bench):
    """The tables `orders` and `items`, which are captured, and `other`, which is not.

    Args:
        path: A file that is not there yet.
    """

    database = "main"
    mode: str

    def __init__(self, path: Path) -> None:
        self.path = path
        self._sources: list[TursoSource] = []
        self._away = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for source in self._sources:
            source.close()

    def config(self, **changed: Any) -> TursoSourceConfig:
        """Return the source's configuration, with some fields changed."""
        fields = {
            "id": "shop",
            "url": str(self.path),
            "tables": ("orders", "items"),
            "cdc_mode": self.mode,
            "poll_interval_ms": 20,
        }
        patterns = changed.get("tables")
        if patterns is not None:  # the contract names tables in full
            changed["tables"] = tuple(one.removeprefix("main.") for one in patterns)
        return TursoSourceConfig(**{**fields, **changed})

    def source(self, **changed: Any) -> TursoSource:
        """Return a new source, closed when the bench ends; `columns` are `engine.columns`."""
        columns = changed.pop("columns", None)
        source = TursoSource(self.config(**changed), columns)
        self._sources.append(source)
        return source

    def execute(self, *statements: str) -> None:
        """Run the statements in one transaction; put the file back, if it is away."""
        if self._away:
            self.path.with_suffix(".away").rename(self.path)
            self._away = False
        self.run("BEGIN IMMEDIATE", *map(_without_repeat, statements), "COMMIT")

    def run(self, *statements: str) -> None:
        """Run the statements, each for itself."""
        raise NotImplementedError

    def cut(self) -> None:
        """Take the file away."""
        with closing(sqlite3.connect(self.path)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self.path.rename(self.path.with_suffix(".away"))
        self._away = True

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Return what a query finds."""
        raise NotImplementedError


class NativeBench(FileBench):
    """A file of Turso, whose connections capture into `turso_cdc`.

    Args:
        path: A file that is not there yet.
        capture: What connections capture.
    """

    holds_log = False
    has_transactions = True
    maintained = False  # a file that one process at a time may open
    mode = "native"

    def __init__(self, path: Path, capture: str = "full") -> None:
        super().__init__(path)
        self.capture: str | None = capture
        self.run(*_tables())

    def run(self, *statements: str) -> None:
        """Run the statements, each for itself, over a connection that captures."""
        with closing(turso.connect(str(self.path), isolation_level=None)) as connection:
            if self.capture is not None:
                connection.execute(
                    f"PRAGMA unstable_capture_data_changes_conn('{self.capture}')"
                ).fetchall()
            for statement in statements:
                connection.execute(statement).fetchall()

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Return what a query finds."""
        with closing(turso.connect(str(self.path), isolation_level=None)) as connection:
            return connection.execute(query).fetchall()

    def uncaptured(self, *statements: str) -> None:
        """Run the statements over a connection that does not capture."""
        capture, self.capture = self.capture, None
        self.run(*statements)
        self.capture = capture

    def forget(self) -> None:
        """Empty the change table."""
        self.uncaptured("DELETE FROM turso_cdc")

    def confirmed(self) -> None:
        """Nothing: the change table is the application's."""


class SqliteBench(FileBench):
    """A file of SQLite."""

    has_transactions = False

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.run("PRAGMA journal_mode = WAL", *_tables())

    def run(self, *statements: str) -> None:
        """Run the statements, each for itself."""
        with closing(sqlite3.connect(self.path, isolation_level=None, timeout=60)) as connection:
            for statement in statements:
                connection.execute(statement)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Return what a query finds."""
        with closing(sqlite3.connect(self.path, isolation_level=None, timeout=60)) as connection:
            return connection.execute(query).fetchall()


class TriggerBench(SqliteBench):
    """A file of SQLite, all of whose tables have triggers."""

    holds_log = True
    lost_log_is_finding = True
    mode = "triggers"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        TursoSource(self.config(tables=("*",), auto_create_triggers=True)).ensure_start()

    def forget(self) -> None:
        """Empty the table of changes."""
        self.run("DELETE FROM _df_cdc_changes")

    def confirmed(self) -> TursoPosition:
        """Return what stands before everything that is left."""
        ((oldest, newest),) = self.rows(
            "SELECT (SELECT min(id) FROM _df_cdc_changes), seq FROM sqlite_sequence"
            " WHERE name = '_df_cdc_changes'"
        )
        return TursoPosition("triggers", newest if oldest is None else oldest - 1)


class PollingBench(SqliteBench):
    """A file of SQLite without any record of changes."""

    mode = "polling"


def _tables() -> Iterable[str]:
    return (
        f"CREATE TABLE {one} (id INTEGER PRIMARY KEY, v TEXT)"
        for one in ("orders", "items", "other")
    )


def _without_repeat(statement: str) -> str:
    """SQLite has no `repeat`."""
    return _REPEAT.sub(
        lambda found: f"replace(hex(zeroblob({int(found[1]) // 2})), '0', 'x')", statement
    )
