"""Entry points of packages that are not installed."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from types import ModuleType

import pytest

from deltaforge_dagster import kinds


class Distribution:
    """An installed package."""

    def __init__(self, name: str) -> None:
        self.name, self.version = name, "1.0"


def pretend(
    patch: pytest.MonkeyPatch,
    group: str,
    *entries: tuple[str, str, str],
    module: ModuleType = kinds,
) -> None:
    """Pretend to `module` that packages are installed: package, name of the entry point, and its value."""
    found = []
    for package, name, value in entries:
        entry = EntryPoint(name, value, group)
        vars(entry)["dist"] = Distribution(package)
        found.append(entry)
    patch.setattr(module, "entry_points", lambda **_: found)
