"""The answer to `COPY ... TO STDOUT`, in buffers of whole lines, as fast as libpq hands them over.

libpq hands over one line at a time. Making a Python object of each takes more than twice as long as all that
libpq does for it; so a kernel calls libpq (`libpq_lines`), and only buffers are objects. The conversation
with the server, from its certificate to its errors, remains libpq's.
"""

from __future__ import annotations

import select
from collections.abc import Iterator
from typing import Any

import numpy as np
import psycopg
from psycopg import sql
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGconn

from deltaforge_dagster.kernels.runtime import Bytes
from deltaforge_dagster.sources.postgres.snapshot.libpq_lines import (
    BUFFER_IS_FULL,
    FAILED,
    FUNCTIONS,
    HELD_WIDTH,
    LINE_IS_LONGER,
    LINE_SIZE,
    NONE_YET,
    Functions,
    take_lines,
)

BUFFER_BYTES = 1 << 20
"""A buffer ends with the line that reaches this size: while one is decoded, the server fills the
buffers of the socket, which seldom hold more."""

_ROOM = 64 << 10
"""For the end of that line; a longer one gets more."""


def buffers(
    connection: psycopg.Connection, query: sql.Composed, functions: Functions | None = FUNCTIONS
) -> Iterator[Bytes | bytes]:
    """Send a COPY, and return what yields its lines; it has been accepted when this returns.

    The connection is busy until they have all been taken, or it is closed.

    Args:
        connection: Nothing is going on there.
        query: The COPY.
        functions: Those of the connection's libpq; None takes every line through Python.

    Returns:
        Buffers, each good until the next one is asked for.

    Raises:
        psycopg.Error: The server refused it, or later ended it.
    """
    libpq = connection.pgconn
    result = libpq.exec_(query.as_bytes(connection))
    if result.status != ExecStatus.COPY_OUT:
        raise error_from_result(result)
    return _gathered(libpq) if functions is None else _taken(libpq, functions)


def _taken(libpq: PGconn, functions: Functions) -> Iterator[Bytes]:
    """Have a kernel write the lines into a buffer, which has one size but for longer lines."""
    input_ = _Input(libpq)
    buffer, size = np.empty(BUFFER_BYTES + _ROOM, np.uint8), 0
    held = np.zeros(HELD_WIDTH, np.int64)
    native: Any = libpq  # the protocol does not name the pointer
    while True:
        connected = native.pgconn_ptr
        if connected is None:
            raise psycopg.OperationalError("the connection is closed")
        size, why = take_lines(*functions, connected, held, buffer, size, BUFFER_BYTES)
        if why == BUFFER_IS_FULL:
            yield buffer[:size]
            size = 0
            if buffer.size > BUFFER_BYTES + _ROOM:
                buffer = np.empty(BUFFER_BYTES + _ROOM, np.uint8)
        elif why == LINE_IS_LONGER:
            longer = np.empty(size + int(held[LINE_SIZE]), np.uint8)
            longer[:size] = buffer[:size]
            buffer = longer
        elif why == NONE_YET:
            input_.wait()
        elif why == FAILED:
            raise psycopg.OperationalError(f"COPY failed: {libpq.get_error_message()}")
        else:
            break
    _end(libpq)
    if size:
        yield buffer[:size]


def _gathered(libpq: PGconn) -> Iterator[bytes]:
    """Take the lines as psycopg makes objects of them."""
    input_ = _Input(libpq)
    lines: list[bytes] = []
    size = 0
    while True:
        count, line = libpq.get_copy_data(1)
        if count > 0:  # a whole line
            lines.append(bytes(line))
            size += count
            if size >= BUFFER_BYTES:
                yield b"".join(lines)
                lines, size = [], 0
        elif count == 0:  # none is there yet
            input_.wait()
        else:
            break
    _end(libpq)
    if lines:
        yield b"".join(lines)


class _Input:
    """What comes from the server."""

    def __init__(self, libpq: PGconn) -> None:
        self._libpq = libpq
        self._poll = select.poll()
        self._poll.register(libpq.socket, select.POLLIN)

    def wait(self) -> None:
        """Wait for more, and let libpq have it."""
        self._poll.poll()
        self._libpq.consume_input()


def _end(libpq: PGconn) -> None:
    """Take what is behind the last line, all of it: whether the server has sent every line."""
    results = list(iter(libpq.get_result, None))
    for result in results:
        if result.status != ExecStatus.COMMAND_OK:
            raise error_from_result(result)


def warm() -> None:
    """Compile the kernel, or load it from the cache."""
    take_lines(0, 0, 0, np.zeros(HELD_WIDTH, np.int64), np.empty(0, np.uint8), 0, 0)
