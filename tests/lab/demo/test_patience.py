"""Tests of how long the demo waits for a run to start and deliver, and of its messages."""

from __future__ import annotations

from deltaforge_dagster.cli.installation.dagster_processes import ANSWER_SECONDS
from deltaforge_lab.demo.patience import START_SECONDS, STUCK_SECONDS, Patience

NOTHING = {"redis": 0, "files": 0}


class Waiting:
    """A waiting demo with a simulated clock."""

    def __init__(self) -> None:
        self._patience = Patience(0.0)
        self.now = 0.0
        self.said: list[str] = []

    def wait(self, seconds: float, arrived: dict[str, int], run: str | None = None) -> str | None:
        """Look once a second until the wait is over; return the reason."""
        end = self.now + seconds
        while self.now < end:
            said = self._patience.poll(self.now, arrived, run, writing=False)
            self.said += [said] if said else []
            if why := self._patience.over(self.now):
                return why
            self.now += 1
        return None


def test_a_run_has_its_time_to_start() -> None:
    """The demo waits for a run, then for its deliveries, and reports each once."""
    waiting = Waiting()
    assert waiting.wait(ANSWER_SECONDS + 60, NOTHING) is None
    assert waiting.wait(STUCK_SECONDS - 1, NOTHING, "7c1d") is None
    assert waiting.wait(STUCK_SECONDS - 1, {**NOTHING, "redis": 3}, "7c1d") is None

    assert waiting.said == [
        "waiting for a run: its process may take 5 min to start",
        "waiting for what run 7c1d delivers",
        "waiting for what run 7c1d delivers",
    ]


def test_a_run_that_delivers_nothing_ends_the_waiting() -> None:
    """The wait ends two minutes after the run began to work or after the last arrival, whichever is later."""
    waiting = Waiting()
    assert waiting.wait(100, NOTHING) is None

    why = waiting.wait(600, NOTHING, "7c1d")

    assert why == "nothing has arrived for 3 min 41 s, though run 7c1d works"


def test_without_a_run_the_waiting_ends() -> None:
    """The wait ends once a run should have started; short-lived runs do not extend it."""
    alone = Waiting()
    why = alone.wait(10_000, NOTHING)
    assert why == "nothing has arrived for 7 min 1 s, and no run works"

    flapping = Waiting()
    while flapping.wait(90, NOTHING) is None and flapping.wait(30, NOTHING, "7c1d") is None:
        assert flapping.now < 10_000
    assert flapping.now <= START_SECONDS + STUCK_SECONDS


def test_what_moves_is_not_spoken_of() -> None:
    """While changes arrive or are written, nothing is reported and the wait does not end."""
    waiting = Waiting()
    for count in range(100):
        assert waiting.wait(9, {"redis": count, "files": count}, "7c1d") is None
    patience = Patience(0.0)
    for now in range(1_000):
        assert patience.poll(float(now), NOTHING, None, writing=True) is None
        assert patience.over(float(now)) is None

    assert waiting.said == []
