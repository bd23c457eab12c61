"""A time limit for a whole conversation with a server, and TCP keepalive.

Drivers limit single steps (a connect, a read), but many steps together may still take forever.
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self


def notice_loss(descriptor: int) -> None:
    """Enable TCP keepalive, so that a lost server is noticed within two minutes.

    This works even on an idle connection.
    """
    with socket.socket(fileno=os.dup(descriptor)) as same, suppress(OSError):
        same.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6)


class SocketTimeLimit:
    """Shuts a connection's socket down after some seconds, from a separate thread.

    A context manager: the time starts when it is entered, and leaving it cancels the limit.

    Args:
        descriptor: The socket's file descriptor.
        seconds: The limit.
    """

    def __init__(self, descriptor: int, seconds: float) -> None:
        # A duplicate: once the driver has closed its descriptor, the number may be reused.
        self._socket = socket.socket(fileno=os.dup(descriptor))
        self._fired = threading.Event()
        self._timer = threading.Timer(max(seconds, 0), self._shutdown)
        self._timer.daemon = True

    @property
    def fired(self) -> bool:
        """Whether the time has expired; errors of the connection after that are its consequence."""
        return self._fired.is_set()

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        self._timer.join()
        self._socket.close()

    def _shutdown(self) -> None:
        self._fired.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
