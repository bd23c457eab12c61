"""Finds the last commit that a table of a format with branches has, from its snapshots.

Each snapshot of a commit is stamped with the commit's writer and number. Before snapshots expire,
after which none with a stamp may remain, maintenance copies the newest stamp to a property of the
table (`CommitCopy`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import orjson

from deltaforge_dagster.sinks.lake.dialect import COMMITTED

if TYPE_CHECKING:  # PySpark is imported when a session is asked for
    from pyspark.sql import Row


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
