"""The answer to `COPY ... TO STDOUT`, in pieces of whole lines, as fast as libpq hands them over."""

from __future__ import annotations

import select
from collections.abc import Iterator

import psycopg
from psycopg import sql
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus

PIECE_BYTES = 4 << 20
"""A piece ends with the line that reaches this size."""


def pieces(connection: psycopg.Connection, query: sql.Composed) -> Iterator[bytes]:
    """Send a COPY, and return what yields its lines; it has been accepted when this returns.

    The connection is busy until they have all been taken, or it is closed.

    Raises:
        psycopg.Error: The server refused it, or later ended it.
    """
    result = connection.pgconn.exec_(query.as_bytes(connection))
    if result.status != ExecStatus.COPY_OUT:
        raise error_from_result(result)
    return _pieces(connection)


def _pieces(connection: psycopg.Connection) -> Iterator[bytes]:
    libpq = connection.pgconn
    poll = select.poll()
    poll.register(libpq.socket, select.POLLIN)
    lines: list[bytes] = []
    size = 0
    while True:
        count, line = libpq.get_copy_data(1)
        if count > 0:  # a whole line
            lines.append(bytes(line))
            size += count
            if size >= PIECE_BYTES:
                yield b"".join(lines)
                lines, size = [], 0
        elif count == 0:  # none is there yet
            poll.poll()
            libpq.consume_input()
        else:
            break
    while (result := libpq.get_result()) is not None:
        if result.status != ExecStatus.COMMAND_OK:
            raise error_from_result(result)
    if lines:
        yield b"".join(lines)
