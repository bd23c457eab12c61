"""Confirm the committed position: move it in the store first, then tell the source.

In this order, a crash in between never leaves a position in the store from which the source has
already discarded its log.

With `engine.journal.confirm: auto`, what was delivered is confirmed, as with `delivered`, until the
log that the server retains for the pipeline becomes too much, or sinks are behind for too long.
From then on the log is confirmed up to what the journal has, as with `captured`, until the sinks
have caught up (`ConfirmPolicy`). That takes a journal and a state store that survive the loss of a
machine.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.pipeline.capture.capture import Capture
from deltaforge_dagster.pipeline.committed import (
    committed_position,
    first_awaited_segment,
    segments_behind,
)
from deltaforge_dagster.pipeline.failpoints import failpoint
from deltaforge_dagster.pipeline.health.preflight import durability_gaps
from deltaforge_dagster.pipeline.plural import size
from deltaforge_dagster.pipeline.run_context import LeasedRun
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.findings import CAUTION
from deltaforge_dagster.sources.registry import parse_position
from deltaforge_dagster.state.records import (
    LOOK_SECONDS,
    CheckpointRow,
    EarlyConfirmation,
    HoldRow,
    PipelineRow,
)
from deltaforge_dagster.state.store import FencedWriter

_DEFAULT_SHARE = 0.25
"""The part of the server's limit above which the log is confirmed early.

