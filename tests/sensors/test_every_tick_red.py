"""Tests of failing ticks."""

from __future__ import annotations

import dagster as dg
import pytest

from deltaforge_dagster.sensors.every_tick import NOT_WELL, red


def test_a_tick_that_is_well_skips() -> None:
    """An idle tick does not fail."""
    idle = dg.SkipReason("no changes in the source, every sink has what was captured")
    assert red(idle) is idle


def test_what_is_wrong_is_red_for_as_long_as_it_lasts() -> None:
    """Each tick fails while the problem lasts, with the message as it is."""
    down = dg.SkipReason(f"{NOT_WELL}source: connection refused")
    for _ in range(2):
        with pytest.raises(dg.Failure) as failed:
            red(down)
        assert failed.value.description == down.skip_message
