"""The outer limit of one delivery."""

from __future__ import annotations

import threading

import pytest

from deltaforge_dagster.errors import DeltaforgeError, LeaseLost, SinkOverdue, SinkUnavailable
from deltaforge_dagster.pipeline.deliver.sender import Deadline
from deltaforge_dagster.sinks.base import SendGuard, SinkBatch, SinkPosition


class Hanging:
    """A sink that only `close` ends, of which nothing but that is used."""

    exactly_once = False
    takes_parts = False

    def __init__(self) -> None:
        self.closed = threading.Event()

    def hang(self, error: DeltaforgeError | None) -> None:
        """Wait for the end; then fail, or not."""
        assert self.closed.wait(120)
        if error is not None:
            raise error

    def open(self) -> None:
        """Do nothing."""

    def position(self) -> SinkPosition | None:
        """Return None."""
        return None

    def send(self, batch: SinkBatch, guard: SendGuard) -> int:
        """Do nothing."""
        raise AssertionError(batch, guard)

    def close(self) -> None:
        """End a hang."""
        self.closed.set()


def test_a_sink_that_hangs_is_closed() -> None:
    """Its own error becomes that of the deadline, which can pass; it is counted."""
    sink, deadline = Hanging(), Deadline("redis", 0.05)

    with pytest.raises(SinkOverdue, match=r"redis: took longer than 0\.05 s"), deadline.over(sink):
        sink.hang(SinkUnavailable("closed"))

    assert (deadline.missed, SinkOverdue.kind) == (1, "backpressure")


def test_what_was_in_time_is_left_alone() -> None:
    """Errors stay what they are, and nothing is closed afterwards."""
    sink, deadline = Hanging(), Deadline("redis", 300)
    before = timers()

    with pytest.raises(SinkUnavailable, match="no route"), deadline.over(sink):
        raise SinkUnavailable("no route")
    with deadline.over(sink):
        pass

    for timer in timers() - before:
        timer.join(60)
    assert timers() <= before
    assert not sink.closed.is_set()
    assert deadline.missed == 0


def test_what_arrived_in_the_last_moment_counts() -> None:
    """An acknowledgement that came with the deadline is one; a lost lease stays one."""
    sink, deadline = Hanging(), Deadline("redis", 0.05)

    with deadline.over(sink):
        sink.hang(None)
    sink.closed.clear()
    with pytest.raises(LeaseLost), deadline.over(sink):
        sink.hang(LeaseLost("gone"))

    assert deadline.missed == 0


def test_no_limit() -> None:
    """Without one no thread is begun."""
    before = timers()

    with Deadline("redis", None).over(Hanging()):
        assert timers() <= before


def timers() -> set[threading.Timer]:
    """Return what may still close a sink."""
    return {one for one in threading.enumerate() if isinstance(one, threading.Timer)}
