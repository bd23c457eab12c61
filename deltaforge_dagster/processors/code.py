"""The code of user functions: find, hash and load the modules that pipeline files name.

The hash of a chain tells whether two chains may produce different output. This module is cheap to
import: Dagster's definitions use it, and they run no processors.

A user's module is searched in the directory that the file names, then on Python's module search
path. Each processor reloads it, together with the modules beside it: a changed file takes effect
with the next chain, although Spark workers live longer, and a module's state belongs to one
processor of one run. Other modules (installed packages), except the named one itself, are loaded
once per worker.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import orjson

from deltaforge_dagster.config import processors as config
from deltaforge_dagster.errors import SpecError


def code_of(processors: Iterable[config.Processor]) -> dict[str, str]:
    """Return the hashes of the modules of Python functions by processor id; import nothing."""
    hashes = {
        processor.id: source_hash(processor.function, processor.path)
        for processor in processors
        if isinstance(processor, config.PythonProcessor)
    }
    return {name: digest for name, digest in hashes.items() if digest is not None}


def chain_hash(processors: Iterable[config.Processor], code: Mapping[str, str]) -> str:
    """Return a hash that differs between chains whose output for the same rows may differ."""
    blocks = [processor.model_dump(mode="json") for processor in processors]
    for block in blocks:
        if "path" in block:
            # The code's location and time limit do not affect its output.
            del block["path"], block["limits"]
    text = orjson.dumps([*blocks, code] if code else blocks)
    return hashlib.sha256(text).hexdigest()


def source_hash(function: str, path: str | None) -> str | None:
    """Return the SHA-256 of the source of a function's module; None if it is not found here.

    Args:
        function: `module:function`.
        path: Directory to search first.
    """
    source = _source(function.partition(":")[0], path)
    return None if source is None else hashlib.sha256(source.read_bytes()).hexdigest()


def loaded(function: str, path: str | None) -> tuple[Callable[..., Any], str]:
    """Reload a function's module; return the function and the module's file.

    Args:
        function: `module:function`.
        path: Directory to search first, for the module and the modules that it imports.

    Raises:
        SpecError: The module or the function does not exist, or loading fails.
    """
    name, _, attribute = function.partition(":")
    if path is not None:
        _look_first_in(path)
    _forget(name)
    try:
        module = importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything
        raise SpecError(f"the module {name} cannot be loaded: {_failure(error, name)}") from None
    value = getattr(module, attribute, None)
    if not callable(value):
        raise SpecError(f"the module {name} has no function {attribute}")
    return value, module.__file__ or ""


def line_in(error: BaseException, file: str) -> int | None:
    """Return the innermost line of `file` in an error's traceback, or None."""
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _failure(error: Exception, name: str) -> str:
    if isinstance(error, ModuleNotFoundError):
        missing = error.name or name
        where = "the directory `path` of the pipeline file, or where Python looks"
        return f"there is no module {missing} (it must be in {where})"
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} (line {error.lineno})"
    line = line_in(error, str(_source(name, None)))
    return f"{type(error).__name__}: {error}" + ("" if line is None else f" (line {line})")


def _source(name: str, path: str | None) -> Path | None:
    """Return the source file of a module, or None, without importing it or its packages."""
    places = [*([] if path is None else [path]), *sys.path]
    whole = ""
    for part in name.split("."):
        whole = f"{whole}.{part}" if whole else part
        spec = PathFinder.find_spec(whole, places)
        if spec is None:
            return None
        places = list(spec.submodule_search_locations or [])
    source = Path(spec.origin) if spec is not None and spec.origin else None
    return source if source is not None and source.suffix == ".py" and source.is_file() else None


_first: list[str] = []
"""All directories that have been searched first in this process."""


def _look_first_in(path: str) -> None:
    """Put a directory first in `sys.path`, and remove the previous one."""
    for directory in _first:
        while directory in sys.path:
            sys.path.remove(directory)
    if path not in _first:
        _first.append(path)
    sys.path.insert(0, path)


def _forget(name: str) -> None:
    """Make Python reload a module, and all modules directly in directories of pipeline files."""
    importlib.invalidate_caches()
    for imported, module in list(sys.modules.items()):
        file = str(getattr(module, "__file__", ""))
        # Only modules under their own names: the directory may also contain a virtual environment.
        parts = imported.replace(".", "/")
        ours = any(file in {f"{path}/{parts}.py", f"{path}/{parts}/__init__.py"} for path in _first)
        if ours or (imported == name and file.endswith(".py")):
            del sys.modules[imported]
