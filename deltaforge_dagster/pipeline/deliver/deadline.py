"""The time limit of a delivery batch.

A timer closes a sink that exceeds it, which ends the send.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from deltaforge_dagster.errors import DeltaforgeError, LeaseLost, SinkOverdue
from deltaforge_dagster.sinks.base import Sink


class Deadline:
    """Limits how long one sink may take for a delivery batch; used by one thread.

    Args:
        sink_id: The sink.
        seconds: The limit (`sink_batch_deadline_secs`); None for none.

    Attributes:
        missed: How often the limit was exceeded.
    """

    def __init__(self, sink_id: str, seconds: float | None) -> None:
        self.missed = 0
        self._sink_id = sink_id
        self._seconds = seconds
        self._lock = threading.Lock()
        self._sending: object | None = None
        self._overdue = False

    @contextmanager
    def over(self, sink: Sink) -> Iterator[None]:
        """Close `sink` if the block takes too long.

        An error that the block then raises becomes `SinkOverdue`. If the block succeeds although
        the limit was exceeded, its result counts.

        Raises:
            SinkOverdue: The block failed, because it took too long.
        """
        if self._seconds is None:
            yield
            return
        token = object()
        self._sending, self._overdue = token, False
        timer = threading.Timer(self._seconds, self._close, (sink, token))
        timer.daemon = True
        timer.start()
        try:
            yield
        except LeaseLost:
            raise
        except DeltaforgeError as error:
            if not self._end(timer):
                raise
            self.missed += 1
            overdue = SinkOverdue(
                f"sink {self._sink_id}: took longer than {self._seconds:g} s for a batch "
                "(sink_batch_deadline_secs); it was closed, and gets the batch again"
            )
            overdue.acknowledged = error.acknowledged
            raise overdue from error
        finally:
            self._end(timer)

    def _end(self, timer: threading.Timer) -> bool:
        """Cancel the timer; return whether it has already closed the sink."""
        timer.cancel()
        with self._lock:
            self._sending = None
            return self._overdue

    def _close(self, sink: Sink, token: object) -> None:
        with self._lock:
            # The timer of an earlier batch must not close the sink during a later one.
            if self._sending is token:
                self._overdue = True
                sink.close()
