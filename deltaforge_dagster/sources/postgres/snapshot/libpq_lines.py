"""Kernel that takes lines of `COPY ... TO STDOUT` from libpq by calling libpq's own functions.

Manual of libpq, "Functions Associated with the COPY Command"::

    int PQgetCopyData(PGconn *conn, char **buffer, int async)
        the size of the line that `buffer` points to then, to be freed with PQfreemem; 0 when none
        has arrived (async true: it does not wait); -1 when there are no more; -2 for an error

The functions are those of the very libpq that psycopg uses, for a connection means nothing to another
copy of it: asked of psycopg's own extension module, the loader finds what that is linked with.
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
"""Why `take_lines` stopped: the buffer has its size; a line has been taken that does not fit behind it;
the last three as PQgetCopyData says."""

LINE, LINE_SIZE = range(2)
"""Where libpq put the line that was taken and does not fit, and its size; 0 without one."""
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
    """Return those that psycopg uses; None where they cannot be found, or kernels are not compiled."""
    if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]  # set at import
        return None
    extension = sys.modules[psycopg.pq.PGconn.__module__].__file__
    try:
        library = ctypes.CDLL(extension)
        found = (library.PQgetCopyData, library.PQfreemem)
    except (OSError, AttributeError):  # psycopg in plain Python, or with a libpq inside
        return None
    get, free = (ctypes.cast(one, ctypes.c_void_p).value for one in found)
    return Functions(get, free) if get and free else None


FUNCTIONS = _functions()


def _data(context: Any, builder: Any, kind: Any, array: Any) -> Any:
    return context.make_array(kind)(context, builder, array).data


def _call_get(_typing: Any, get: Any, connection: Any, held: Any) -> Any:
    """Call PQgetCopyData, with the place `LINE` as its buffer."""

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
    """Copy the line that is held, and call PQfreemem."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function, line, target, place = arguments
        line = _data(context, builder, signature.args[1], line)
        size = builder.load(builder.gep(line, [cgutils.intp_t(LINE_SIZE)]))
        text = builder.inttoptr(builder.load(line), cgutils.voidptr_t)
        target = _data(context, builder, signature.args[2], target)
        target = builder.gep(target, [place])
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
    """Write lines that have arrived to `out[at:]`, up to the one that reaches `enough` bytes.

    Args:
        get: Address of PQgetCopyData.
        free: Address of PQfreemem.
        connection: Address of the PGconn; no other thread may use it meanwhile.
        held: As the last call left it, zeros at first.
        out: Where to write.
        at: Behind the bytes that are there already.
        enough: When to stop.

    Returns:
        Where the lines end, and why there are no more: after `LINE_IS_LONGER` a larger `out` is wanted.
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
