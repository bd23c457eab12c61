"""What the demo compiles while its servers start."""

from __future__ import annotations

import importlib

import pytest

from deltaforge_lab.demo.environment import _KERNELS


@pytest.mark.parametrize("source", _KERNELS)
def test_kernels_that_are_named_can_be_compiled(source: str) -> None:
    """The demo names modules; each of them is there and compiles its kernels."""
    modules = [name for names in _KERNELS[source].values() for name in names]  # type: ignore[index]

    assert all(callable(importlib.import_module(name).warm) for name in modules)
