"""Reads what a table records of its commits: a writer's last one, and what versions have.

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


@dataclass(frozen=True, slots=True)
class CommittedVersion:
    """A version of a table, with all commits up to a segment and no later one.

    Attributes:
        version: The version.
        number: Number of the writer's last commit that it has; -1 if none is known.
        step: Number of the last statement of that commit.
    """

    version: int
    number: int = -1
    step: int = 0


@dataclass(slots=True)
class FigureReader:
    """Reads the figures of tables, and which commits their versions have.

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

    def version_through(
        self, destination: Sequence[str], writer: str, segment: int
    ) -> CommittedVersion | None:
        """Return a table's newest version without commits after a segment.

        If all commits up to the segment are finished, it has exactly these. Commits of all series
        of the writer count, such as folds.

        Args:
            destination: The table.
            writer: Whose commits, as stamps name it.
            segment: The segment.

        Returns:
            The version; None if the table has none, or it is not known which commits they have.
        """
        table = self.dialect.table(destination)
        if self.dialect.branches is not None:
            heads = self.session.sql(self.dialect.branches.references(table)).collect()
            head = next((row.id for row in heads if row.name == "main"), None)
            snapshots = self.session.sql(self.dialect.branches.snapshots(table)).collect()
            return _snapshot_through(snapshots, head, writer, segment)
        newest = self.newest(table)
        for version in range(-1 if newest is None else newest, -1, -1):
            stamps = self._stamps(destination, version)
            if stamps is None:
                return None
            own = [stamp for stamp in stamps if _is_of(stamp.writer, writer)]
            if all(stamp.number <= segment for stamp in own):
                commits = [(stamp.number, stamp.step) for stamp in own if stamp.writer == writer]
                return CommittedVersion(version, *max(commits, default=(-1, 0)))
        return None

    def _stamps(self, destination: Sequence[str], version: int) -> Sequence[Row] | None:
        """Return the newest stamps that a version has; None if they are not known."""
        from pyspark.errors import AnalysisException  # noqa: PLC0415 - slow

        query = self.dialect.stamps(version, self._location(destination))
        assert query is not None
        try:
            rows = self.session.sql(query).collect()
        except AnalysisException:  # whoever has made the version has not counted it
            return None
        return rows[0]["stamps"] if rows else None

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


def _snapshot_through(
    snapshots: Sequence[Row], head: int | None, writer: str, segment: int
) -> CommittedVersion | None:
    """Return the newest snapshot without commits after a segment, as `version_through` does."""
    through = head
    for row in _history(snapshots, head):
        if row.owner is None or not _is_of(row.owner, writer):
            continue
        if int(row.version) <= segment:
            break
        through = row.parent
    if through is None or through not in {row.id for row in snapshots}:
        return None
    return CommittedVersion(through)


def _is_of(stamped: str, writer: str) -> bool:
    """Return whether a stamp is of one of a writer's series."""
    return stamped == writer or stamped.startswith(f"{writer}/")