The pipeline file may say otherwise.
"""

_DEFAULT_BYTES = 10 << 30
"""The retained bytes above which the log is confirmed early, if the server has no limit."""

_BEHIND_SECONDS = 3600.0  # sinks that are further behind make the log be confirmed early
_CAUGHT_UP_SECONDS = 10.0  # sinks that are less behind than this end it
_DECIDE_SECONDS = 1.0
_IDLE_PROGRESS_SECONDS = 10.0


class Confirmer:
    """Moves the committed position in the store, and then confirms it to the source.

    When every sink has everything, or the journal counts instead of them, positions that the log
    has passed without a change for this pipeline are confirmed as well. Such idle progress is
    written at most every `_IDLE_PROGRESS_SECONDS`, and when a run ends.
    """

    def __init__(self, loaded: LoadedPipeline, run: LeasedRun) -> None:
        self._loaded = loaded
        self._store = run.store
        self._lease = run.lease
        self._policy = ConfirmPolicy(loaded, run)
        row = run.store.pipelines.get(loaded.name)
        confirmed = None if row is None else row.confirmed_position
        self._confirmed: Position | None = None if confirmed is None else parse_position(confirmed)
        self._passed_at = time.monotonic()

    def confirm(self, capture: Capture | None, *, last: bool = False) -> None:
        """Confirm the committed position if it has moved since the last call.

        Args:
            capture: What reads the source; None if nothing does.
            last: Whether the run ends.
        """
        # In this order: the passed position, then the checkpoints. A segment that is added in
        # between makes sinks lag, and the idle progress is left to the next call.
        passed = None if capture is None else capture.passed
        row = self._store.pipelines.get(self._loaded.name)
        assert row is not None
        checkpoints = self._store.checkpoints.read(self._loaded.name)
        holds = self._store.holds.read(self._loaded.name)
        early = self._policy.confirms_early(row, checkpoints, last=last)
        position = committed_position(self._loaded.spec, row, checkpoints, holds, undelivered=early)
        delivered = not any(segments_behind(row, checkpoint) for checkpoint in checkpoints.values())
        journaled = early or self._loaded.spec.spec.engine.journal.confirm == "captured"
        passes = passed is not None and (delivered or journaled)
        if passed is not None and passes and (last or self._idle_progress_due()):
            reached = passed.to_json()
            self._lease.write(lambda writer: writer.pipeline.set_captured(reached))
            position = position if holds else passed
        if position is None or (self._confirmed is not None and position <= self._confirmed):
            self._forget(holds, checkpoints, None)
            return
        self._forget(holds, checkpoints, position)
        self._confirmed = position
        if capture is not None:
            capture.confirm(position)
        failpoint("source-confirmed")

    def _forget(
        self,
        holds: Sequence[HoldRow],
        checkpoints: Mapping[str, CheckpointRow],
        position: Position | None,
    ) -> None:
        """Write the committed position, and delete the holds whose events every attached sink has.

        In one transaction: once a hold's row is gone, the position must be beyond its events.
        """
        attached = [
            checkpoint.whole_segment for checkpoint in checkpoints.values() if checkpoint.attached
        ]
        delivered = min(attached, default=0)
        passed = any(hold.passed(delivered) for hold in holds)
        if position is None and not passed:
            return

        def write(writer: FencedWriter) -> None:
            if position is not None:
                writer.pipeline.set_confirmed(position.to_json())
            if passed:
                writer.holds.forget(delivered)

        self._lease.write(write)

    def _idle_progress_due(self) -> bool:
        now = time.monotonic()
        if now - self._passed_at < _IDLE_PROGRESS_SECONDS:
            return False
        self._passed_at = now
        return True


class ConfirmPolicy:
    """Decides whether the source may discard what is journaled but not delivered yet.

    Args:
        loaded: The pipeline file.
        run: The run; the decision is kept in its store, for status and for the next run.
    """

    def __init__(self, loaded: LoadedPipeline, run: LeasedRun) -> None:
        self._spec = loaded.spec
        self._run = run
        options = loaded.spec.spec.engine.journal
        self._above = options.confirm_above
        self._possible = options.confirm == "auto" and not durability_gaps(
            options, run.journal.url, run.store.database.url
        )
        self._early = run.store.pipelines.early_confirmation(loaded.name)
        self._decide_at = 0.0

    def confirms_early(
        self, pipeline: PipelineRow, checkpoints: Mapping[str, CheckpointRow], *, last: bool
    ) -> bool:
        """Return whether the log is confirmed up to what the journal has.

        This is decided again every second, and when the run ends (`last`): otherwise status would
        speak of sinks that lack something until the next run.

        Raises:
            LeaseLost: The lease is gone.
        """
        now = time.monotonic()
        if now >= self._decide_at or last:
            self._decide_at = now + _DECIDE_SECONDS
            self._decide(pipeline, checkpoints)
        return self._early is not None

    def _decide(self, pipeline: PipelineRow, checkpoints: Mapping[str, CheckpointRow]) -> None:
        store = self._run.store
        awaited = first_awaited_segment(self._spec, pipeline, checkpoints)
        if awaited is None or not self._possible:
            self._set(None)
            return
        lacking = store.segments.read(pipeline.name, first=awaited, limit=1)
        behind = store.now() - lacking[0].created_at if lacking else 0.0
        why = self._reason(pipeline.name, behind)
        if self._early is None and why is not None:
            self._set(EarlyConfirmation(store.now(), why))
        elif why is None and behind < _CAUGHT_UP_SECONDS:
            self._set(None)

    def _reason(self, name: str, behind: float) -> str | None:
        """Return why the log should be confirmed early from now on; None if it should not."""
        log = self._run.store.pipelines.source_log(name)
        if (
            log is None
            or log.retained is None
            or self._run.store.now() - log.seen_at > LOOK_SECONDS
        ):
            return None  # the server retains nothing for this pipeline, or the amount is unknown
        if behind > _BEHIND_SECONDS:
            return "sinks have lacked changes for more than an hour"
        above = self._above
        if above is None:
            above = _DEFAULT_BYTES if log.limit is None else round(_DEFAULT_SHARE * log.limit)
        if log.limit is not None:  # it may be lower than when the file was written
            above = min(above, round(CAUTION * log.limit))
        # A long open transaction and a slow reader retain log, too; confirming does not free that.
        freed = (log.unconfirmed or 0) - (log.bytes or 0)
        if log.retained > above and freed > above / 2:
            return (
                f"the server retained {size(log.retained)} for it, more than {size(above)} "
                "(engine.journal.confirm_above)"
            )
        return None

    def _set(self, early: EarlyConfirmation | None) -> None:
        if early == self._early:
            return
        self._run.lease.write(lambda writer: writer.pipeline.set_early_confirmation(early))
        self._early = early
        if early is None:
            self._run.warn("the source's log is confirmed as changes are delivered again")
        else:
            self._run.warn(
                f"from now on the source's log is confirmed up to what the journal has: {early.why}"
            )
