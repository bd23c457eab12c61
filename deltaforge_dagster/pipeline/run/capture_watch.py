"""Record in the state store that a run's capture fails, when it is retried, that it works again."""

from __future__ import annotations

import time
from typing import Literal

from deltaforge_dagster.pipeline.capture.capture import Capture
from deltaforge_dagster.pipeline.health.health import capture_failed, capture_works, failure_of
from deltaforge_dagster.state.store import StateStore

_BRIEF_SECONDS = 2.0
"""A connection that is restored within this time is not recorded as a failure."""


class CaptureWatch:
    """Keeps a pipeline's failure in the store up to date with a run's capture.

    Args:
        store: Where the failure is recorded.
        name: The pipeline.
    """

    def __init__(self, store: StateStore, name: str) -> None:
        self._store = store
        self._name = name
        self._recorded: Literal["nothing", "well", "trouble", "failed"] = "nothing"
        self._troubled_since: float | None = None
        self._attempt: float | None = None

    def poll(self, capture: Capture | None, *, over: bool = False) -> None:
        """Record what has changed since the last call.

        With `over`, the run ends, so brief errors are recorded, too.
        """
        if capture is None or self._recorded == "failed":
            return
        error = capture.error
        if error is None:
            self._troubled_since = None
            if self._recorded == "trouble" or (
                self._recorded == "nothing" and self._works(capture)
            ):
                capture_works(self._store, self._name, "run")
                self._recorded = "well"
        elif capture.failed:
            capture_failed(self._store, self._name, "run", error, None)
            self._recorded = "failed"
        else:
            self._trouble(capture, over=over)

    def _works(self, capture: Capture) -> bool:
        """Return whether an earlier failure is over; for one of the journal, only after a write."""
        if not capture.has_read or capture.has_written:
            return capture.has_read
        row = self._store.pipelines.get(self._name)
        failure = None if row is None else failure_of(row)
        return failure is None or failure.subject == "source" or failure.next_attempt_at is None

    def _trouble(self, capture: Capture, *, over: bool) -> None:
        """Record a retryable error once it lasts `_BRIEF_SECONDS`, and at each further attempt."""
        assert capture.error is not None
        now = time.monotonic()
        if self._troubled_since is None:
            self._troubled_since = now
        if now - self._troubled_since < _BRIEF_SECONDS and not over:
            return
        attempt = capture.next_attempt_at
        if self._recorded == "trouble" and attempt == self._attempt:
            return
        left = max(0.0, attempt - now)
        at = self._store.now() + left
        capture_failed(self._store, self._name, "run", capture.error, at)
        self._recorded, self._attempt = "trouble", attempt
