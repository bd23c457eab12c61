"""Tests of the seam benchmark."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltaforge_lab.bench.seam import measure

pytestmark = [pytest.mark.spark, pytest.mark.soak("benchmarks")]


def test_measures_everything(tmp_path: Path) -> None:
    """A tiny measurement has every number, and leaves no server behind."""
    result = measure(tmp_path, 2_000, 1)

    assert result.rows == 2_000
    assert 600 < result.value_bytes < 700
    assert min(result.one_sender, result.three_senders, result.raw) > 0
    assert 0 < result.small <= result.small_p99
    assert not (tmp_path / "spark" / "server.json").exists()
