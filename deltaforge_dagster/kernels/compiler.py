"""Compiles kernels with Numba, and caches their machine code.

The cache is on disk, below `NUMBA_CACHE_DIR` or the user's cache directory. Numba refreshes a
cached kernel when the file of that kernel changes, but not when a kernel that it calls, or a
constant, changes in another file; then it would run outdated code. So the cache is a folder named
by a digest of all files on which kernels depend: those with kernels, and all that these import.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core import cgutils, types
from numba.extending import lower_builtin, overload, type_callable

from deltaforge_dagster.folders import user_cache
from deltaforge_dagster.kernels import runtime

_WITHOUT_REFCOUNTS: Any = {"_nrt": False}
_OPTIONS: dict[str, Any] = {"nogil": True, "cache": True} | _WITHOUT_REFCOUNTS

_IMPORT = re.compile(
    rb"^[ \t]*(?:from|import)[ \t]+([\w.]+)(?:[ \t]+import[ \t]+(\([^)]*\)|.*))?", re.MULTILINE
)


def compiled_from(package: Path) -> dict[str, bytes]:
    """Return the sources of a package's modules with kernels, and of what these import from it."""
    texts = {}
    for path in package.rglob("*.py"):
        name = ".".join(path.relative_to(package.parent).with_suffix("").parts)
        texts[name.removesuffix(".__init__")] = path.read_bytes()
    sources: dict[str, bytes] = {}
    unread = [name for name, text in texts.items() if b"@kernel" in text or b"kernel(" in text]
    while unread:
        name = unread.pop()
        if name in texts and name not in sources:
            sources[name] = texts[name]
            for imported, names in _IMPORT.findall(texts[name]):
                # An imported name may be a module; if it is not, it is not in `texts`.
                module = imported.decode()
                unread += [
                    module,
                    *(f"{module}.{attribute}" for attribute in re.findall(r"\w+", names.decode())),
                ]
    return sources


@functools.cache
def cache_folder() -> Path:
    """Return the folder for machine code compiled from exactly these sources.

    The folder is created when the first kernel is compiled.
    """
    digest = hashlib.sha256()
    for name, text in sorted(compiled_from(Path(__file__).parents[1]).items()):
        digest.update(f"{name} {len(text)} ".encode() + text)
    folder = os.environ.get("NUMBA_CACHE_DIR")
    return Path(folder or user_cache() / "kernels") / digest.hexdigest()[:16]


numba.config.CACHE_DIR = str(cache_folder())  # type: ignore[attr-defined]  # set at import


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel's dispatcher, which compiles it for each combination of argument types."""
    called: Callable[..., Any] = numba.njit(**_OPTIONS)(function)
    return called


def _checked_copy(
    out: Any,  # noqa: ARG001 - Numba wants the names of the function's own parameters
    at: Any,  # noqa: ARG001
    source: Any,  # noqa: ARG001
    start: Any,  # noqa: ARG001
    size: Any,  # noqa: ARG001
) -> Callable[..., Any]:
    def copy(out: Any, at: Any, source: Any, start: Any, size: Any) -> None:
        for i in range(size):
            out[at + i] = source[start + i]

    return copy


def _type_of_copy(_context: Any) -> Callable[..., Any]:
    return lambda _out, _at, _source, _start, _size: types.void


def _copy_natively(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    """Call the C library's memcpy; gets Numba types, and generates LLVM code."""
    target, offset, text, begin, count = arguments
    target = context.make_array(signature.args[0])(context, builder, target).data
    text = context.make_array(signature.args[2])(context, builder, text).data
    target, text = builder.gep(target, [offset]), builder.gep(text, [begin])
    cgutils.raw_memcpy(builder, target, text, count, 1)  # type: ignore[no-untyped-call]
    return context.get_dummy_value()


if numba.config.BOUNDSCHECK:  # type: ignore[attr-defined]  # set at import
    overload(runtime.copy_bytes, jit_options=_WITHOUT_REFCOUNTS)(_checked_copy)
else:
    _INT = types.Integer
    type_callable(runtime.copy_bytes)(_type_of_copy)
    _LOWERED = (runtime.copy_bytes, types.Array, _INT, types.Array, _INT, _INT)
    lower_builtin(*_LOWERED)(_copy_natively)  # type: ignore[no-untyped-call]
