"""What sinks with connections share: exclusive use by one thread, and timeouts of sockets.

Any other thread can end the use by closing the sink. There is a timeout for each socket call, and a
deadline for a whole exchange.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from deltaforge_dagster.errors import SinkUnavailable

_END_SECONDS = 1.0
"""How long `end` waits for the thread that is using the sink."""


@dataclass(frozen=True, slots=True)
class SinkTimeouts:
    """How long a sink waits for its server, in seconds.

    Attributes:
        connect: For one attempt to connect.
        send: Until a server that neither takes nor sends a byte is given up.
        batch: For one block of messages, from its first byte to its acknowledgement.
    """

    connect: float = 10.0
    send: float = 5.0
    batch: float = 30.0


DEFAULT_TIMEOUTS = SinkTimeouts()


class Use:
    """Guards the use of one sink's connections; the sink is closed at first.

    Args:
        sink_id: Name of the sink in messages.
        drop: Releases the connections; called by one thread at a time, whenever the sink is closed.

    Attributes:
        closed: Set while the sink is closed; threads that wait on it wake up on a close.
    """

    def __init__(self, sink_id: str, drop: Callable[[], None]) -> None:
        self.closed = threading.Event()
        self.closed.set()
        self._sink_id = sink_id
        self._drop = drop
        self._lock = threading.RLock()

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Use the sink exclusively; on exit, release its connections if it was closed meanwhile."""
        with self._lock:
            try:
                yield
            finally:
                if self.closed.is_set():
                    self._drop()

    def end(self, interrupt: Callable[[], None]) -> None:
        """Close the sink.

        If the thread that is using it does not leave soon, that thread releases the connections.

        Args:
            interrupt: Wakes up a thread that is waiting for the server.
        """
        self.closed.set()
        interrupt()
        if self._lock.acquire(timeout=_END_SECONDS):
            try:
                self._drop()
            finally:
                self._lock.release()

    def raise_when_closed(self) -> None:
        """Raise `SinkUnavailable` if the sink is closed."""
        if self.closed.is_set():
            raise SinkUnavailable(f"sink {self._sink_id}: closed")


class TimedOut(SinkUnavailable):
    """The server did not answer in time.

    The sink has waited long enough and does not retry itself.
    """

    kind = "timeout"


def too_late(where: str, send_timeout: float) -> TimedOut:
    """Return the error for a `TimeoutError` raised by a `timed` socket."""
    return TimedOut(
        f"{where} neither took nor sent a byte for {send_timeout:g} s "
        "(send_timeout_secs), or did not acknowledge in time (batch_timeout_secs)"
    )


def timed(sock: socket.socket, deadline: float, send_timeout: float) -> socket.socket:
    """Set the timeout for the socket's next call and return the socket.

    The timeout is `send_timeout`, or the time left until the deadline, a monotonic time, if that
    is shorter.

    Raises:
        TimeoutError: The deadline has passed; the socket itself raises the same error.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    sock.settimeout(min(left, send_timeout))
    return sock
