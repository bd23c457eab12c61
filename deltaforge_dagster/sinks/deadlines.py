"""Timeouts for the sinks' own sockets.

There is one for each socket call, and a deadline for a whole exchange.
"""

from __future__ import annotations

import socket
import time

from deltaforge_dagster.errors import SinkUnavailable


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
