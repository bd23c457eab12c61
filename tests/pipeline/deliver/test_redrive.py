"""Dead letters are delivered again; what is refused again stays."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pyarrow as pa
import pytest

from deltaforge_dagster.errors import SinkUnavailable, Undeliverable
from deltaforge_dagster.pipeline.deliver import redrive
from deltaforge_dagster.pipeline.deliver.dead_letters import DeadLetterWriter
from deltaforge_dagster.pipeline.deliver.redrive import Redriver
from deltaforge_dagster.pipeline.deliver.resumption import Resumption
from deltaforge_dagster.pipeline.encode.encoder import AT_HAND, Encoder
from tests.pipeline.deliver.scene import NAME, SINK, Encoded, Recorder, Scene, scene

__all__ = ["scene"]


class Preparing:
    """Stands for the encoder."""

    def encode_rows(self, rows: pa.Table) -> Encoded:
        """Return a message for each row."""
        return Encoded([replace(AT_HAND, rows=rows.num_rows)])


@pytest.fixture
def redriver(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Redriver:
    """What delivers three dead letters again, once somebody asks for it."""
    monkeypatch.setattr(redrive, "LOOK_SECONDS", 0.0)
    scene.capture(1, 5)
    (row,) = scene.store.segments.read(NAME)
    context = scene.context()
    writer = DeadLetterWriter(context)
    for ordinal in (1, 2, 4):
        writer.refuse(row, Undeliverable("too large", ordinal, "too_large"))
    scene.acknowledge(1, 4, complete=True)
    return Redriver(context, cast("Encoder", Preparing()), Resumption(context))


def test_nothing_is_due_before_somebody_asks(scene: Scene, redriver: Redriver) -> None:
    """Then what was asked for is delivered and gone, in order."""
    assert not redriver.due(scene.checkpoint)
    entries = scene.store.dead_letters.places(NAME, SINK)
    scene.store.dead_letters.redrive(NAME, seqs=[entries[0].seq, entries[2].seq])
    sink = Recorder()

    assert redriver.due(scene.checkpoint)
    _, messages = redriver.deliver(sink, scene.checkpoint)

    assert (messages, [ordinal for _, ordinal in sink.sent]) == (2, [0, 1])
    assert [one.ordinal for one in scene.store.dead_letters.places(NAME, SINK)] == [2]
    assert not redriver.due(scene.checkpoint)


def test_what_is_refused_again_stays(scene: Scene, redriver: Redriver) -> None:
    """Those before it are gone, those behind it stay due, and it waits for a person again."""
    scene.store.dead_letters.redrive(NAME)
    sink = Recorder(refused={(AT_HAND.segment, 1)})

    redriver.deliver(sink, scene.checkpoint)

    second, third = scene.store.dead_letters.places(NAME, SINK)
    assert (second.ordinal, second.state, third.state) == (2, "dead", "redrive")
    assert redriver.due(scene.checkpoint)


def test_a_sink_that_fails_gets_them_again(scene: Scene, redriver: Redriver) -> None:
    """Nothing of the queue is lost."""
    scene.store.dead_letters.redrive(NAME)

    with pytest.raises(SinkUnavailable):
        redriver.deliver(Recorder(errors=[SinkUnavailable("cut")]), scene.checkpoint)

    assert len(scene.store.dead_letters.places(NAME, SINK)) == 3
    assert redriver.due(scene.checkpoint)
