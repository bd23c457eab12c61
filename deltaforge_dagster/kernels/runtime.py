"""Kernels: plain Python functions that Numba compiles to machine code. How to write them, and how they are compiled.

Log bytes are decoded by kernels, because Python's own speed (10,000 to 20,000 rows a second) is not enough.
The rules for writing one:

- It takes NumPy arrays and integers and returns integers. It never raises: an error is a negative
  number or a stop code, which the Python caller turns into an exception of `errors.py`.
- It allocates nothing. It is compiled without Numba's memory manager (`_nrt=False`), because counting
  references to arrays at each call inside a kernel was measured to take half of its time.
- It is flat: loops, comparisons with `==`, early returns. That compiles well, and is the reason why the
  linter's complexity rules are off in files with kernels.
- Numba does not check bounds. A kernel must compare every length that it reads with the end of its input,
  and every write with the remaining room, before it accesses a byte.
- Numba gives a literal a different type than a variable: a kernel that is called first with 0 and later with an
  offset is compiled twice. So an offset that is passed on is initialized with `int(np.int64(0))`.
- With `NUMBA_BOUNDSCHECK=1` every access is checked, as in tests (use a separate cache directory:
  Numba does not distinguish that code from other code).
- It also runs as ordinary Python (`NUMBA_DISABLE_JIT=1`), where a byte read from an array is a
  `numpy.uint8` that overflows: convert with `np.int64(...)` before any arithmetic.
- It releases the GIL, so the threads that renew the lease and answer keepalives can run meanwhile.

Machine code is cached on disk, below `NUMBA_CACHE_DIR` or the user's cache directory. Numba
recompiles a cached kernel when its file changes, but not when a kernel that it calls, or a constant,
changes in another file; then it would run outdated code. So the cache is a
folder named by a digest of all files on which kernels depend: those with kernels, and all that these import.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
from numba.core import cgutils
from numba.extending import intrinsic

Bytes: TypeAlias = npt.NDArray[np.uint8]
Longs: TypeAlias = npt.NDArray[np.int64]

_OPTIONS: dict[str, Any] = {"nogil": True, "cache": True, "_nrt": False}

_Function = TypeVar("_Function", bound=Callable[..., Any])


_IMPORT = re.compile(
    rb"^[ \t]*(?:from|import)[ \t]+([\w.]+)(?:[ \t]+import[ \t]+(\([^)]*\)|.*))?", re.MULTILINE
)


def compiled_from(package: Path) -> dict[str, bytes]:
    """Return the modules of a package that have kernels, and those that they import from it, with their sources."""
    texts = {}
    for path in package.rglob("*.py"):
        name = ".".join(path.relative_to(package.parent).with_suffix("").parts)
        texts[name.removesuffix(".__init__")] = path.read_bytes()
    found: dict[str, bytes] = {}
    unread = [name for name, text in texts.items() if b"@kernel" in text or b"kernel(" in text]
    while unread:
        name = unread.pop()
        if name in texts and name not in found:
            found[name] = texts[name]
            for imported, names in _IMPORT.findall(texts[name]):
                # An imported name may be a module; if it is not, it is not in `texts`.
                module = imported.decode()
                unread += [
                    module,
                    *(f"{module}.{one}" for one in re.findall(r"\w+", names.decode())),
                ]
    return found


def _cache_folder() -> Path:
    """Return the folder for machine code that was compiled from exactly these sources."""
    digest = hashlib.sha256()
    for name, text in sorted(compiled_from(Path(__file__).parents[1]).items()):
        digest.update(f"{name} {len(text)} ".encode() + text)
    given = os.environ.get("NUMBA_CACHE_DIR")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(given or cache / "deltaforge" / "kernels") / digest.hexdigest()[:16]


CACHE = _cache_folder()
"""The folder of cached machine code; created when the first kernel is compiled."""

numba.config.CACHE_DIR = str(CACHE)  # type: ignore[attr-defined]  # set at import


def read_only(data: Bytes | bytes | bytearray | memoryview) -> Bytes:
    """Return the bytes as a read-only array.

    Numba compiles a kernel separately for writable and for read-only arrays. If all inputs are read-only, the
    kernels that `deltaforge warm` has compiled are used, wherever the bytes come from.
    """
    array = np.frombuffer(data, np.uint8)
    array.flags.writeable = False
    return array


def kernel(function: _Function) -> _Function:
    """Make a function a kernel, which is compiled at its first call; see the rules in this module's docstring."""
    return cast("_Function", numba.njit(**_OPTIONS)(function))


def _copy_slowly(out: Bytes, at: int, source: Bytes, start: int, size: int) -> None:
    out[at : at + size] = source[start : start + size]


@intrinsic
def _copy_natively(_typing: Any, out: Any, at: Any, source: Any, start: Any, size: Any) -> Any:
    """Call the C library's memcpy; gets Numba types, and generates LLVM code."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, place, text, begin, count = arguments
        target = context.make_array(signature.args[0])(context, builder, target).data
        text = context.make_array(signature.args[2])(context, builder, text).data
        target, text = builder.gep(target, [place]), builder.gep(text, [begin])
        cgutils.raw_memcpy(builder, target, text, count, 1)  # type: ignore[no-untyped-call]
        return context.get_dummy_value()

    return numba.void(out, at, source, start, size), generate


def _copy_checked(out: Bytes, at: int, source: Bytes, start: int, size: int) -> None:
    for i in range(size):
        out[at + i] = source[start + i]


def _copy_of(config: Any) -> Callable[..., None]:
    """Return the copy function for Numba's configuration: not compiled, with bounds checks, or native."""
    if config.DISABLE_JIT:
        return _copy_slowly
    return kernel(_copy_checked) if config.BOUNDSCHECK else _copy_natively


_copy_bytes = _copy_of(numba.config)


@kernel
def copy(source: Bytes, start: int, end: int, out: Bytes, at: int) -> int:
    """Copy `source[start:end]` to `out[at:]`, and return the offset after it.

    A compiled loop over the bytes would take three times as long for the short texts that kernels mostly copy.
    """
    _copy_bytes(out, np.int64(at), source, np.int64(start), np.int64(end - start))
    return at + end - start
