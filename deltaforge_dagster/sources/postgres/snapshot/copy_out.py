"""Receive the answer to `COPY ... TO STDOUT` in buffers of complete lines.

libpq returns one line at a time. Making a Python object of each takes more than twice as long as
libpq's own work, so a kernel calls libpq (`libpq_lines`), and only the buffers are Python objects.
libpq still does everything else, from TLS to error handling.
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
from deltaforge_dagster.sources.postgres.snapshot.copy_out import (
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
"""A buffer ends with the line with which it reaches this size.

While it is decoded, the server fills the socket's buffers, which are seldom larger.
"""

_ROOM = 64 << 10
"""Additional room for that last line; a longer line gets a larger buffer."""


def buffers(
    connection: psycopg.Connection, query: sql.Composed, functions: Functions | None = FUNCTIONS
) -> Iterator[Bytes | bytes]:
    """Send a COPY; once the server has accepted it, return an iterator of buffers with its lines.

    The connection is busy until the iterator is exhausted, or the connection is closed.

    Args:
        connection: An idle connection.
        query: The COPY statement.
        functions: Addresses of libpq's functions; None to get every line through psycopg.

    Returns:
        Buffers, each valid until the next one is requested.

    Raises:
        psycopg.Error: The server refused the statement, or, from the iterator, ended it.
    """
    libpq = connection.pgconn
    result = libpq.exec_(query.as_bytes(connection))
    if result.status != ExecStatus.COPY_OUT:
        raise error_from_result(result)
    return _psycopg_buffers(libpq) if functions is None else _kernel_buffers(libpq, functions)


def _kernel_buffers(libpq: PGconn, functions: Functions) -> Iterator[Bytes]:
    """Yield buffers into which a kernel copies lines; a buffer is enlarged for a longer line."""
    input_ = _Input(libpq)
    buffer, size = np.empty(BUFFER_BYTES + _ROOM, np.uint8), 0
    held = np.zeros(HELD_WIDTH, np.int64)
    native: Any = libpq  # the protocol does not name the pointer
    while True:
        connected = native.pgconn_ptr
        if connected is None:
            raise psycopg.OperationalError("the connection is closed")
        size, reason = take_lines(*functions, connected, held, buffer, size, BUFFER_BYTES)
        if reason == BUFFER_IS_FULL:
            yield buffer[:size]
            size = 0
            if buffer.size > BUFFER_BYTES + _ROOM:
                buffer = np.empty(BUFFER_BYTES + _ROOM, np.uint8)
        elif reason == LINE_IS_LONGER:
            longer = np.empty(size + int(held[LINE_SIZE]), np.uint8)
            longer[:size] = buffer[:size]
            buffer = longer
        elif reason == NONE_YET:
            input_.wait()
        elif reason == FAILED:
            raise psycopg.OperationalError(f"COPY failed: {libpq.get_error_message()}")
        else:
            break
    _finish(libpq)
    if size:
        yield buffer[:size]


def _psycopg_buffers(libpq: PGconn) -> Iterator[bytes]:
    """Yield buffers of lines that psycopg returns one by one."""
    input_ = _Input(libpq)
    lines: list[bytes] = []
    size = 0
    while True:
        count, line = libpq.get_copy_data(1)
        if count > 0:  # a line
            lines.append(bytes(line))
            size += count
            if size >= BUFFER_BYTES:
                yield b"".join(lines)
                lines, size = [], 0
        elif count == 0:  # no line has arrived yet
            input_.wait()
        else:
            break
    _finish(libpq)
    if lines:
        yield b"".join(lines)


class _Input:
    """Waits for input from the server."""

    def __init__(self, libpq: PGconn) -> None:
        self._libpq = libpq
        self._poll = select.poll()
        self._poll.register(libpq.socket, select.POLLIN)

    def wait(self) -> None:
        """Wait until input arrives, and let libpq read it."""
        self._poll.poll()
        self._libpq.consume_input()


def _finish(libpq: PGconn) -> None:
    """Read all results after the last line; raise an error unless the COPY was completed."""
    results = list(iter(libpq.get_result, None))
    for result in results:
        if result.status != ExecStatus.COMMAND_OK:
            raise error_from_result(result)


def warm() -> None:
    """Compile the kernel, or load it from the cache."""
    take_lines(0, 0, 0, np.zeros(HELD_WIDTH, np.int64), np.empty(0, np.uint8), 0, 0)
