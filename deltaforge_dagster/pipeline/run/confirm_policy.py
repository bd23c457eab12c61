"""`engine.journal.confirm: auto`: when the source's log is confirmed up to what the journal has.

What was delivered is confirmed, as with `delivered`, until the log that the server retains for the
pipeline becomes too much, or sinks are behind for too long. From then on it is confirmed as with
`captured`, until the sinks have caught up. That takes a journal and a state store that survive the
loss of a machine.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.pipeline.committed import first_awaited_segment
from deltaforge_dagster.pipeline.health.preflight import durability_gaps
from deltaforge_dagster.pipeline.plural import size
from deltaforge_dagster.pipeline.run_context import LeasedRun
from deltaforge_dagster.sources.findings import CAUTION
from deltaforge_dagster.state.records import (
    LOOK_SECONDS,
    CheckpointRow,
    EarlyConfirmation,
    PipelineRow,
)

_DEFAULT_SHARE = 0.25
"""The part of the server's limit above which the log is confirmed early.

The pipeline file may say otherwise.
"""

_DEFAULT_BYTES = 10 << 30
"""The retained bytes above which the log is confirmed early, if the server has no limit."""

_BEHIND_SECONDS = 3600.0  # sinks that are further behind make the log be confirmed early
_CAUGHT_UP_SECONDS = 10.0  # sinks that are less behind than this end it
_DECIDE_SECONDS = 1.0


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
