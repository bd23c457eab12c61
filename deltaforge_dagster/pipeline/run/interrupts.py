"""Protect the end of a run from further signals, and what it imports from all."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Make Ctrl-C and SIGTERM ineffective in the block.

    Whoever ends a run may repeat the signal until it is gone, and often two send one: a terminal or
    supervisor, and the process that started the run. Outside of the main thread this does nothing, because
    Python runs signal handlers only there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _already_ending) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def interrupted_afterwards() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the block has ended, which imports modules.

    Python may keep its import lock when a signal handler raises an error amid an import. Then every other thread that
    imports something waits for ever. Outside of the main thread this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def later(number: int, _frame: object) -> None:
        received.append(number)

    before = {number: signal.signal(number, later) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        signal.raise_signal(received[0])


def _already_ending(*_: object) -> None:
    """Do nothing; unlike SIG_IGN, child processes do not inherit this."""
