"""Tests of the raw limits."""

from __future__ import annotations

import pytest

from deltaforge_lab.bench.limits import MachineLimits, raw_write_rate


def test_ratios_are_those_of_the_rate() -> None:
    """A ratio of 1 is the limit itself."""
    found = MachineLimits.of(50_000.4, raw_read=100_000.0, raw_write=50_000.4)

    assert found == MachineLimits(100_000, 50_000, 0.5, 1.0)
    assert found.lines()["raw read per second"] == "100,000 (ratio 0.50)"


@pytest.mark.parametrize(("seconds", "writes"), [(0.5, 4), (3.0, 1)])
def test_writing_is_repeated_for_two_seconds(
    monkeypatch: pytest.MonkeyPatch, seconds: float, writes: int
) -> None:
    """Short writes are repeated, a long one is not, and every one counts."""
    clock = 10.0
    written = 0

    def write() -> int:
        nonlocal clock, written
        clock += seconds
        written += 1
        return 600

    monkeypatch.setattr("time.monotonic", lambda: clock)

    assert raw_write_rate(write) == pytest.approx(600 / seconds)
    assert written == writes
