"""Receive the rows of a SELECT in large buffers, without a Python object per row or value.

PyMySQL sends the statement and reads the description of the result; then the rows are read from its
socket in large buffers (MySQL internals documentation, "Text Resultset Row")::

    packet   Int24 size, Int8 number, payload; one of 2^24 - 1 bytes continues in the next
    row      each value: its length, and its text; 0xFB is null
    length   1 byte up to 250; 0xFC, 0xFD or 0xFE and 2, 3 or 8 bytes
    the end  a payload of less than 9 bytes that begins with 0xFE; 0xFF begins an error
"""

# ruff: noqa: C901, PLR0911, PLR0917 - kernels are long flat loops over bytes, see `kernels.runtime`

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pymysql
from pymysql.connections import MySQLResult
from pymysql.constants import COMMAND
from pymysql.err import raise_mysql_exception

from deltaforge_dagster.errors import CorruptLog
from deltaforge_dagster.kernels.runtime import Bytes, Longs, kernel, read_only
from deltaforge_dagster.sources.mysql.values.numbers import read_8, read_16, read_24, read_64
from deltaforge_dagster.sources.stream import BUFFER_BYTES, ReadBuffer

# Sizes and first bytes of packets; see the module's docstring.
_HEADER = 4
_FULL = (1 << 24) - 1
_NULL, _TWO, _THREE, _EIGHT, _ERROR = 0xFB, 0xFC, 0xFD, 0xFE, 0xFF
_END_SIZE, _ERROR_SIZE = 9, 3

NULL_START = -1
"""Stands for start and end of a null value."""

MORE, FILLED, END, REFUSED, JOINED, BROKEN = range(6)
"""Why `split_rows` stopped: the next packet has not arrived completely; `bounds` has no room for
its values; the result ends; the server reports an error; the next row is in several packets; the
packet is not a row.
"""

WHY, AT, LINES = range(3)
"""Fields of `state`: why `split_rows` stopped, offset of the next packet, used `bounds` lines."""

_MAX_VALUES = 1 << 20
_READ_AHEAD_BYTES = 1 << 16
"""Bytes: more than PyMySQL's buffered socket file reads ahead, less than a read buffer."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a result.

    Attributes:
        source: Bytes that contain their values.
        bounds: For each value of each row, its start and end in `source`; `NULL_START` twice for
            null.
    """

    source: Bytes
    bounds: Longs


@kernel
def split_row(source: Bytes, at: int, end: int, columns: int, bounds: Longs, line: int) -> bool:
    """Store start and end of a row's values in `bounds`; return whether the bytes are a row.

    The first value is stored on line `line`.
    """
    for column in range(columns):
        if at >= end:
            return False
        size = read_8(source, at)
        at += 1
        if size == _NULL:
            bounds[line + column, 0], bounds[line + column, 1] = NULL_START, NULL_START
            continue
        if size == _TWO:
            if end - at < 2:
                return False
            size = read_16(source, at)
            at += 2
        elif size == _THREE:
            if end - at < 3:
                return False
            size = read_24(source, at)
            at += 3
        elif size == _EIGHT:
            if end - at < 8:
                return False
            size = read_64(source, at)
            at += 8
        elif size == _ERROR:
            return False
        if size < 0 or size > end - at:
            return False
        bounds[line + column, 0], bounds[line + column, 1] = at, at + size
        at += size
    return at == end


