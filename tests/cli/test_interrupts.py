"""Signals that end a command in order."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from deltaforge_dagster.cli.interrupts import interrupt_once

ENDING = (signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Handlers as a command sets them; afterwards they are what they were."""
    before = {number: signal.signal(number, interrupt_once) for number in ENDING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("first", ENDING)
def test_only_the_first_one_counts(first: signal.Signals) -> None:
    """It interrupts like Ctrl-C; whatever comes while everything ends is without effect."""
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(first)
    for number in (*ENDING, *ENDING):
        signal.raise_signal(number)
