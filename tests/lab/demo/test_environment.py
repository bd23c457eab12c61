"""Tests of the demo's messages while its servers start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deltaforge_dagster.kernels import runtime as kernel
from deltaforge_lab.demo.environment import DemoEnvironment

pytestmark = pytest.mark.redis


@pytest.mark.parametrize("kept", [False, True])
def test_the_first_start_says_that_it_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """The first start announces that kernels have to be compiled; later starts do not."""
    cache = tmp_path / "kernels"
    if kept:
        cache.mkdir()
    monkeypatch.setattr(kernel, "CACHE", cache)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    said: list[str] = []

    with DemoEnvironment(tmp_path, said.append, "turso"):
        pass

    first = "the first start compiles the decoding kernels: that takes some minutes"
    assert said.index("starting Redis") == (0 if kept else 1)
    assert (said[0] == first) is not kept
