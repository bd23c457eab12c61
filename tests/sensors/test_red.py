"""Tests of failing ticks, which have a message without a stack trace."""

from __future__ import annotations

import sys

import dagster as dg
import pytest
from dagster._core.errors import DagsterUserCodeProcessError
from dagster._utils.error import serializable_error_info_from_exc_info

from deltaforge_dagster.sensors.red import NOT_WELL, red


def test_a_tick_that_is_well_skips() -> None:
    """An idle tick does not fail."""
    idle = dg.SkipReason("no changes in the source, every sink has what was captured")
    assert red(idle) is idle


def test_what_is_wrong_is_red_for_as_long_as_it_lasts() -> None:
    """Each tick fails while the problem lasts, with only the message."""
    down = dg.SkipReason(f"{NOT_WELL}source: connection refused")
    for _ in range(2):
        with pytest.raises(DagsterUserCodeProcessError):
            red(down)
        try:
            red(down)
        except DagsterUserCodeProcessError:
            info = serializable_error_info_from_exc_info(sys.exc_info())
        assert (info.message, info.stack) == (down.skip_message, [])
