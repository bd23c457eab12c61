"""Time for a conversation over a socket of our own: a bit for each byte, and a deadline for the whole."""

from __future__ import annotations

import socket
import time

from deltaforge_dagster.errors import SinkUnavailable


class TimedOut(SinkUnavailable):
    """The server did not answer in time: waiting was tried, the sink does not try it again."""

    kind = "timeout"


def too_late(where: str, send_timeout: float) -> TimedOut:
    """Return the error for a `TimeoutError` of a `timed` socket."""
    return TimedOut(
        f"{where} neither took nor sent a byte for {send_timeout:g} s "
        "(send_timeout_secs), or did not acknowledge in time (batch_timeout_secs)"
    )


def timed(sock: socket.socket, deadline: float, send_timeout: float) -> socket.socket:
    """Return the socket with the timeout of its next call.

    That is `send_timeout`, or less where the deadline, a monotonic time, is nearer.

    Raises:
        TimeoutError: The deadline has passed; as the socket itself says it.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    sock.settimeout(min(left, send_timeout))
    return sock
