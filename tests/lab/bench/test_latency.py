"""Tests of the latency benchmark."""

from __future__ import annotations

import pytest

from deltaforge_lab.bench.latency import Latency, _summary, measure

TOLD = {number: 1000.0 + number for number in range(1, 101)}


def test_percentiles_are_of_the_rows_of_one_rate() -> None:
    """Percentiles cover the rows of one rate, each measured from its own commit."""
    arrived = {number: round(told * 1000) + number for number, told in TOLD.items()}

    found = _summary(50, range(1, 100), 49.96, TOLD, arrived)

    assert found == Latency(50, 99, 50.0, p50_ms=50, p99_ms=99, max_ms=99)


def test_a_row_that_did_not_arrive_is_no_result() -> None:
    """A lost row is an error, not a latency."""
    with pytest.raises(KeyError):
        _summary(50, range(1, 100), 50.0, TOLD, {1: 1_001_005})


@pytest.mark.soak("benchmarks")
@pytest.mark.postgres
@pytest.mark.redis
@pytest.mark.spark
def test_a_real_run_has_a_latency_for_each_rate() -> None:
    """Every row written at both rates arrives after its commit."""
    slow, fast = measure("pg-redis", 1.0, exactly_once=True, say=lambda _: None)

    assert (slow.rows_per_second, slow.rows) == (50, 50)
    assert (fast.rows_per_second, fast.rows) == (1000, 1000)
    for one in (slow, fast):
        assert 0 <= one.p50_ms <= one.p99_ms <= one.max_ms < 60_000
