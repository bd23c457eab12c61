"""Tests of the signal handler that ends commands in order."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from deltaforge_dagster.installation.process import interrupt_once

ENDING = (signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Set the handlers as a command does, and restore them afterwards."""
    before = {number: signal.signal(number, interrupt_once) for number in ENDING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("first", ENDING)
def test_only_the_first_one_counts(first: signal.Signals) -> None:
    """The first signal interrupts like Ctrl-C; later ones are ignored during the shutdown."""
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(first)
    for number in (*ENDING, *ENDING):
        signal.raise_signal(number)
