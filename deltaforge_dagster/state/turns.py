"""A fair lock: threads acquire it in the order of their requests."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from deltaforge_dagster.errors import StoreUnavailable


class Turns:
    """A first-come, first-served lock; it is not reentrant.

    Python's lock, like SQLite's, may be acquired by a busy thread again and again while others starve.
    In a run, one thread captures as fast as it can while others deliver.

    Args:
        where: Name of the protected database in messages.
        timeout: Seconds that a thread waits for its turn.
    """

    def __init__(self, where: str, timeout: float) -> None:
        self._where = where
        self._timeout = timeout
        self._mutex = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Lock] = deque()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the lock within the block, after waiting for the threads before this one.

        Raises:
            StoreUnavailable: The wait took too long; this thread has left the queue.
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
        # The turn was passed to this thread after the timeout, before it got the mutex.

    def _pass_on(self) -> None:
        with self._mutex:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False
