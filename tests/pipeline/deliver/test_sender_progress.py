"""What a sink has acknowledged: in memory, and in the store."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deltaforge_dagster.errors import LeaseLost
from deltaforge_dagster.pipeline.deliver.sender import SinkProgress
from tests.pipeline.deliver.scene import NAME, Recorder, Scene, batch, scene

__all__ = ["scene"]


def test_the_checkpoint_is_the_stored_one(scene: Scene) -> None:
    """Inside a segment and at its end, and whatever the sink keeps itself."""
    scene.capture(1, 5)
    scene.capture(6, 9)
    first, second = scene.store.segments.read(NAME)
    progress = SinkProgress(scene.context(), scene.checkpoint)

    for row, ordinal, exactly_once in (
        (first, 2, False),
        (first, 4, False),
        (second, 1, True),
        (second, 3, True),
    ):
        before = progress.reached(row)
        progress.arrived(batch(row, *range(before + 1, ordinal + 1)), ordinal + 1)
        complete = ordinal == row.rows - 1
        progress.advance(row, ordinal, Recorder(exactly_once=exactly_once), complete=complete)

        assert progress.reached(row) == ordinal
        stored = scene.checkpoint
        assert progress.checkpoint == replace(stored, updated_at=progress.checkpoint.updated_at)
    assert (progress.reached(first), progress.rows) == (-1, 9)


def test_what_the_own_position_of_a_sink_names(scene: Scene) -> None:
    """The last message that has arrived, although changes behind it were acknowledged that are not for the sink."""
    scene.capture(1, 5)
    (row,) = scene.store.segments.read(NAME)
    progress = SinkProgress(scene.context(), scene.checkpoint)

    progress.arrived(batch(row, 0, 1, 3), 3)
    progress.advance(row, 4, Recorder(exactly_once=True), complete=True)

    assert (scene.checkpoint.sent_segment, scene.checkpoint.sent_ordinal) == (1, 1)
    assert progress.rows == 2


def test_what_has_arrived_of_several_parts(scene: Scene) -> None:
    """Everything before the ordinal counts, in whichever part it is."""
    scene.capture(1, 6)
    (row,) = scene.store.segments.read(NAME)
    progress = SinkProgress(scene.context(), scene.checkpoint)
    given = replace(
        batch(row, 4, 5), earlier=(batch(row, 0, 1).messages, batch(row, 2, 3).messages)
    )

    progress.arrived(given, 3)
    progress.advance(row, 2, Recorder(exactly_once=True), complete=False)
    assert (scene.checkpoint.sent_ordinal, progress.rows) == (2, 3)

    progress.arrived(given, 6)
    progress.advance(row, 5, Recorder(exactly_once=True), complete=True)
    assert (scene.checkpoint.sent_ordinal, progress.rows) == (5, 9)


def test_nothing_moves_without_the_lease(scene: Scene) -> None:
    """The checkpoint in memory moves after the write."""
    scene.capture(1, 5)
    (row,) = scene.store.segments.read(NAME)
    progress = SinkProgress(scene.context(), scene.checkpoint)
    before = progress.checkpoint
    scene.lease.lost.set()

    with pytest.raises(LeaseLost):
        progress.advance(row, 4, Recorder(), complete=True)

    assert progress.checkpoint == before == scene.checkpoint
