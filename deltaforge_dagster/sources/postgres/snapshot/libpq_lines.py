"""Kernel that gets the lines of `COPY ... TO STDOUT` by calling libpq's functions directly.

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
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numba
import psycopg
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from deltaforge_dagster.kernels.runtime import Bytes, Longs, kernel

BUFFER_IS_FULL, LINE_IS_LONGER, NONE_YET, NO_MORE, FAILED = 2, 1, 0, -1, -2
"""Why `take_lines` stopped: the buffer has reached its size; the next line does not fit into the
buffer; and PQgetCopyData's codes: no line has arrived, no more lines, error.
"""

LINE, LINE_SIZE = range(2)
"""Fields of `held`: address and size of a line that libpq returned but that did not fit.

The size is 0 if there is none.
"""
HELD_WIDTH = 2

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


def _data(context: Any, builder: Any, kind: Any, array: Any) -> Any:
    return context.make_array(kind)(context, builder, array).data


def _call_get(_typing: Any, get: Any, connection: Any, held: Any) -> Any:
    """Generate a call of PQgetCopyData that stores the line's address in `held[LINE]`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function, connected, line = arguments
        function = builder.inttoptr(function, _GET.as_pointer())
        connected = builder.inttoptr(connected, cgutils.voidptr_t)
        line = _data(context, builder, signature.args[2], line)
        line = builder.bitcast(line, cgutils.voidptr_t.as_pointer())
        size = builder.call(function, [connected, line, cgutils.int32_t(1)])
        return builder.sext(size, cgutils.intp_t)

    return numba.int64(get, connection, held), generate


def _copy_and_free(_typing: Any, free: Any, held: Any, out: Any, at: Any) -> Any:
    """Generate code that copies the line in `held` to `out`, and frees it with PQfreemem."""

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

    return numba.void(free, held, out, at), generate


_get_line: Callable[[int, int, Longs], int] = cast("Any", intrinsic(_call_get))
_move_line: Callable[[int, Longs, Bytes, int], None] = cast("Any", intrinsic(_copy_and_free))


@kernel
def take_lines(
    get: int, free: int, connection: int, held: Longs, out: Bytes, at: int, enough: int
) -> tuple[int, int]:
    """Copy lines that have arrived to `out`, until it has at least `enough` bytes.

    Args:
        get: Address of PQgetCopyData.
        free: Address of PQfreemem.
        connection: Address of the PGconn; no other thread may use it meanwhile.
        held: State between calls; zeros at first.
        out: The buffer.
        at: Number of bytes that are in the buffer already.
        enough: The size at which to stop.

    Returns:
        The number of bytes in the buffer, and why it stopped. After `LINE_IS_LONGER`, call again
        with a larger
        buffer.
    """
    while at < enough:
        if held[LINE_SIZE] == 0:
            size = _get_line(get, connection, held)
            if size <= 0:
                return at, size
            held[LINE_SIZE] = size
        size = held[LINE_SIZE]
        if size > out.size - at:
            return at, LINE_IS_LONGER
        _move_line(free, held, out, at)
        held[LINE_SIZE] = 0
        at += size
    return at, BUFFER_IS_FULL
