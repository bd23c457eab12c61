"""An end in time for a whole conversation with a server, whatever server or network do.

Drivers bound single steps (a connect, a read); many steps together may still take for ever.
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self


def notice_loss(descriptor: int) -> None:
    """Let the network notice within two minutes that a server is gone which may be silent for long."""
    with socket.socket(fileno=os.dup(descriptor)) as same, suppress(OSError):
        same.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6)


class SocketTimeLimit:
    """Shuts a connection's socket down after some seconds, from a thread of its own.

    A context manager: leaving it stops the clock.

    Args:
        descriptor: The socket's file descriptor.
        seconds: From now on.
    """

    def __init__(self, descriptor: int, seconds: float) -> None:
        # A duplicate: the number of a driver's descriptor may be reused once it has closed it.
        self._socket = socket.socket(fileno=os.dup(descriptor))
        self._fired = threading.Event()
        self._timer = threading.Timer(max(seconds, 0), self._shutdown)
        self._timer.daemon = True

    @property
    def fired(self) -> bool:
        """Whether the time was up: errors of the connection since then mean just that."""
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
