"""What must not be cut short once it has begun: the ending of a run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM be without effect in the block.

    Who ends a run may ask again until it is gone, and often two ask: a terminal or supervisor, and the
    process that has started the run. In another thread than the main one nothing is done: signals
    never reach it.
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


def _already_ending(*_: object) -> None:
    """Do nothing; unlike an ignored signal, no child inherits this."""
