"""The failures of a sink: how long to wait before the next attempt, and what is recorded of them.

The time of the next attempt is in the store, so that the wait survives the run.
"""

from __future__ import annotations

import contextlib
import logging

from deltaforge_dagster.errors import (
    DeltaforgeError,
    JournalDamaged,
    LeaseLost,
    Retryable,
    StoreUnavailable,
)
from deltaforge_dagster.pipeline.backoff import Backoff, RetryPatience
from deltaforge_dagster.pipeline.control.secret_changes import with_restart_hint
from deltaforge_dagster.pipeline.delivery import DeliveryContext
from deltaforge_dagster.state.records import CheckpointRow

logger = logging.getLogger(__name__)


class Retries:
    """Determines when a failing sink is tried again.

    Args:
        context: The sink.
        failures: How often it has failed in a row before this run.

    Attributes:
        error: Why the last attempt failed, None after a success.
        patience: Whether a run waits for the next attempt.
    """

    def __init__(self, context: DeliveryContext, failures: int) -> None:
        self.error: DeltaforgeError | None = None
        limits = context.spec.spec.engine.deliver
        self._context = context
        self._longest = limits.backoff_max_seconds
        self._backoff = Backoff(limits.backoff_initial_seconds, self._longest, failures)
        self._failures = failures
        self.patience = RetryPatience(context.spec.spec.engine.run.idle_seconds)

    def succeeded(self) -> None:
        """Forget all earlier failures."""
        self._backoff.reset()
        self._failures = 0
        self.error = None
        self.patience.succeeded()

    def failed(self, error: DeltaforgeError, checkpoint: CheckpointRow) -> float:
        """Record a failure after a checkpoint; return the seconds to wait before trying again."""
        run, meter, sink_id = self._context.run, self._context.meter, self._context.sink_id
        if isinstance(error, JournalDamaged):
            error = self._with_way_out(error)
        meter.failed(error)
        delay = self._backoff.next_delay()
        if not isinstance(error, Retryable):
            delay = self._longest  # nothing changes until somebody fixes the cause
        elif error.retry_after is not None:
            delay = error.retry_after
        self.patience.failed(error, delay)
        self._failures += 1
        logger.warning(
            "the sink failed",
            exc_info=error.__cause__ if type(error) is DeltaforgeError else None,
            extra={
                "fields": {
                    "reason": str(error),
                    "kind": error.kind,
                    "attempt": self._failures,
                    "sleep_seconds": round(delay, 1),
                    "batch_id": checkpoint.whole_segment + 1,
                }
            },
        )
        with contextlib.suppress(LeaseLost, StoreUnavailable):  # the deliverer meets the same error
            next_attempt_at = run.store.now() + delay
            tally = meter.drain()
            text = with_restart_hint(run.store, run.lease.pipeline, error, sink_id)
            run.lease.write(
                lambda writer: writer.checkpoints.failed(
                    sink_id, text, next_attempt_at, tally, remedy=error.remedy
                )
            )
        # After it is recorded: a run ends, and releases its lease, when all that lag have failed.
        self.error = error
        return delay

    def _with_way_out(self, error: JournalDamaged) -> JournalDamaged:
        """Return the error with a remedy: rebuild the journal, or recover from existing rows."""
        run, pipeline = self._context.run, self._context.run.lease.pipeline
        try:
            lost = self._context.sink_id in run.store.journals.not_recapturable(pipeline)
        except StoreUnavailable:
            return error  # the next failure adds the remedy
        if lost:
            return JournalDamaged(
                f"{error}; the source was told that it may forget what this sink lacks, so only "
                "the journal had it: bring the file back, or let the sink have the rows that exist "
                "now",
                remedy=f"deltaforge recover {pipeline}",
            )
        return JournalDamaged(
            f"{error}; bring the file back, or have the changes captured again",
            remedy=f"deltaforge journal rebuild {pipeline}",
        )
