"""Signals that end a command in order, once."""

from __future__ import annotations

import signal


def interrupt_once(*_: object) -> None:
    """Leave as with Ctrl-C; a handler of SIGTERM and SIGHUP.

    Who ends us may ask again until we are gone: from then on both are without effect, so that the
    ending is not cut short. Ctrl-C still hastens it.

    Raises:
        KeyboardInterrupt: Always.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a handler would be gone before Python is
    raise KeyboardInterrupt
