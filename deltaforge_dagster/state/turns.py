"""A lock that threads get in the order in which they asked."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from deltaforge_dagster.errors import StoreUnavailable


class Turns:
    """First come, first served.

    Python's own lock may go to a busy thread again and again while others starve, and so may
    SQLite's. A run has one thread that captures as fast as it can beside those that deliver.
    A turn is not for taking twice: a thread that asks within its own turn waits in vain.

    Args:
        where: What the turns are for, in the message.
        timeout: Seconds that a thread waits for those before it.
    """

    def __init__(self, where: str, timeout: float) -> None:
        self._where = where
        self._timeout = timeout
        self._mutex = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Lock] = deque()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for the threads before this one.

        Raises:
            StoreUnavailable: It took too long; this thread has left the line.
        """
        self._take()
        try:
            yield
        finally:
            self._pass_on()

    def _take(self) -> None:
        with self._mutex:
            if not self._taken:
                self._taken = True
                return
            ticket = threading.Lock()
            ticket.acquire()
            self._waiting.append(ticket)
        if ticket.acquire(timeout=self._timeout):  # released by whoever passes the turn on
            return
        with self._mutex:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
                raise StoreUnavailable(
                    f"state store {self._where}: other threads have used it for {self._timeout} s"
                )
        # The turn was passed to this thread between the time-out and the mutex: it holds it.

    def _pass_on(self) -> None:
        with self._mutex:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False
