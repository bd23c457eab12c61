"""Records dead letters that left the queue, or never entered it, without being delivered.

Checkpoints pass such changes, so without a record they would look delivered. A record holds the
fate of changes by their ordinals in a segment, and is deleted with that segment. It is also deleted
when the checkpoint of the sink is set back, because the sink gets the changes again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Literal

from sqlalchemy import Connection, delete, select

from deltaforge_dagster.state.database.database import Database, upsert
from deltaforge_dagster.state.database.tables import segments, undelivered

Fate = Literal["acknowledged", "evicted", "expired", "rejected"]
"""Whether a user gave the change up (`acknowledged`), or the queue's limits did.

For the latter see `records.DeadLetterDepth`.
"""

_AT_ONCE = 500
"""Number of segments in one statement."""


class UndeliveredRepository:
    """The undelivered changes of all pipelines: `StateStore.undelivered`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def read(self, name: str, segment: int) -> Mapping[str, Mapping[Fate, list[range]]]:
        """Return, by sink and fate, the ordinals of a segment that the sink never received.

        These changes left the queue undelivered, or found no room in it.
        """
        with self._database.read() as connection:
            return _of_segment(connection, name, segment)


class UndeliveredWrites:
    """Forgets undelivered changes that a lease holder sends again: `FencedWriter.undelivered`."""

    def __init__(self, connection: Connection, pipeline: str) -> None:
        self._connection = connection
        self._pipeline = pipeline

    def forget_behind(self, sink: str, segment: int, ordinal: int, *, complete: bool) -> None:
        """Delete the records of changes after a checkpoint, because the sink will get these again.

        Args:
            sink: The sink.
            segment: Segment of the checkpoint.
            ordinal: The last row of this segment that the checkpoint has passed.
            complete: Whether the checkpoint has passed the whole segment.
        """
        of_sink = (undelivered.c.pipeline == self._pipeline) & (undelivered.c.sink == sink)
        kept = (
            {} if complete else _of_segment(self._connection, self._pipeline, segment).get(sink, {})
        )
        last = segment if complete else segment - 1
        self._connection.execute(delete(undelivered).where(of_sink, undelivered.c.segment > last))
        for fate, runs in kept.items():
            passed = [number for run in runs for number in run if number <= ordinal]
            note(
                self._connection,
                self._pipeline,
                fate,
                [(sink, segment, number) for number in passed],
            )


def note(
    connection: Connection, pipeline: str, fate: Fate, places: Iterable[tuple[str, int, int]]
) -> None:
    """Record the fate of changes, given as (sink, segment, ordinal), whose segments still exist."""
    grouped: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for sink, segment, ordinal in places:
        grouped[sink, segment].append(ordinal)
    wanted = sorted({segment for _, segment in grouped})
    for start in range(0, len(wanted), _AT_ONCE):
        portion = wanted[start : start + _AT_ONCE]
        kept = set(
            connection.execute(
                select(segments.c.segment).where(
                    segments.c.pipeline == pipeline, segments.c.segment.in_(portion)
                )
            ).scalars()
        )
        query = select(undelivered.c.sink, undelivered.c.segment, undelivered.c.ordinals).where(
            undelivered.c.pipeline == pipeline,
            undelivered.c.fate == fate,
            undelivered.c.segment.in_(portion),
        )
        stored = {(sink, segment): runs for sink, segment, runs in connection.execute(query)}
        rows = [
            {
                "pipeline": pipeline,
                "sink": sink,
                "segment": segment,
                "fate": fate,
                "ordinals": _joined(stored.get((sink, segment), []), ordinals),
            }
            for (sink, segment), ordinals in grouped.items()
            if segment in kept
        ]
        if rows:
            insert = upsert(connection, undelivered)
            connection.execute(
                insert.on_conflict_do_update(
                    index_elements=["pipeline", "sink", "segment", "fate"],
                    set_={"ordinals": insert.excluded.ordinals},
                ),
                rows,
            )


def _of_segment(
    connection: Connection, pipeline: str, segment: int
) -> Mapping[str, Mapping[Fate, list[range]]]:
    query = select(undelivered.c.sink, undelivered.c.fate, undelivered.c.ordinals).where(
        undelivered.c.pipeline == pipeline, undelivered.c.segment == segment
    )
    fates: defaultdict[str, dict[Fate, list[range]]] = defaultdict(dict)
    for sink, fate, runs in connection.execute(query):
        fates[sink][fate] = [range(first, last + 1) for first, last in runs]
    return fates


def _joined(runs: Iterable[list[int]], more: Iterable[int]) -> list[list[int]]:
    """Add ordinals to runs, given as [first, last]; return the merged runs in order."""
    joined: list[list[int]] = []
    for first, last in sorted([*runs, *([ordinal, ordinal] for ordinal in more)]):
        if joined and first <= joined[-1][1] + 1:
            joined[-1][1] = max(joined[-1][1], last)
        else:
            joined.append([first, last])
    return joined
