"""The segment committer: what is durable when one of its steps fails."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from deltaforge_dagster.errors import JournalDamaged, StoreUnavailable
from deltaforge_dagster.pipeline.backoff import Backoff
from deltaforge_dagster.pipeline.capture import capture as capture_module
from deltaforge_dagster.pipeline.capture.committer import SegmentCommitter
from deltaforge_dagster.pipeline.capture.holds import Holds
from deltaforge_dagster.pipeline.run_context import LeasedRun
from deltaforge_dagster.sources.base import ParkedEvent
from deltaforge_dagster.sources.postgres.position import LsnPosition
from deltaforge_dagster.state.records import RangeRow
from tests.pipeline.capture.conftest import Stage
from tests.pipeline.changes import PlayedSource, eventually, frame, transaction


def test_an_outage_while_a_range_is_closed_repeats_no_segment(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The segment's row is committed: capture reads on after it, and the range is closed later."""
    monkeypatch.setattr(capture_module, "Backoff", lambda: Backoff(initial=0.01))
    read = stage.store.ranges.get
    outages = [StoreUnavailable("gone for a moment")]

    def get(name: str, number: int) -> RangeRow | None:
        if outages:
            raise outages.pop()
        return read(name, number)

    monkeypatch.setattr(stage.store.ranges, "get", get)
    capture = stage.capture(PlayedSource([transaction(1, 2, 3, 4), transaction(5)]))
    eventually(lambda: capture.rows == 5 or capture.failed)
    capture.stop()

    assert capture.error is None
    assert stage.journaled() == [1, 2, 3, 4, 5]
    assert stage.store.ranges.read("p")[0].state == "closed"


def test_a_held_file_that_cannot_be_written_leaves_no_segment_file(
    stage: Stage, tmp_path: Path
) -> None:
    """What no transaction will name is removed at once, and nothing is committed."""
    run = LeasedRun(stage.store, stage.journal, stage.lease, warn=lambda _: None)
    row = stage.store.pipelines.get("p")
    assert row is not None
    committer = SegmentCommitter(
        run, row, "source", stage.ranges, watch=lambda _: None, captured=stage.captured.append
    )
    writer = committer.open_writer()
    writer.write(frame([1]))
    event = ParkedEvent("shop.orders", "nobody can decode it", b"event")
    hold = Holds(stage.store, stage.journal, stage.lease).open(event, LsnPosition(0))
    hold.write(event)
    shutil.rmtree(tmp_path / "journal" / "p" / "held")

    with pytest.raises(JournalDamaged, match="is missing"):
        committer.seal(writer, [hold], LsnPosition(1), received_at=0.0, trigger="limits")

    assert list((tmp_path / "journal").rglob("*.parquet")) == []
    assert committer.position == LsnPosition(0)
    assert stage.store.segments.read("p") == []
    assert stage.captured == []
