"""Retention: what may be deleted from the journal, the state store and Dagster.

A segment is deleted when its range is closed and published, it is older than
`engine.journal.retention_hours`, and every attached sink has it: a segment that such a sink still
needs is never deleted. When the journal has reached its limit, segments are deleted earlier
(`drop_delivered`). The row is deleted first, then its file; a crash in between leaves a file
without a row. Such files, also those of killed runs, are orphans and are deleted after an hour.
Messages that earlier runs have encoded are deleted after a day, since a long replay may still be
reading its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.encode.files import sweep_encoded
from deltaforge_dagster.state.records import SegmentRow
from deltaforge_dagster.state.store import StateStore

ORPHAN_SECONDS = 3600.0
"""Age at which a journal file without a row is an orphan: far beyond the life of a write."""

ENCODED_SECONDS = 86400.0
"""Age at which encoded messages of a run that does not hold the lease are orphans."""


@dataclass(frozen=True, slots=True)
class Expired:
    """What one turn of retention removed."""

    segments: int
    ranges: list[int]
    orphans: int


def expire(store: StateStore, journal: Journal, loaded: LoadedPipeline) -> Expired:
    """Remove what is old and delivered.

    The result names the ranges whose Dagster partitions may go too.
    """
    row = store.pipelines.get(loaded.name)
    lease = store.leases.get(loaded.name)
    if row is None or lease is None:
        return Expired(0, [], 0)
    hours = loaded.spec.spec.engine.journal.retention_hours
    old = store.segments.expirable(loaded.name, before=store.now() - hours * 3600)
    gone = _forget(store, journal, loaded.name, old)
    closed = [range_row.range for range_row in store.ranges.read(loaded.name, state="closed")]
    ranges = store.ranges.expire(loaded.name, closed)
    store.snapshots.expire_chunks(loaded.name, before=store.now() - hours * 3600)
    paths = {path for segment in store.segments.read(loaded.name) for path in segment.paths}
    orphans = journal.sweep(
        loaded.name, row.uid, paths, epoch=lease.epoch, older_than=ORPHAN_SECONDS
    )
    if age := loaded.spec.spec.journal.dlq.max_age_secs:
        store.dead_letters.expire(loaded.name, age)
    kept = {part.path for part in store.holds.parts(loaded.name)}
    kept |= store.dead_letters.files(loaded.name)
    orphans += journal.sweep_held(loaded.name, kept, epoch=lease.epoch, older_than=ORPHAN_SECONDS)
    staged = store.snapshots.staged_paths(loaded.name)
    orphans += journal.sweep_staged(loaded.name, staged, older_than=ORPHAN_SECONDS)
    orphans += sweep_encoded(
        journal.encoded_dir(loaded.name), {lease.run_id or ""}, older_than=ENCODED_SECONDS
    )
    return Expired(gone, ranges, len(orphans))


def drop_delivered(store: StateStore, journal: Journal, pipeline: str, *, down_to: int) -> None:
    """Remove the oldest segments that nobody needs until the journal has `down_to` bytes or less.

    Their ranges stay, without their files, until `expire` removes them.
    """
    surplus = store.segments.total_bytes(pipeline) - down_to
    oldest = []
    for segment in store.segments.expirable(pipeline, before=math.inf):
        if surplus <= 0:
            break
        oldest.append(segment)
        surplus -= segment.bytes + (segment.processed_bytes or 0)
    _forget(store, journal, pipeline, oldest)


def _forget(
    store: StateStore, journal: Journal, pipeline: str, segments: Sequence[SegmentRow]
) -> int:
    if not segments:  # do not take the lock that the run's own writes need
        return 0
    gone = store.segments.expire(pipeline, [segment.segment for segment in segments])
    for segment in gone:
        for path in segment.paths:
            journal.delete(path)
    return len(gone)
