"""The ending of a run is not cut short, nor what it imports."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from deltaforge_dagster.pipeline.interrupts import interrupted_afterwards, uninterrupted


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_without_effect_in_the_block(number: signal.Signals) -> None:
    """However often they come; behind it they are what they were, also after an error."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def end() -> None:
        with uninterrupted():
            signal.raise_signal(number)
            signal.raise_signal(number)
            raise ZeroDivisionError

    before = signal.signal(number, interrupt)
    try:
        with pytest.raises(ZeroDivisionError):
            end()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_take_effect_after_the_block(number: signal.Signals) -> None:
    """Once, however often they came; without one, nothing happens."""
    done, received = [], []
    before = signal.signal(number, lambda number, _: received.append(number))
    try:
        with interrupted_afterwards():
            signal.raise_signal(number)
            signal.raise_signal(number)
            done.append(list(received))
        with interrupted_afterwards():
            done.append(list(received))
    finally:
        signal.signal(number, before)

    assert done == [[], [number]]
    assert received == [number]


@pytest.mark.parametrize("block", [uninterrupted, interrupted_afterwards])
def test_another_thread_changes_nothing(block: Callable[[], AbstractContextManager[None]]) -> None:
    """Signals are the main thread's business; the block is just done."""
    seen: list[object] = []

    def work() -> None:
        with block():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

    assert seen == [signal.getsignal(signal.SIGTERM)]
