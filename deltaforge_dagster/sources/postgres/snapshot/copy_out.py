"""Receive the answer to `COPY ... TO STDOUT` in buffers of complete lines.

libpq returns one line at a time. Making a Python object of each takes more than twice as long as
libpq's own work, so a kernel calls libpq's functions, and only the buffers are Python objects.
libpq still does everything else, from TLS to error handling.

Manual of libpq, "Functions Associated with the COPY Command"::

    int PQgetCopyData(PGconn *conn, char **buffer, int async)
        returns the size of the line to which `buffer` then points, to be freed with PQfreemem; 0 if
        none has arrived (with async it does not wait); -1 if there are no more; -2 for an error

The functions must be those of the libpq that psycopg is linked with, because another copy of libpq
cannot use its connections. They are looked up through psycopg's extension module.
"""

# ruff: noqa: PLR0917 - kernels are long flat loops over bytes, see `kernels.runtime`

from __future__ import annotations

import ctypes
import select
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import numba
import numpy as np
import psycopg
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic
from psycopg import sql
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGconn

from deltaforge_dagster.kernels.runtime import Bytes, Longs, kernel

BUFFER_IS_FULL, LINE_IS_LONGER, NONE_YET, NO_MORE, FAILED = 2, 1, 0, -1, -2
"""Why `take_lines` stopped: the buffer has reached its size; the next line does not fit into the
buffer; and PQgetCopyData's codes: no line has arrived, no more lines, error.
"""

LINE, LINE_SIZE = range(2)
"""Fields of `long_line`: address and size of a line that libpq returned but that did not fit.

The size is 0 if there is none.
"""
LONG_LINE_WIDTH = 2

_GET = ir.FunctionType(
    cgutils.int32_t, [cgutils.voidptr_t, cgutils.voidptr_t.as_pointer(), cgutils.int32_t]
)
_FREE = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t])


class Functions(NamedTuple):
    """Addresses of libpq's functions."""

    get: int
    free: int


def _functions() -> Functions | None:
    """Return the functions of psycopg's libpq; None if not found, or kernels are not compiled."""
    if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]  # set at import
        return None
    extension = sys.modules[psycopg.pq.PGconn.__module__].__file__
    try:
        library = ctypes.CDLL(extension)
        functions = (library.PQgetCopyData, library.PQfreemem)
    except (OSError, AttributeError):  # psycopg's Python implementation, or statically linked
        return None
    get, free = (ctypes.cast(function, ctypes.c_void_p).value for function in functions)
    return Functions(get, free) if get and free else None


FUNCTIONS = _functions()


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
    long_line = np.zeros(LONG_LINE_WIDTH, np.int64)
    native: Any = libpq  # the protocol does not name the pointer
    while True:
        connected = native.pgconn_ptr
        if connected is None:
            raise psycopg.OperationalError("the connection is closed")
        size, reason = take_lines(*functions, connected, long_line, buffer, size, BUFFER_BYTES)
        if reason == BUFFER_IS_FULL:
            yield buffer[:size]
            size = 0
            if buffer.size > BUFFER_BYTES + _ROOM:
                buffer = np.empty(BUFFER_BYTES + _ROOM, np.uint8)
        elif reason == LINE_IS_LONGER:
            longer = np.empty(size + int(long_line[LINE_SIZE]), np.uint8)
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
    take_lines(0, 0, 0, np.zeros(LONG_LINE_WIDTH, np.int64), np.empty(0, np.uint8), 0, 0)


def _data(context: Any, builder: Any, kind: Any, array: Any) -> Any:
    return context.make_array(kind)(context, builder, array).data


def _call_get(_typing: Any, get: Any, connection: Any, long_line: Any) -> Any:
    """Generate a call of PQgetCopyData that stores the line's address in `long_line[LINE]`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function, connected, line = arguments
        function = builder.inttoptr(function, _GET.as_pointer())
        connected = builder.inttoptr(connected, cgutils.voidptr_t)
        line = _data(context, builder, signature.args[2], line)
        line = builder.bitcast(line, cgutils.voidptr_t.as_pointer())
        size = builder.call(function, [connected, line, cgutils.int32_t(1)])
        return builder.sext(size, cgutils.intp_t)

    return numba.int64(get, connection, long_line), generate


def _copy_and_free(_typing: Any, free: Any, long_line: Any, out: Any, at: Any) -> Any:
    """Generate code that copies the line in `long_line` to `out`, and frees it with PQfreemem."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function, line, target, offset = arguments
        line = _data(context, builder, signature.args[1], line)
        size = builder.load(builder.gep(line, [cgutils.intp_t(LINE_SIZE)]))
        text = builder.inttoptr(builder.load(line), cgutils.voidptr_t)
        target = _data(context, builder, signature.args[2], target)
        target = builder.gep(target, [offset])
        cgutils.raw_memcpy(builder, target, text, size, 1)  # type: ignore[no-untyped-call]
        builder.call(builder.inttoptr(function, _FREE.as_pointer()), [text])
        return context.get_dummy_value()

    return numba.void(free, long_line, out, at), generate


_get_line: Callable[[int, int, Longs], int] = cast("Any", intrinsic(_call_get))
_move_line: Callable[[int, Longs, Bytes, int], None] = cast("Any", intrinsic(_copy_and_free))


@kernel
def take_lines(
    get: int, free: int, connection: int, long_line: Longs, out: Bytes, at: int, enough: int
) -> tuple[int, int]:
    """Copy lines that have arrived to `out`, until it has at least `enough` bytes.

    Args:
        get: Address of PQgetCopyData.
        free: Address of PQfreemem.
        connection: Address of the PGconn; no other thread may use it meanwhile.
        long_line: State between calls; zeros at first.
        out: The buffer.
        at: Number of bytes that are in the buffer already.
        enough: The size at which to stop.

    Returns:
        The number of bytes in the buffer, and why it stopped. After `LINE_IS_LONGER`, call again
        with a larger
        buffer.
    """
    while at < enough:
        if long_line[LINE_SIZE] == 0:
            size = _get_line(get, connection, long_line)
            if size <= 0:
                return at, size
            long_line[LINE_SIZE] = size
        size = long_line[LINE_SIZE]
        if size > out.size - at:
            return at, LINE_IS_LONGER
        _move_line(free, long_line, out, at)
        long_line[LINE_SIZE] = 0
        at += size
    return at, BUFFER_IS_FULL


BUFFER_BYTES = 1 << 20
"""A buffer ends with the line with which it reaches this size.

While it is decoded, the server fills the socket's buffers, which are seldom larger.
"""

_ROOM = 64 << 10
"""Additional room for that last line; a longer line gets a larger buffer."""
