"""A signal handler that ends a command in an orderly way, once."""

from __future__ import annotations

import signal


def interrupt_once(*_: object) -> None:
    """Handle SIGTERM or SIGHUP like Ctrl-C.

    Whoever ends the process may repeat the signal until it is gone. Both signals are ignored from
    then on, so that repeats do not interrupt the shutdown; Ctrl-C still does.

    Raises:
        KeyboardInterrupt: Always.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        # Not a handler in Python: the interpreter removes those before the process has ended.
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt
