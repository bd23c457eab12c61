"""Whether a run waits for what fails."""

from __future__ import annotations

import time

import pytest

from deltaforge_dagster.errors import DeltaforgeError, SinkRejected, SinkUnavailable
from deltaforge_dagster.pipeline.backoff import RetryPatience


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic time, which stands still until a test moves it."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def asked_to_wait(seconds: float) -> DeltaforgeError:
    """Return the error of a server that has said when to try again."""
    error = SinkUnavailable("slow down")
    error.retry_after = seconds
    return error


@pytest.mark.parametrize(
    ("error", "delay", "lasts"),
    [
        (SinkUnavailable("cut"), 1.0, True),
        (SinkUnavailable("cut"), 5.5, False),
        (asked_to_wait(17), 17.0, True),
        (asked_to_wait(31), 31.0, False),
        (SinkRejected("no such topic"), 1.0, False),
    ],
)
def test_an_attempt_that_is_near(
    clock: list[float], error: DeltaforgeError, delay: float, lasts: bool
) -> None:
    """Near is what the run calls idle, or five seconds; half a minute if the server has said when; what a person must mend is not."""
    patience = RetryPatience(5.0)
    assert not patience.lasts()

    patience.failed(error, delay)

    assert patience.lasts() is lasts
    patience.succeeded()
    assert not patience.lasts()


def test_failures_in_a_row(clock: list[float]) -> None:
    """The time counts from the first one; a sink that gets something between them is waited for on and on."""
    patience = RetryPatience(5.0)
    patience.failed(SinkUnavailable("cut"), 3.0)
    clock[0] += 3
    patience.failed(SinkUnavailable("cut"), 3.0)

    assert not patience.lasts()
    assert patience.lasts(moved_at=1002.0)


def test_an_attempt_that_takes_long(clock: list[float]) -> None:
    """It is waited for as well, for as long again."""
    patience = RetryPatience(5.0)
    patience.failed(SinkUnavailable("cut"), 1.0)

    clock[0] += 6
    assert patience.lasts()
    clock[0] += 0.5
    assert not patience.lasts()


def test_a_run_that_is_never_idle(clock: list[float]) -> None:
    """It does not wait for hours for a sink that is down."""
    patience = RetryPatience(3600.0)

    patience.failed(SinkUnavailable("cut"), 6.0)

    assert not patience.lasts()
