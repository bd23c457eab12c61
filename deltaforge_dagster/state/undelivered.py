"""Dead letters that left the queue, or never came into it, without being delivered.

Checkpoints pass such changes, so without a note they would look like delivered ones. A note says what
became of them, by their places in a segment, and goes with that segment. A sink that is set back meets
the change anew, so its note goes, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Literal

from sqlalchemy import Connection, delete, select

from deltaforge_dagster.state.database import upsert
from deltaforge_dagster.state.tables import segments, undelivered

Fate = Literal["acknowledged", "evicted", "expired", "rejected"]
"""A person gave it up, or the queue's limits did: see `records.DeadLetterDepth`."""

_AT_ONCE = 500
"""Segments in one statement."""


def note(
    connection: Connection, pipeline: str, fate: Fate, places: Iterable[tuple[str, int, int]]
) -> None:
    """Note what became of changes, each a sink, a segment and an ordinal, as far as these are kept."""
    found: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for sink, segment, ordinal in places:
        found[sink, segment].append(ordinal)
    wanted = sorted({segment for _, segment in found})
    for start in range(0, len(wanted), _AT_ONCE):
        some = wanted[start : start + _AT_ONCE]
        kept = set(
            connection.execute(
                select(segments.c.segment).where(
                    segments.c.pipeline == pipeline, segments.c.segment.in_(some)
                )
            ).scalars()
        )
        query = select(undelivered.c.sink, undelivered.c.segment, undelivered.c.ordinals).where(
            undelivered.c.pipeline == pipeline,
            undelivered.c.fate == fate,
            undelivered.c.segment.in_(some),
        )
        known = {(sink, segment): runs for sink, segment, runs in connection.execute(query)}
        rows = [
            {
                "pipeline": pipeline,
                "sink": sink,
                "segment": segment,
                "fate": fate,
                "ordinals": _joined(known.get((sink, segment), []), ordinals),
            }
            for (sink, segment), ordinals in found.items()
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


def of_segment(
    connection: Connection, pipeline: str, segment: int
) -> Mapping[str, Mapping[Fate, list[range]]]:
    """Return by sink, and by what became of them, the ordinals of a segment."""
    query = select(undelivered.c.sink, undelivered.c.fate, undelivered.c.ordinals).where(
        undelivered.c.pipeline == pipeline, undelivered.c.segment == segment
    )
    found: defaultdict[str, dict[Fate, list[range]]] = defaultdict(dict)
    for sink, fate, runs in connection.execute(query):
        found[sink][fate] = [range(first, last + 1) for first, last in runs]
    return found


def forget_behind(
    connection: Connection, pipeline: str, sink: str, segment: int, ordinal: int, *, complete: bool
) -> None:
    """Drop what is noted of changes behind a checkpoint: the sink will be given these.

    Args:
        connection: A transaction.
        pipeline: The pipeline.
        sink: The sink.
        segment: The segment of the checkpoint.
        ordinal: The last row of it that the checkpoint has passed.
        complete: The checkpoint has passed all of it.
    """
    ours = (undelivered.c.pipeline == pipeline) & (undelivered.c.sink == sink)
    kept = {} if complete else of_segment(connection, pipeline, segment).get(sink, {})
    last = segment if complete else segment - 1
    connection.execute(delete(undelivered).where(ours, undelivered.c.segment > last))
    for fate, runs in kept.items():
        passed = [one for run in runs for one in run if one <= ordinal]
        note(connection, pipeline, fate, [(sink, segment, one) for one in passed])


def _joined(runs: Iterable[list[int]], more: Iterable[int]) -> list[list[int]]:
    """Return runs of ordinals, each its first and its last, with some more: in order, and few."""
    joined: list[list[int]] = []
    for first, last in sorted([*runs, *([one, one] for one in more)]):
        if joined and first <= joined[-1][1] + 1:
            joined[-1][1] = max(joined[-1][1], last)
        else:
            joined.append([first, last])
    return joined
