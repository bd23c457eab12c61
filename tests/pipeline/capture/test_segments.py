"""Where segments end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.config.engine import SegmentLimits
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.journal.writer import SegmentWriter
from deltaforge_dagster.pipeline.capture import segments as cutter_module
from deltaforge_dagster.pipeline.capture.segments import Hold, SegmentCutter
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import ChangeBatch, ParkedEvent
from deltaforge_dagster.sources.postgres.position import LsnPosition
from deltaforge_dagster.state.records import HoldPart
from tests.pipeline.changes import NOTHING, passed, transaction, unfinished

WHENEVER = SegmentLimits(min_ms=0, max_ms=1000)
NEVER = SegmentLimits(min_ms=100_000, max_ms=100_000)


class Kept:
    """Held events of a table, in memory."""

    def __init__(self, event: ParkedEvent, since: Position) -> None:
        assert isinstance(since, LsnPosition)
        self.table = event.table
        self.since = since.lsn
        self.events: list[bytes] = []
        self.size = 0
        self.aborted = False

    def write(self, event: ParkedEvent) -> None:
        """Keep an event."""
        self.events.append(event.data)
        self.size += len(event.data)

    def close(self) -> HoldPart:
        """Return no row: nothing is durable."""
        raise NotImplementedError

    def abort(self) -> None:
        """Drop what was kept."""
        self.aborted = True


class Recorder:
    """A cutter with a real journal, and the segments it sealed as (ids, end)."""

    def __init__(self, folder: Path, limits: SegmentLimits, *, wanted: bool) -> None:
        self.sealed: list[tuple[list[int], int]] = []
        self.journal = Journal(f"file://{folder}")
        self.held: list[tuple[str, int, list[bytes], int]] = []
        self.cutter = SegmentCutter(
            limits,
            self._open,
            self._seal,
            lambda: wanted,
            open_hold=Kept,
            start=LsnPosition(0),
        )

    def _open(self) -> SegmentWriter:
        return self.journal.writer("p", "uid", len(self.sealed) + 1, 1)

    def _seal(self, writer: SegmentWriter | None, holds: Sequence[Hold], end: Position) -> None:
        assert isinstance(end, LsnPosition)
        for hold in holds:
            assert isinstance(hold, Kept)
            self.held.append((hold.table, hold.since, hold.events, end.lsn))
        if writer is None:
            return
        written = writer.close()
        rows = pa.Table.from_batches(self.journal.open(written.path).iter_batches())
        self.sealed.append(([int(one) for one in rows["pos"].to_numpy()], end.lsn))


def test_a_waiting_sink_gets_each_transaction_at_once(tmp_path: Path) -> None:
    """While a sink waits, a segment ends with each transaction."""
    recorder = Recorder(tmp_path, WHENEVER, wanted=True)

    recorder.cutter.accept(transaction(1, 2))
    recorder.cutter.accept(transaction(3))

    assert recorder.sealed == [([1, 2], 2), ([3], 3)]


def test_segments_that_are_waited_for_end_at_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They end `min_ms` after the last one: a transaction that comes alone waits for nothing, others for each other."""
    clock = SimpleNamespace(now=1.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(cutter_module, "time", clock)
    recorder = Recorder(tmp_path, SegmentLimits(min_ms=50, max_ms=1000), wanted=True)
    nothing_came = ChangeBatch(None, None)
    sealed = []
    for clock.now, batch in (
        (1.03, transaction(1)),
        (1.06, nothing_came),
        (7.00, transaction(2)),
        (7.02, transaction(3)),
        (7.04, transaction(4)),
        (7.06, transaction(5)),
        (7.09, transaction(6)),
        (7.12, nothing_came),
    ):
        recorder.cutter.accept(batch)
        sealed.append(len(recorder.sealed))

    assert sealed == [1, 1, 2, 2, 2, 3, 3, 4]
    assert [ids for ids, _ in recorder.sealed] == [[1], [2], [3, 4, 5], [6]]


def test_without_a_waiting_sink_transactions_gather(tmp_path: Path) -> None:
    """Nobody waits: transactions share a segment until it is cut."""
    recorder = Recorder(tmp_path, NEVER, wanted=False)

    recorder.cutter.accept(transaction(1))
    recorder.cutter.accept(transaction(2))
    recorder.cutter.cut()

    assert recorder.sealed == [([1, 2], 2)]


def test_a_full_segment_ends_without_waiting(tmp_path: Path) -> None:
    """`max_events` ends a segment although nobody waits and it is young."""
    limits = SegmentLimits(min_ms=100_000, max_ms=100_000, max_events=2)
    recorder = Recorder(tmp_path, limits, wanted=False)

    recorder.cutter.accept(transaction(1))
    recorder.cutter.accept(transaction(2))
    recorder.cutter.accept(transaction(3))
    recorder.cutter.abandon()

    assert recorder.sealed == [([1, 2], 2)]


def test_an_open_transaction_holds_back_nobody(tmp_path: Path) -> None:
    """What was committed before is cut while a later transaction is still open."""
    recorder = Recorder(tmp_path, NEVER, wanted=False)

    recorder.cutter.accept(transaction(1))
    recorder.cutter.accept(unfinished(2, 3))
    recorder.cutter.cut()

    assert recorder.sealed == [([1], 1)]


def test_stopping_inside_a_transaction_writes_none_of_it(tmp_path: Path) -> None:
    """Changes without their commit enter no segment and leave no file."""
    recorder = Recorder(tmp_path, NEVER, wanted=False)

    recorder.cutter.accept(unfinished(1, 2))
    recorder.cutter.cut()
    recorder.cutter.abandon()

    assert recorder.sealed == []
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_large_transaction_is_spilled_and_kept_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transaction beyond the memory bound becomes one segment of its own, cut at its commit."""
    monkeypatch.setattr(cutter_module, "SPILL_BYTES", 1)
    recorder = Recorder(tmp_path, WHENEVER, wanted=True)

    recorder.cutter.accept(transaction(1))
    for number in range(2, 7):
        recorder.cutter.accept(unfinished(number))
    assert recorder.sealed == [([1], 1)]
    recorder.cutter.accept(transaction(7))

    assert recorder.sealed == [([1], 1), ([2, 3, 4, 5, 6, 7], 7)]


def test_idle_progress_is_known_only_when_nothing_is_unwritten(tmp_path: Path) -> None:
    """`passed` is set by an idle log and forgotten as soon as a change arrives."""
    recorder = Recorder(tmp_path, NEVER, wanted=False)

    recorder.cutter.accept(passed(5))
    assert recorder.cutter.passed == LsnPosition(5)
    recorder.cutter.accept(unfinished(6))
    assert recorder.cutter.passed is None
    recorder.cutter.accept(NOTHING)

    assert recorder.cutter.passed is None


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=8),
    breaks=st.sets(st.integers(0, 30)),
    cuts=st.sets(st.integers(0, 30)),
    spill=st.booleans(),
)
def test_segments_hold_whole_transactions_in_order(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    breaks: set[int],
    cuts: set[int],
    spill: bool,
) -> None:
    """However batches are split and whenever someone cuts: all rows once, cut at commits only."""
    recorder = Recorder(tmp_path_factory.mktemp("j"), NEVER, wanted=False)
    before = cutter_module.SPILL_BYTES
    cutter_module.SPILL_BYTES = 1 if spill else before
    try:
        commits, number = [], 0
        for size in sizes:
            ids = list(range(number + 1, number + size + 1))
            number += size
            commits.append(number)
            for one in ids[:-1]:
                if one in breaks:
                    recorder.cutter.accept(unfinished(*ids[: ids.index(one) + 1]))
                    ids = ids[ids.index(one) + 1 :]
            recorder.cutter.accept(transaction(*ids))
            if number in cuts:
                recorder.cutter.cut()
        recorder.cutter.cut()
    finally:
        cutter_module.SPILL_BYTES = before

    assert [row for rows, _ in recorder.sealed for row in rows] == list(range(1, number + 1))
    assert all(end in commits and rows[-1] == end for rows, end in recorder.sealed)


def held(table: str, *data: bytes, end: int | None = None) -> ChangeBatch:
    """Return events that are to be kept back, and the end of their transaction if it is known."""
    events = tuple(ParkedEvent(table, "why", one) for one in data)
    return ChangeBatch(None, None if end is None else LsnPosition(end), parked=events)


def test_held_events_are_cut_with_the_segment_of_their_transaction(tmp_path: Path) -> None:
    """Their file and the segment end at one position; those of an open transaction wait."""
    recorder = Recorder(tmp_path, NEVER, wanted=False)

    recorder.cutter.accept(transaction(1))
    recorder.cutter.accept(held("a", b"1", b"2"))
    recorder.cutter.accept(transaction(2))
    recorder.cutter.accept(held("a", b"3"))
    assert recorder.cutter.in_transaction
    recorder.cutter.cut()
    assert recorder.sealed == [([1, 2], 2)]
    assert recorder.held == [("a", 1, [b"1", b"2"], 2)]

    recorder.cutter.accept(held("b", b"4", end=5))
    recorder.cutter.cut()
    assert recorder.sealed == [([1, 2], 2)]
    assert recorder.held[1:] == [("a", 2, [b"3"], 5), ("b", 2, [b"4"], 5)]
    recorder.cutter.accept(passed(6))
    assert recorder.cutter.passed == LsnPosition(6)


def test_while_only_held_events_come_they_are_cut_by_age_and_size(tmp_path: Path) -> None:
    """A sink that waits gets nothing from it; `max_bytes` bounds what is not yet durable."""
    limits = SegmentLimits(min_ms=0, max_ms=100_000, max_bytes=1000)
    recorder = Recorder(tmp_path, limits, wanted=True)

    recorder.cutter.accept(held("a", b"x" * 600, end=1))
    assert recorder.held == []
    recorder.cutter.accept(held("a", b"x" * 600, end=2))
    assert [one[3] for one in recorder.held] == [2]
