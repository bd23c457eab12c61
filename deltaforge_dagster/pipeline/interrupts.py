"""Blocks that Ctrl-C and SIGTERM do not cut short: the end of a run, and imports."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Make Ctrl-C and SIGTERM ineffective in the block.

    Whoever ends a run may repeat the signal until it is gone, and often two send one: a terminal or
    supervisor, and the process that started the run. Outside of the main thread this does nothing,
    because Python runs signal handlers only there.
    """
    with _handled_by(_already_ending):
        yield


@contextmanager
def interrupted_afterwards() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the block has ended, which imports modules.

    Python may keep its import lock when a signal handler raises an error amid an import. Then every
    other thread that imports something waits for ever. Outside of the main thread this does
    nothing.
    """
    received: list[int] = []
    with _handled_by(lambda number, _frame: received.append(number)):
        yield
    if received:
        signal.raise_signal(received[0])


@contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Give both signals another handler in the block, in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _already_ending(*_: object) -> None:
    """Do nothing; unlike SIG_IGN, child processes do not inherit this."""
