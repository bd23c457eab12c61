"""Threads get their turn in the order in which they asked."""

from __future__ import annotations

import threading
import time

import pytest

from deltaforge_dagster.errors import StoreUnavailable
from deltaforge_dagster.state.turns import Turns


def test_first_come_first_served() -> None:
    """Whoever asked first comes first, however busy the others are."""
    turns = Turns("memory", 10)
    order: list[int] = []

    def work(number: int) -> None:
        with turns.turn():
            order.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(5)]
    with turns.turn():
        for number, thread in enumerate(threads):
            thread.start()
            while len(turns._waiting) <= number:
                time.sleep(0.001)
    for thread in threads:
        thread.join()

    assert order == [0, 1, 2, 3, 4]


def test_waiting_ends() -> None:
    """Who waits too long leaves the line, and the lock still works afterwards."""
    turns = Turns("memory", 0.1)
    with turns.turn(), pytest.raises(StoreUnavailable, match="memory"), turns.turn():
        pytest.fail("two at once")

    with turns.turn():
        pass


def test_error_passes_the_turn_on() -> None:
    """A turn that ends with an error is over."""
    turns = Turns("memory", 0.1)
    with pytest.raises(ZeroDivisionError), turns.turn():
        _ = 1 // 0
    with turns.turn():
        pass