@kernel
def split_rows(source: Bytes, length: int, columns: int, bounds: Longs, state: Longs) -> None:
    """Store start and end of the values of all complete rows in `bounds`.

    `state` is input and output: the offset of the next packet (`AT`) and the used lines of `bounds`
    (`LINES`). On return, `state[WHY]` says why the function stopped.
    """
    at, line = state[AT], state[LINES]
    while True:
        state[WHY], state[AT], state[LINES] = MORE, at, line
        if length - at < _HEADER:
            break
        if line + columns > bounds.shape[0]:
            state[WHY] = FILLED
            break
        size = read_24(source, at)
        if size == _FULL:
            state[WHY] = JOINED
            break
        start = at + _HEADER
        if size > length - start:
            break
        first = read_8(source, start) if size > 0 else 0
        if first == _EIGHT and size < _END_SIZE:
            state[WHY] = END
            break
        if first == _ERROR and size >= _ERROR_SIZE:
            state[WHY] = REFUSED
            break
        if not split_row(source, start, start + size, columns, bounds, line):
            state[WHY] = BROKEN
            break
        line += columns
        at = start + size


def send_query(connection: pymysql.Connection, statement: str) -> Iterator[Rows]:
    """Send a SELECT; return an iterator of its rows once the server has accepted the statement.

    Each item is valid only until the next one is requested. The connection is busy until the
    iterator is exhausted.

    Raises:
        pymysql.MySQLError: The server refused the statement, or, from the iterator, ended it.
    """
    connection._execute_command(COMMAND.COM_QUERY, statement)  # noqa: SLF001 - the only way
    result = MySQLResult(connection)
    result.init_unbuffered_query()
    result.unbuffered_active = False  # from here on this module reads the rows
    return _rows(connection, result.field_count)


def _rows(connection: pymysql.Connection, columns: int) -> Iterator[Rows]:
    sock = connection._sock  # noqa: SLF001 - as above
    # While reading the description of the result, PyMySQL may have read the first rows ahead.
    ahead = connection._rfile.read1(_READ_AHEAD_BYTES)  # noqa: SLF001 - as above

    def receive(room: memoryview, _seconds: float) -> int:
        nonlocal ahead
        if ahead:
            count = len(ahead)
            room[:count], ahead = ahead, b""
            return count
        try:
            count = sock.recv_into(room)
        except OSError as error:
            raise pymysql.OperationalError(2013, type(error).__name__) from None  # CR_SERVER_LOST
        if not count:
            raise pymysql.OperationalError(2013, "the server closed the connection")
        return int(count)

    buffer = ReadBuffer(BUFFER_BYTES)
    bounds = np.empty((max(_MAX_VALUES, columns), 2), np.int64)
    state = np.array([MORE, 0, 0], np.int64)
    while state[WHY] != END:
        if state[WHY] == MORE:
            buffer.fill(receive, 0)
        source = read_only(buffer.data)
        split_rows(source, buffer.length, columns, bounds, state)
        if state[WHY] == MORE and buffer.length < len(buffer.data):
            continue  # fill the buffer before yielding, so that many rows are handled at a time
        if state[LINES]:
            yield Rows(source, bounds[: state[LINES]])
        buffer.drop(int(state[AT]))
        state[AT], state[LINES] = 0, 0
        if state[WHY] in {REFUSED, JOINED}:
            payload = _join(buffer, receive)
            if state[WHY] == REFUSED:
                raise_mysql_exception(payload)
            source = read_only(payload)
            if split_row(source, 0, len(payload), columns, bounds, 0):
                yield Rows(source, bounds[:columns])
                state[WHY] = FILLED  # there may be more in the buffer
            else:
                state[WHY] = BROKEN
        if state[WHY] == BROKEN:
            raise CorruptLog("the server's answer to a SELECT does not follow its format")


def _join(buffer: ReadBuffer, receive: Callable[[memoryview, float], int]) -> bytes:
    """Return the next payload, joined from all packets that contain it."""
    parts: list[bytes] = []
    size = _FULL
    while size == _FULL:
        while buffer.length < _HEADER or buffer.length < _HEADER + _size(buffer):
            buffer.fill(receive, 0)
        size = _size(buffer)
        parts.append(bytes(buffer.data[_HEADER : _HEADER + size]))
        buffer.drop(_HEADER + size)
    return b"".join(parts)


def _size(buffer: ReadBuffer) -> int:
    return int.from_bytes(buffer.data[:3], "little")
