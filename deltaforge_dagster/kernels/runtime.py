"""Kernels: plain Python functions that Numba compiles to machine code.

How to write them, and how they are compiled.

Log bytes are decoded by kernels, because Python's own speed (10,000 to 20,000 rows a second) is not
enough. The rules for writing one:

- It takes NumPy arrays and integers and returns integers. It never raises: an error is a negative
  number or a stop code, which the Python caller turns into an exception of `errors.py`.
- It allocates nothing. It is compiled without Numba's memory manager (`_nrt=False`), because
  counting references to arrays at each call inside a kernel was measured to take half of its time.
- It is flat: loops, comparisons with `==`, early returns. That compiles well, and is the reason why
  the linter's complexity rules are off in files with kernels.
- Numba does not check bounds. A kernel must compare every length that it reads with the end of its
  input, and every write with the remaining room, before it accesses a byte.
- Numba gives a literal a different type than a variable: a kernel that is called first with 0 and
  later with an offset is compiled twice. So an offset that is passed on is initialized with
  `int(np.int64(0))`.
- With `NUMBA_BOUNDSCHECK=1` every access is checked, as in tests (use a separate cache directory:
  Numba does not distinguish that code from other code).
- It also runs as ordinary Python (`NUMBA_DISABLE_JIT=1`), where a byte read from an array is a
  `numpy.uint8` that overflows: convert with `np.int64(...)` before any arithmetic.
- It releases the GIL, so the threads that renew the lease and answer keepalives can run meanwhile.

The first call compiles a kernel, or finds its machine code in the cache (`compiler`). Numba is
imported then: it takes a third of a second and 50 MB, which processes that import kernels but do
not call them, such as a code server, do not need to spend.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]
Longs: TypeAlias = npt.NDArray[np.int64]

_Function = TypeVar("_Function", bound=Callable[..., Any])

# ASCII codes by name, since kernels work on bytes: Numba compiles integers as constants.
QUOTE, BACKSLASH, SLASH = ord('"'), ord("\\"), ord("/")
COMMA, COLON, EQUALS, DOT, MINUS, PLUS = ord(","), ord(":"), ord("="), ord("."), ord("-"), ord("+")
OPEN_BRACE, CLOSE_BRACE = ord("{"), ord("}")
OPEN_BRACKET, CLOSE_BRACKET = ord("["), ord("]")
ZERO, NINE = ord("0"), ord("9")
LOWER_B, LOWER_E, LOWER_F, LOWER_N = ord("b"), ord("e"), ord("f"), ord("n")
LOWER_R, LOWER_T, LOWER_U, LOWER_X = ord("r"), ord("t"), ord("u"), ord("x")
UPPER_E, UPPER_L, UPPER_N, UPPER_U = ord("E"), ord("L"), ord("N"), ord("U")
TAB = ord("\t")
SPACE, UPPER_T, UPPER_Z = ord(" "), ord("T"), ord("Z")

_lock = threading.RLock()  # a kernel is compiled with those that it calls


def read_only(data: Bytes | bytes | bytearray | memoryview) -> Bytes:
    """Return the bytes as a read-only array.

    Numba compiles a kernel separately for writable and for read-only arrays. If all inputs are
    read-only, the kernels that `deltaforge warm` has compiled are used, wherever the bytes come
    from.
    """
    array = np.frombuffer(data, np.uint8)
    array.flags.writeable = False
    return array


class Kernel:
    """A kernel that is compiled at its first call, or when a kernel that calls it is compiled."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.__qualname__ = function.__qualname__
        self._function = function
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any) -> Any:
        """Call the compiled function."""
        return (self._compiled or self.compiled)(*arguments)

    def __reduce__(self) -> str:
        """Pickle by name, as functions are."""
        return self.__qualname__

    @property
    def compiled(self) -> Any:
        """Numba's function; the plain one with `NUMBA_DISABLE_JIT=1`."""
        with _lock:
            if self._compiled is None:
                from deltaforge_dagster.kernels import compiler  # noqa: PLC0415 - see the docstring

                self._compiled = compiler.compiled(self._function)
            return self._compiled

    @property
    def _numba_type_(self) -> Any:
        """The type that Numba queries when it compiles a kernel that calls this one."""
        return self.compiled._numba_type_


def kernel(function: _Function) -> _Function:
    """Make a function a kernel; see the rules in this module's docstring."""
    return cast("_Function", Kernel(function))


def copy_bytes(out: Bytes, at: np.int64, source: Bytes, start: np.int64, size: np.int64) -> None:
    """Write `source[start:start + size]` to `out[at:]`.

    Compiled, it is the C library's memcpy (`compiler`).
    """
    out[at : at + size] = source[start : start + size]


@kernel
def copy(source: Bytes, start: int, end: int, out: Bytes, at: int) -> int:
    """Copy `source[start:end]` to `out[at:]`, and return the offset after it.

    A compiled loop over the bytes would take three times as long for the short texts that kernels
    mostly copy.
    """
    copy_bytes(out, np.int64(at), source, np.int64(start), np.int64(end - start))
    return at + end - start
