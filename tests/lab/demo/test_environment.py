"""What the demo compiles while its servers start."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from deltaforge_lab.demo.environment import _KERNELS, DemoEnvironment


@pytest.mark.parametrize("source", _KERNELS)
def test_kernels_that_are_named_can_be_compiled(source: str) -> None:
    """The demo names modules; each of them is there and compiles its kernels."""
    modules = [name for names in _KERNELS[source].values() for name in names]  # type: ignore[index]

    assert all(callable(importlib.import_module(name).warm) for name in modules)


@pytest.mark.parametrize(
    ("module", "reported"),
    [
        ("deltaforge_dagster.processors.sql.spliced_fields", "the kernels for routes are compiled"),
        ("no_such_module", "the kernels for routes could not be compiled now"),
    ],
)
def test_what_is_said_of_compiled_kernels(tmp_path: Path, module: str, reported: str) -> None:
    """The demo says that kernels are compiled only if they are, and otherwise why not."""
    said: list[str] = []
    environment = DemoEnvironment(tmp_path, said.append)
    environment._report_kernels("routes", environment._compile_kernels([module]))

    assert said[0].startswith(reported)
    assert ("no_such_module" in said[0]) == (module == "no_such_module")
