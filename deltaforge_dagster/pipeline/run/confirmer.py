"""Confirm the committed position: move it in the store first, then tell the source.

In this order, a crash in between never leaves a position in the store from which the source has
already discarded its log.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.pipeline.capture.capture import Capture
from deltaforge_dagster.pipeline.committed import committed_position, segments_behind
from deltaforge_dagster.pipeline.failpoints import failpoint
from deltaforge_dagster.pipeline.run.confirmer import ConfirmPolicy
from deltaforge_dagster.pipeline.run_context import LeasedRun
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.registry import parse_position
from deltaforge_dagster.state.records import CheckpointRow, HoldRow
from deltaforge_dagster.state.store import FencedWriter

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
