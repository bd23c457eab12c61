"""Reads what a table records of its commits: a writer's last one, and the figures of a version.

The last commit of a table of a format with branches is found from its snapshots. Each snapshot of a
commit is stamped with the commit's writer and number. Before snapshots expire, after which none
with a stamp may remain, maintenance copies the newest stamp to a property of the table
(`CommitCopy`).

Figures are the files, bytes and rows that formats count when they commit; no data is read for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import orjson

from deltaforge_dagster.sinks.lake.dialect import COMMITTED, LakeDialect
from deltaforge_dagster.state.table_commits import TableFigures

if TYPE_CHECKING:  # PySpark is imported when a session is asked for
    from pyspark.sql import Row

    from deltaforge_dagster.pipeline.spark_client import SparkSession


@dataclass(frozen=True, slots=True)
class CommitCopy:
    """The property of a table with the number of the last commit that it has.

    Attributes:
        writer: Whose commits, as stamps name it.
        version: Number of the last commit.
        snapshot: The table's newest snapshot when this was written.
        at: When that snapshot was made, in microseconds since 1970 UTC.
    """

    writer: str
    version: int
    snapshot: int
    at: int

    @classmethod
    def of(cls, properties: Mapping[str, str]) -> Self | None:
        """Return the copy in a table's properties, if there is one."""
        try:
            return cls(**orjson.loads(properties[COMMITTED]))
        except (KeyError, ValueError, TypeError):
            return None

    def to_json(self) -> str:
        """Return the text of the property."""
        return orjson.dumps(self).decode()


def last_commit(
    snapshots: Sequence[Row], head: int | None, properties: Mapping[str, str], writer: str
) -> int | None:
    """Return the number of a writer's last commit in the history of a snapshot; None if unknown.

    Args:
        snapshots: All snapshots that have not expired, read before the properties.
        head: The snapshot.
        properties: Properties of the table.
        writer: Whose commits, as stamps name it.
    """
    history = list(_history(snapshots, head))
    stamped = [int(row.version) for row in history if row.owner == writer]
    copy = CommitCopy.of(properties)
    if copy is not None and copy.writer == writer and _has_copy(history, copy):
        stamped.append(copy.version)
    return max(stamped, default=None)


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


def _has_copy(history: Sequence[Row], copy: CommitCopy) -> bool:
    """Return whether the table still descends from the copy's snapshot.

    It does if the history has that snapshot, or if the history begins later, because older
    snapshots have expired. It does not if the table was rolled back to an earlier snapshot.
    """
    if not history:
        return False
    return copy.snapshot in {row.id for row in history} or history[-1].at > copy.at


def _history(snapshots: Sequence[Row], head: int | None) -> Iterator[Row]:
    by_id = {row.id: row for row in snapshots}
    while head is not None and (row := by_id.get(head)) is not None:
        yield row
        head = row.parent
