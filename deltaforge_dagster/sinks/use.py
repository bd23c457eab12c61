"""One thread at a time uses a sink; any other thread may end it meanwhile."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from deltaforge_dagster.errors import SinkUnavailable

_SECONDS = 1.0
"""How long `end` waits for the thread that uses the sink."""


class Use:
    """The use of one sink's connections, closed at first.

    Args:
        sink_id: Names the sink in messages.
        drop: Gives the connections up; called by one thread at a time, whenever the sink is closed.

    Attributes:
        closed: Set while the sink is closed; what waits on it wakes when that happens.
    """

    def __init__(self, sink_id: str, drop: Callable[[], None]) -> None:
        self.closed = threading.Event()
        self.closed.set()
        self._sink_id = sink_id
        self._drop = drop
        self._lock = threading.RLock()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Use the sink; whoever is last to leave a closed one gives its connections up."""
        with self._lock:
            try:
                yield
            finally:
                if self.closed.is_set():
                    self._drop()

    def end(self, interrupt: Callable[[], None]) -> None:
        """Close the sink. The thread that uses it, if it does not leave soon, gives up what it holds.

        Args:
            interrupt: Wakes a thread that waits for the server.
        """
        self.closed.set()
        interrupt()
        if self._lock.acquire(timeout=_SECONDS):
            try:
                self._drop()
            finally:
                self._lock.release()

    def raise_when_closed(self) -> None:
        """Raise `SinkUnavailable` in a sink that somebody has closed."""
        if self.closed.is_set():
            raise SinkUnavailable(f"sink {self._sink_id}: closed")
