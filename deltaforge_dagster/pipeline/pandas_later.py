"""Lets a run use Arrow and Spark without importing pandas.

Importing pandas would cost the run a quarter of a second and 45 MB.

Both libraries convert from and to pandas, which DeltaForge never does. pyarrow imports pandas when
it creates its first array from Python objects, to recognize objects of pandas; PySpark's Connect
client imports it at once.

Code that does use pandas, such as a sink of another package, imports it as usual; pyarrow and
PySpark then work with it as if they had imported it first.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from types import ModuleType
from typing import Any

import pyarrow as pa

_PANDAS = "pandas"
_STOOD_IN = (_PANDAS, "pandas.api", "pandas.api.types")
"""What PySpark's Connect client imports of pandas."""

_lock = threading.Lock()


def arrow_without_pandas() -> None:
    """Let pyarrow search for pandas now and find none, unless pandas is imported already.

    pyarrow searches once, at its first array. It searches again when it is asked to convert from or
    to pandas, and when pandas is imported later.
    """
    with _lock:
        if _PANDAS in sys.modules:
            return
        finder = _ArrowsPandas()
        sys.meta_path.insert(0, finder)
        pa.array([None])
        finder.hidden = False


@contextmanager
def standing_in_for_pandas() -> Iterator[None]:
    """While the block imports a library, replace pandas with modules that import it on first use.

    Does nothing if pandas is imported already.
    """
    with _lock:
        if _PANDAS in sys.modules:
            yield
            return
        modules = {name: _StandIn(name) for name in _STOOD_IN}
        sys.modules.update(modules)
        try:
            yield
        finally:
            for name in modules:
                del sys.modules[name]


class _StandIn(ModuleType):
    """Stands in for a module of pandas.

    Once it is removed from `sys.modules`, its attributes are those of the real module.
    """

    __path__: MutableSequence[str] = []  # noqa: RUF012 - modules have it as an attribute
    __version__ = version(_PANDAS)

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is not self:
            return getattr(importlib.import_module(self.__name__), name)
        if name.startswith("__"):  # asked by the import system
            raise AttributeError(name)
        return _later(self, name)


def _later(module: ModuleType, name: str) -> Callable[..., Any]:
    """Return a function that looks up pandas' function of this name when it is called.

    It also serves as a type in annotations.
    """

    def function(*arguments: Any, **options: Any) -> Any:
        return getattr(module, name)(*arguments, **options)

    return function


class _ArrowsPandas(MetaPathFinder):
    """Hides pandas while pyarrow searches for it; pyarrow then finds it once it is imported."""

    def __init__(self) -> None:
        self.hidden = True

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _PANDAS:
            return None
        if self.hidden:
            raise ModuleNotFoundError(name=fullname)
        # It stays in `sys.meta_path`: others may only ask whether pandas is installed.
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _ThenArrow(spec.loader)
                return spec
        return None


class _ThenArrow(Loader):
    """Loads pandas, then makes pyarrow find it."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = (
            self._loader
        )  # which finds the package's data as well
        self._loader.exec_module(module)
        pa.Table.from_pandas(module.DataFrame())
