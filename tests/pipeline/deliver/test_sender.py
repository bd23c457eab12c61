"""What of a segment is sent, where the checkpoint stands afterwards, and the time limit of a batch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest

from deltaforge_dagster.errors import (
    DeltaforgeError,
    LeaseLost,
    SinkOverdue,
    SinkUnavailable,
    Undeliverable,
)
from deltaforge_dagster.pipeline.deliver.resumption import Resumption
from deltaforge_dagster.pipeline.deliver.sender import (
    Deadline,
    SegmentSender,
    SinkConnection,
    SinkProgress,
)
from deltaforge_dagster.pipeline.encode.segments import EncodedSegments
from deltaforge_dagster.sinks.base import SendGuard, SinkBatch, SinkPosition
from tests.pipeline.deliver.scene import NAME, SINK, Encoded, Recorder, Scene, place, scene


class Hanging:
    """A sink that only `close` ends, of which nothing but that is used."""

    exactly_once = False
    takes_parts = False

    def __init__(self) -> None:
        self.closed = threading.Event()

    def hang(self, error: DeltaforgeError | None) -> None:
        """Wait for the end; then fail, or not."""
        assert self.closed.wait(120)
        if error is not None:
            raise error

    def open(self) -> None:
        """Do nothing."""

    def position(self) -> SinkPosition | None:
        """Return None."""
        return None

    def send(self, batch: SinkBatch, guard: SendGuard) -> int:
        """Do nothing."""
        raise AssertionError(batch, guard)

    def close(self) -> None:
        """End a hang."""
        self.closed.set()


def test_a_sink_that_hangs_is_closed() -> None:
    """Its own error becomes that of the deadline, which can pass; it is counted."""
    sink, deadline = Hanging(), Deadline("redis", 0.05)

    with pytest.raises(SinkOverdue, match=r"redis: took longer than 0\.05 s"), deadline.over(sink):
        sink.hang(SinkUnavailable("closed"))

    assert (deadline.missed, SinkOverdue.kind) == (1, "backpressure")


def test_what_was_in_time_is_left_alone() -> None:
    """Errors stay what they are, and nothing is closed afterwards."""
    sink, deadline = Hanging(), Deadline("redis", 300)
    before = timers()

    with pytest.raises(SinkUnavailable, match="no route"), deadline.over(sink):
        raise SinkUnavailable("no route")
    with deadline.over(sink):
        pass

    for timer in timers() - before:
        timer.join(60)
    assert timers() <= before
    assert not sink.closed.is_set()
    assert deadline.missed == 0


def test_what_arrived_in_the_last_moment_counts() -> None:
    """An acknowledgement that came with the deadline is one; a lost lease stays one."""
    sink, deadline = Hanging(), Deadline("redis", 0.05)

    with deadline.over(sink):
        sink.hang(None)
    sink.closed.clear()
    with pytest.raises(LeaseLost), deadline.over(sink):
        sink.hang(LeaseLost("gone"))

    assert deadline.missed == 0


def test_no_limit() -> None:
    """Without one no thread is begun."""
    before = timers()

    with Deadline("redis", None).over(Hanging()):
        assert timers() <= before


def timers() -> set[threading.Timer]:
    """Return what may still close a sink."""
    return {one for one in threading.enumerate() if isinstance(one, threading.Timer)}


__all__ = ["scene"]

EVENTS = 10


class Sending:
    """A sender of the first segment of a scene, which has `EVENTS` rows; a checkpoint is due after four.

    Attributes:
        progress: What the sink has acknowledged.
    """

    def __init__(
        self, scene: Scene, sink: Recorder, stopped: Callable[[], bool] = lambda: False
    ) -> None:
        context = scene.context()
        resumption = Resumption(context)
        self._scene = scene
        self.told: list[str] = []
        self.progress = SinkProgress(context, scene.checkpoint)
        connection = SinkConnection(context, lambda: sink, resumption)
        self._sender = SegmentSender(context, connection, self.progress, resumption, stopped)

    def send(self) -> bool:
        """Send the rest of the segment."""
        if not (rows := self._scene.store.segments.read(NAME)):
            self._scene.capture(1, EVENTS)
            rows = self._scene.store.segments.read(NAME)
        encoded = Encoded(rows)
        try:
            return self._sender.send(cast("EncodedSegments", encoded), rows[0])
        finally:
            self.told += encoded.told
            assert place(self.progress.checkpoint) == place(self._scene.checkpoint)


def ordinals(*numbers: int) -> list[tuple[int, int]]:
    """Return rows of the first segment."""
    return [(1, number) for number in numbers]


def test_a_whole_segment(scene: Scene) -> None:
    """All of it, in order, and out of memory once it is sent; then the checkpoint is complete."""
    sink = Recorder()
    sending = Sending(scene, sink)

    assert sending.send()

    assert sink.sent == ordinals(*range(EVENTS))
    assert len(sending.told) == len(sink.parts)
    assert place(scene.checkpoint) == (1, EVENTS - 1, True)


def test_a_stop_in_the_middle(scene: Scene) -> None:
    """What was acknowledged is in the checkpoint; the next run sends the rest, and nothing twice."""
    sink = Recorder()

    assert not Sending(scene, sink, lambda: len(sink.sent) > 3).send()
    assert place(scene.checkpoint) == (1, len(sink.sent) - 1, False)
    assert Sending(scene, sink).send()

    assert sink.sent == ordinals(*range(EVENTS))


def test_a_failure_in_the_middle(scene: Scene) -> None:
    """Sent again is what the checkpoint does not cover."""
    sink = Recorder()
    sending = Sending(scene, sink)
    sink.errors = [SinkUnavailable("cut")]

    with pytest.raises(SinkUnavailable):
        sending.send()
    assert (sink.sent, place(scene.checkpoint)) == ([], (0, -1, True))
    assert sending.send()

    assert sink.sent == ordinals(*range(EVENTS))


def test_a_sink_that_takes_parts(scene: Scene) -> None:
    """It gets encoded batches, of three messages, as they are; what one refuses is named in any part."""
    sink = Recorder(takes_parts=True, refused=set(ordinals(6)))
    sending = Sending(scene, sink)

    assert sending.send()

    assert sink.parts[0] == [3, 1]
    assert [sum(parts) for parts in sink.parts] == [4, 4, 3]
    assert sink.sent == ordinals(*(one for one in range(EVENTS) if one != 6))
    assert sending.progress.rows == EVENTS - 1
    assert place(scene.checkpoint) == (1, EVENTS - 1, True)


class Halting(Recorder):
    """Fails behind some messages of a batch, and says so."""

    def send(self, batch: SinkBatch, guard: SendGuard) -> int:
        """Take two messages."""
        error = SinkUnavailable("slow down")
        error.acknowledged = super().send(replace(batch, messages=batch.messages[:2]), guard)
        raise error


def test_a_failure_behind_a_part_of_a_batch(scene: Scene) -> None:
    """What the error says was acknowledged is in the checkpoint: each attempt goes on, and nothing is sent twice."""
    sink = Halting()
    sending = Sending(scene, sink)

    for attempt in range(1, 6):
        with pytest.raises(SinkUnavailable):
            sending.send()
        assert sending.progress.rows == 2 * attempt
        assert place(scene.checkpoint) == (1, 2 * attempt - 1, False)

    assert sink.sent == ordinals(*range(EVENTS))


def test_a_change_that_can_never_be_delivered(scene: Scene) -> None:
    """It is a dead letter before anything after it is sent; what arrived before it counts."""
    sink = Recorder(refused=set(ordinals(5)))
    sending = Sending(scene, sink)

    assert sending.send()

    assert sending.progress.rows == EVENTS - 1
    assert sink.sent == ordinals(*(one for one in range(EVENTS) if one != 5))
    (entry,) = scene.store.dead_letters.places(NAME, SINK)
    assert (entry.segment, entry.ordinal, entry.state) == (1, 5, "dead")
    assert place(scene.checkpoint) == (1, EVENTS - 1, True)


def test_what_a_destination_says_is_in_the_dead_letter_only(scene: Scene) -> None:
    """It may quote values of the row, so the log and status do not have it."""
    sink = Recorder(refused=set(ordinals(5)), detail="; it said: no bob")

    assert Sending(scene, sink).send()

    (entry,) = scene.store.dead_letters.read(NAME)
    assert entry.error_message == "too large; it said: no bob"
    assert "bob" not in "".join(scene.warnings)
    assert len(scene.warnings) == 1


def test_without_a_queue_it_stops_the_sink(scene: Scene) -> None:
    """The checkpoint stands right before it."""
    spec = scene.spec.spec
    queue = spec.journal.model_copy(update={"enabled": False})
    scene.spec = scene.spec.model_copy(update={"spec": spec.model_copy(update={"journal": queue})})
    sink = Recorder(refused=set(ordinals(5)))

    with pytest.raises(Undeliverable, match=r"set spec\.journal\.enabled: true"):
        Sending(scene, sink).send()

    assert sink.sent == ordinals(*range(5))
    assert place(scene.checkpoint) == (1, 4, False)


def test_nothing_is_sent_without_the_lease(scene: Scene) -> None:
    """The guard stands before each batch."""
    sink = Recorder()

    def lose() -> bool:
        if len(sink.sent) > 3:
            scene.lease.lost.set()
        return False

    with pytest.raises(LeaseLost):
        Sending(scene, sink, lose).send()

    assert len(sink.sent) == 4
    assert place(scene.checkpoint) == (1, 3, False)
