"""Ticks that fail so that people see what is wrong: with the message, no stack, and not all the time."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import dagster as dg
import pytest
from dagster._core.errors import DagsterUserCodeProcessError
from dagster._utils.error import serializable_error_info_from_exc_info

from deltaforge_dagster.sensors import red as module
from deltaforge_dagster.sensors.red import NOT_WELL, red

IDLE = dg.SkipReason("no changes in the source, every sink has what was captured")
DOWN = dg.SkipReason(f"{NOT_WELL}source: connection refused; in 5 s")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No sensor has failed before."""
    module._failed.clear()
    yield
    module._failed.clear()


def shown(skipped: dg.SkipReason) -> str | None:
    """Return what a tick that fails shows, None when it skips."""
    try:
        assert red("shop", skipped) is skipped
    except DagsterUserCodeProcessError:
        info = serializable_error_info_from_exc_info(sys.exc_info())
        assert info.stack == []
        return info.message
    return None


def test_what_is_wrong_is_red_at_once_and_then_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A new problem fails its tick, one that lasts a tick a minute; seconds in a message make no new one."""
    assert shown(IDLE) is None
    assert shown(DOWN) == DOWN.skip_message
    assert shown(DOWN) is None
    assert shown(dg.SkipReason(str(DOWN.skip_message).replace("5", "4"))) is None
    gone = dg.SkipReason(f"{NOT_WELL}source: the slot is gone")
    assert shown(gone) == gone.skip_message
    monkeypatch.setattr(module, "_AGAIN_SECONDS", 0.0)
    assert shown(gone) == gone.skip_message


def test_a_problem_that_comes_back_is_red_again() -> None:
    """Once a tick was well, the same problem is a new one."""
    assert shown(DOWN) is not None
    assert shown(IDLE) is None
    assert shown(DOWN) is not None
