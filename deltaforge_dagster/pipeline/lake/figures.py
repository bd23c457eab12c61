"""Reads the files, bytes and rows that formats count when they commit, without reading data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deltaforge_dagster.sinks.lake.dialect import LakeDialect
from deltaforge_dagster.state.lake_commits import TableFigures

if TYPE_CHECKING:  # PySpark is imported when a session is asked for
    from deltaforge_dagster.pipeline.spark_client import SparkSession


@dataclass(slots=True)
class FigureReader:
    """Reads the figures of tables.

    Args:
        session: Executes the queries.
        dialect: Format of the tables.
    """

    session: SparkSession
    dialect: LakeDialect
    _locations: dict[tuple[str, ...], str | None] = field(default_factory=dict, init=False)

    def forget_version(self) -> None:
        """Forget the session's last commit, so that `last_version` does not return it."""
        if self.dialect.last_version is not None:
            self.session.conf.unset(self.dialect.last_version)

    def last_version(self) -> int | None:
        """Return the version of the session's last commit; None if it has made none."""
        setting = self.dialect.last_version
        version_text = None if setting is None else self.session.conf.get(setting, None)
        return None if version_text is None else int(version_text)

    def newest(self, table: str) -> int | None:
        """Return the newest version of a table; None if it has none."""
        rows = self.session.sql(self.dialect.maintenance.newest(table)).collect()
        return rows[0]["version"] if rows else None

    def read(self, destination: Sequence[str], version: int) -> TableFigures:
        """Return the figures of a table's version, without numbers if the format has none of it."""
        from pyspark.errors import PySparkException  # noqa: PLC0415 - slow

        table = self.dialect.table(destination)
        try:
            query = self.dialect.figures(table, version, self._location(destination))
            rows = self.session.sql(query).collect()
        except PySparkException:  # the commit has succeeded even if its figures cannot be read
            rows = []
        if not rows:
            return TableFigures(version)
        row = rows[0]
        return TableFigures(version, row["files"], row["bytes"], row["rows"], row["deleted"])

    def small_files(self, destination: Sequence[str], version: int) -> int | None:
        """Return the number of small files in a table's version; None if it was not counted."""
        from pyspark.errors import AnalysisException  # noqa: PLC0415 - slow

        table = self.dialect.table(destination)
        location = self._location(destination)
        query = self.dialect.maintenance.small_files(table, version, location)
        try:
            rows = self.session.sql(query).collect()
        except AnalysisException:  # the format has not counted them
            return None
        return rows[0]["small"] if rows else None

    def _location(self, destination: Sequence[str]) -> str | None:
        name = tuple(destination)
        if name not in self._locations:
            query = self.dialect.location(destination)
            location = None if query is None else self.session.sql(query).collect()[0]["location"]
            self._locations[name] = location
        return self._locations[name]
