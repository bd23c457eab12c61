"""Log one line a minute about a live run: how much it did, how fast, how far sinks are behind."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from deltaforge_dagster.pipeline.capture.capture import Capture
from deltaforge_dagster.pipeline.committed import sink_lag_seconds
from deltaforge_dagster.pipeline.deliver.deliverer_set import DelivererSet
from deltaforge_dagster.state.store import StateStore

logger = logging.getLogger(__name__)

EVERY_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class _RunCounts:
    rows: int
    segments: int
    sent: dict[str, int]


class RunSummary:
    """Logs what happened since the last line, if anything did.

    Args:
        store: The state store.
        pipeline: Name of the pipeline.
        deliverers: The run's deliverers.
        seconds: Seconds between two lines.
    """

    def __init__(
        self,
        store: StateStore,
        pipeline: str,
        deliverers: DelivererSet,
        *,
        seconds: float = EVERY_SECONDS,
    ) -> None:
        self._store = store
        self._pipeline = pipeline
        self._deliverers = deliverers
        self._seconds = seconds
        self._reported_at = time.monotonic()
        self._reported = _RunCounts(0, 0, {})

    def poll(self, capture: Capture | None) -> None:
        """Write the line if it is due."""
        if time.monotonic() - self._reported_at >= self._seconds:
            self.report(capture)

    def report(self, capture: Capture | None) -> None:
        """Write the line now, unless nothing has happened."""
        now = time.monotonic()
        seconds, self._reported_at = max(now - self._reported_at, 0.001), now
        before = self._reported
        rows, segments = (0, 0) if capture is None else (capture.rows, capture.segments)
        self._reported = counts = _RunCounts(rows, segments, self._deliverers.sent)
        events, batches = counts.rows - before.rows, counts.segments - before.segments
        sent = {sink: count - before.sent.get(sink, 0) for sink, count in counts.sent.items()}
        lag = self._lag()
        if not (events or any(sent.values()) or any(lag.values())):
            return
        latencies = self._deliverers.latencies
        sinks = {
            sink: {
                "events": count,
                "events_per_second": round(count / seconds, 1),
                "lag_seconds": round(lag.get(sink, 0.0), 1),
                **latencies.get(sink, {}),
            }
            for sink, count in sorted(sent.items())
        }
        logger.info(
            "captured %s changes in %s segments (%.0f/s)",
            events,
            batches,
            events / seconds,
            extra={
                "fields": {
                    "events": events,
                    "batches": batches,
                    "average_batch": round(events / batches, 1) if batches else 0,
                    "events_per_second": round(events / seconds, 1),
                    "sinks": sinks,
                }
            },
        )

    def _lag(self) -> dict[str, float]:
        row = self._store.pipelines.get(self._pipeline)
        if row is None:
            return {}
        now = self._store.now()
        return {
            sink: sink_lag_seconds(self._store, row, checkpoint, now)
            for sink, checkpoint in self._store.checkpoints.read(self._pipeline).items()
        }
