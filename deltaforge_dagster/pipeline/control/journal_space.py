"""Keep the journal small: retention, and back-pressure within `engine.journal.max_bytes`.

Retention: a segment is deleted when its range is closed and published, it is older than
`engine.journal.retention_hours`, and every attached sink has it: a segment that such a sink still
needs is never deleted. The row is deleted first, then its file; a crash in between leaves a file
without a row. Such files, also those of killed runs, are orphans and are deleted after an hour.
Messages that earlier runs have encoded are deleted after a day, since a long replay may still be
reading its own.

Back-pressure: when the journal has reached its limit, each of these steps is taken only if the one
before it was not enough:

1. The open range is closed and published, and the oldest segments that every attached sink has are
   deleted at once, whatever `retention_hours` says (`drop_delivered`).
2. If optional sinks retain the journal, they are *detached* at their checkpoints, the one that is
   furthest behind first. What they lack may then be deleted, and they get nothing until they are
   attached again. This includes paused sinks: an optional sink must not stop the others.
3. Otherwise required sinks retain the journal, and capture pauses until the journal is below four
   fifths of its limit. If one of these sinks is paused, capture stays paused until the sink is
   resumed.

The limit is checked whenever a segment was added, so the journal may exceed it by what is captured
in the meantime; a single transaction larger than the limit is captured whole. While a sink waits
for changes that it already has to be captured again, capture does not pause, because only capture
lets this sink continue.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.committed import detachable_sinks, go_on_command, lacking_bytes
from deltaforge_dagster.pipeline.encode.files import sweep_encoded
from deltaforge_dagster.pipeline.plural import size
from deltaforge_dagster.pipeline.run_context import LeasedRun
from deltaforge_dagster.state.records import CheckpointRow, SegmentRow
from deltaforge_dagster.state.store import StateStore

ORPHAN_SECONDS = 3600.0
"""Age at which a journal file without a row is an orphan: far beyond the life of a write."""

ENCODED_SECONDS = 86400.0
"""Age at which encoded messages of a run that does not hold the lease are orphans."""


_GO_ON = 0.8
"""Part of the limit below which capture resumes; deletion aims for this size as well."""


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
    orphans += journal.sweep_parked(loaded.name, kept, epoch=lease.epoch, older_than=ORPHAN_SECONDS)
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


class BackPressure:
    """Keeps the journal of a pipeline within its limit during a run.

    Args:
        spec: The pipeline.
        run: The run.
        close_range: Closes the open range, if there is one, for the given reason.
        publish: Publishes what is due.
        detach: Detaches a sink: stops its deliverer and writes its state, with the reason.
        awaits_capture: Whether a sink can continue only after more has been captured.

    Attributes:
        paused: Why capture must read nothing now, None when it may.
        pauses: How often capture was paused.
    """

    def __init__(
        self,
        spec: PipelineSpec,
        run: LeasedRun,
        *,
        close_range: Callable[[str], None],
        publish: Callable[[], None],
        detach: Callable[[str, str], None],
        awaits_capture: Callable[[], bool],
    ) -> None:
        self._spec = spec
        self._pipeline = spec.metadata.name
        self._limit = spec.spec.engine.journal.max_bytes
        self._run = run
        self._close_range = close_range
        self._publish = publish
        self._detach = detach
        self._awaits_capture = awaits_capture
        self._seen: int | None = None
        row = run.store.pipelines.get(self._pipeline)
        self.paused = None if row is None else row.capture_pause
        self.pauses = 0

    def check(self, segments: int) -> None:
        """Check the limit and take the steps it needs; `segments` counts those of this run."""
        if self._seen == segments and self.paused is None:
            return
        self._seen = segments
        if not self._fits():
            self._close_range("journal full")
            self._publish()
            self._drop()
        if not self._fits():
            self._detach_holders()
        if self._fits():
            self._go_on("the journal has room again")
        elif self._awaits_capture():
            self._go_on("a sink waits until changes that it already has are captured again")
        elif self.paused is None:
            self._pause()

    @property
    def _room(self) -> int:
        return int(self._limit * _GO_ON)

    def _fits(self) -> bool:
        taken = self._run.store.segments.total_bytes(self._pipeline)
        return taken < (self._limit if self.paused is None else self._room)

    def _drop(self) -> None:
        drop_delivered(self._run.store, self._run.journal, self._pipeline, down_to=self._room)

    def _detach_holders(self) -> None:
        """Detach sinks that the commit policy does not need, one by one, while that makes room."""
        while True:
            checkpoints = self._run.store.checkpoints.read(self._pipeline)
            free = detachable_sinks(self._spec, checkpoints)
            needed = [
                checkpoint
                for checkpoint in checkpoints.values()
                if checkpoint.attached and checkpoint.sink not in free
            ]
            attached = [checkpoint for checkpoint in checkpoints.values() if checkpoint.attached]
            # The last condition: what the needed sinks lack fills the journal anyway.
            if (
                not free
                or self._lacking(attached) < self._room
                or self._lacking(needed) >= self._room
            ):
                return
            sink = free[0]
            lacking = self._lacking([checkpoints[sink]])
            self._detach(
                sink,
                f"detached: the journal is full ({size(self._limit)}, engine.journal.max_bytes), "
                f"and {size(lacking)} of it was kept for this sink, which is not required",
            )
            self._drop()

    def _lacking(self, checkpoints: list[CheckpointRow]) -> int:
        return lacking_bytes(self._run.store, self._pipeline, checkpoints)

    def _pause(self) -> None:
        checkpoints = self._run.store.checkpoints.read(self._pipeline).values()
        behind = sorted(
            (checkpoint for checkpoint in checkpoints if checkpoint.attached),
            key=lambda checkpoint: checkpoint.whole_segment,
        )
        holder = f"; sink {behind[0].sink} is the slowest" if behind else ""
        if behind and behind[0].paused:
            command = go_on_command(self._pipeline, behind[0].sink, behind[0].state)
            holder += f", and paused ({command})"
        why = f"the journal is full ({size(self._limit)}, engine.journal.max_bytes){holder}"
        self._run.lease.write(lambda writer: writer.pipeline.set_capture_pause(why))
        self.paused = why
        self.pauses += 1
        self._run.warn(f"capture is paused: {why}")

    def _go_on(self, why: str) -> None:
        if self.paused is None:
            return
        self._run.lease.write(lambda writer: writer.pipeline.set_capture_pause(None))
        self.paused = None
        self._run.warn(f"capture goes on: {why}")


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
