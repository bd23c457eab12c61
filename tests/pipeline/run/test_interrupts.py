"""The ending of a run is not cut short."""

from __future__ import annotations

import signal
import threading

import pytest

from deltaforge_dagster.pipeline.run.interrupts import uninterrupted


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


def test_another_thread_changes_nothing() -> None:
    """Signals are the main thread's business; the block is just done."""
    seen: list[object] = []

    def work() -> None:
        with uninterrupted():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

    assert seen == [signal.getsignal(signal.SIGTERM)]
