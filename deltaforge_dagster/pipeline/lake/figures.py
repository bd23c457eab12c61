"""What formats count themselves as they commit: files, bytes and rows of a table, read without looking at its data."""

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
        """Return the version of the session's last commit, None if it has made none."""
        setting = self.dialect.last_version
        found = None if setting is None else self.session.conf.get(setting, None)
        return None if found is None else int(found)

    def newest(self, table: str) -> int | None:
        """Return the newest version of a table, None if it has none."""
        found = self.session.sql(self.dialect.maintenance.newest(table)).collect()
        return found[0]["version"] if found else None

    def read(self, destination: Sequence[str], version: int) -> TableFigures:
        """Return the figures of a version of a table; without numbers if the format has none of that version."""
        from pyspark.errors import PySparkException  # noqa: PLC0415 - slow

        table = self.dialect.table(destination)
        try:
            query = self.dialect.figures(table, version, self._location(destination))
            found = self.session.sql(query).collect()
        except PySparkException:  # what was committed is not less so because nobody has counted it
            found = []
        if not found:
            return TableFigures(version)
        row = found[0]
        return TableFigures(version, row["files"], row["bytes"], row["rows"], row["deleted"])

    def small_files(self, destination: Sequence[str], version: int) -> int | None:
        """Return the number of small files in a version of a table, None if the format does not tell."""
        from pyspark.errors import AnalysisException  # noqa: PLC0415 - slow

        table = self.dialect.table(destination)
        location = self._location(destination)
        query = self.dialect.maintenance.small_files(table, version, location)
        try:
            found = self.session.sql(query).collect()
        except AnalysisException:  # nobody has counted them
            return None
        return found[0]["small"] if found else None

    def _location(self, destination: Sequence[str]) -> str | None:
        name = tuple(destination)
        if name not in self._locations:
            query = self.dialect.location(destination)
            found = None if query is None else self.session.sql(query).collect()[0]["location"]
            self._locations[name] = found
        return self._locations[name]
