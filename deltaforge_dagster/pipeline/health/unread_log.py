"""How much log of the source is not captured yet: measured by ticks and runs, recorded in the state store."""

from __future__ import annotations

from deltaforge_dagster.sources.base import MeasuredSource, Source
from deltaforge_dagster.sources.registry import parse_position
from deltaforge_dagster.state.records import SourceLog
from deltaforge_dagster.state.store import StateStore


def note_unread_log(store: StateStore, name: str, source: Source) -> None:
    """Measure how much log there is after a pipeline's captured position, and record it.

    Raises:
        DeltaforgeError: The server or the store cannot be reached.
    """
    row = store.pipelines.get(name)
    text = None if row is None else row.captured_position or row.start_position
    if text is None or not isinstance(source, MeasuredSource):
        return
    found, now = source.unread_log(parse_position(text)), store.now()
    before = store.pipelines.source_log(name)
    grows = before is not None and before.bytes is not None and found.bytes > before.bytes
    same = before is not None and found.bytes == before.bytes
    since = None
    if before is not None and found.bytes and (grows or same):
        since = before.growing_since or (before.seen_at if grows else None)
    store.pipelines.note_source_log(
        name, SourceLog(now, found.bytes, since, retained=found.retained)
    )
