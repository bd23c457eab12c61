"""The thread of a sink: what it does next, what ends it, and what it survives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import cast

import pytest

from deltaforge_dagster.errors import SinkUnavailable
from deltaforge_dagster.pipeline.deliver.deliverer import Deliverer
from deltaforge_dagster.pipeline.deliver.messages import MessageDelivery
from deltaforge_dagster.pipeline.encode.cache import EncodeCache
from deltaforge_dagster.pipeline.encode.encoder import Encoder
from deltaforge_dagster.sinks.base import SendGuard, SinkBatch
from tests.pipeline.changes import eventually
from tests.pipeline.deliver.scene import Lender, Recorder, Scene, place, scene

__all__ = ["scene"]

Begin = Callable[..., Deliverer]


class Hanging(Recorder):
    """A sink whose `send` only ends with `close`."""

    def __init__(self) -> None:
        super().__init__()
        self.hangs, self.over = threading.Event(), threading.Event()

    def send(self, batch: SinkBatch, guard: SendGuard) -> int:
        """Hang."""
        self.hangs.set()
        assert self.over.wait(60)
        raise SinkUnavailable("closed")

    def close(self) -> None:
        """End a hang."""
        self.over.set()


class Away(Recorder):
    """A sink that cannot be opened."""

    def open(self) -> None:
        """Fail."""
        raise SinkUnavailable("away")


@pytest.fixture
def begin(scene: Scene) -> Iterator[Begin]:
    """Begin the deliverer of a sink."""
    begun: list[Deliverer] = []

    def begin(sink: Recorder, until: int | None = None) -> Deliverer:
        context, checkpoint = scene.context(), scene.checkpoint
        deliverer = Deliverer(
            context,
            checkpoint,
            lambda thread: MessageDelivery(
                context,
                checkpoint,
                thread,
                build_sink=lambda: sink,
                encoder=cast("Encoder", None),
                encode_cache=cast("EncodeCache", Lender(scene.store, until)),
                until=until,
            ),
        )
        begun.append(deliverer)
        return deliverer

    yield begin
    for one in begun:
        one.request_stop()
        one.join(60)


def test_it_delivers_what_is_there_and_what_comes(scene: Scene, begin: Begin) -> None:
    """Then it waits, and a stop closes the sink."""
    scene.capture(1, 5)
    scene.capture(6, 7)
    sink = Recorder()
    deliverer = begin(sink)
    eventually(lambda: deliverer.waiting)
    scene.capture(8, 9)
    deliverer.segment_added()
    eventually(lambda: len(sink.sent) == 9)
    deliverer.request_stop()
    deliverer.join(60)

    assert sink.sent == [*((1, one) for one in range(5)), (2, 0), (2, 1), (3, 0), (3, 1)]
    assert place(scene.checkpoint) == (3, 1, True)
    assert (deliverer.alive, sink.opened, sink.closed) == (False, 1, 1)
    assert (deliverer.delivery.progress.rows, deliverer.retries.error) == (9, None)


def test_a_sink_is_opened_before_there_is_anything_for_it(scene: Scene, begin: Begin) -> None:
    """While the source is being read: what it brings first can be sent at once."""
    sink = Recorder()
    deliverer = begin(sink)
    eventually(lambda: sink.opened)
    scene.capture(1, 5)
    deliverer.segment_added()
    eventually(lambda: len(sink.sent) == 5)

    assert (sink.opened, sink.closed) == (1, 0)


def test_a_sink_that_cannot_be_opened_fails_once_something_is_for_it(
    scene: Scene, begin: Begin
) -> None:
    """Until then one attempt is made, of which nobody hears."""
    sink = Away()
    deliverer = begin(sink)
    eventually(lambda: sink.closed)
    assert (deliverer.retries.error, scene.checkpoint.failures) == (None, 0)

    scene.capture(1, 5)
    deliverer.segment_added()
    eventually(lambda: scene.checkpoint.failures)

    assert scene.checkpoint.last_error == "away"


def test_nothing_after_the_last_segment(scene: Scene, begin: Begin) -> None:
    """`until` is delivered, and no more."""
    scene.capture(1, 5)
    scene.capture(6, 7)
    sink = Recorder()
    deliverer = begin(sink, until=1)
    eventually(lambda: deliverer.waiting)

    assert place(scene.checkpoint) == (1, 4, True)
    assert len(sink.sent) == 5


def test_a_sink_that_fails_is_opened_again(scene: Scene, begin: Begin) -> None:
    """Whatever it is, a defect included: the same rows come again, in order, and the error goes."""
    scene.capture(1, 5)
    sink = Recorder(errors=[SinkUnavailable("cut"), SinkUnavailable("cut")])
    deliverer = begin(sink)
    eventually(lambda: deliverer.waiting)

    assert sink.sent == [(1, one) for one in range(5)]
    assert (sink.opened, sink.closed, deliverer.retries.error) == (3, 2, None)
    assert (scene.checkpoint.failures, scene.checkpoint.last_error) == (0, None)


def test_a_defect_is_a_failure_of_the_sink(scene: Scene, begin: Begin) -> None:
    """The thread lives on and waits; a stop ends the wait."""
    scene.capture(1, 5)
    deliverer = begin(Recorder(errors=[ZeroDivisionError("oops")]))
    eventually(lambda: scene.checkpoint.failures)

    assert "delivery broke: ZeroDivisionError('oops')" in str(deliverer.retries.error)
    assert deliverer.delivery.stuck(None)
    assert deliverer.alive


def test_a_sink_that_hangs_is_closed(scene: Scene, begin: Begin) -> None:
    """`join` waits as long as it is told to; what the close raises is no failure of the sink."""
    scene.capture(1, 5)
    sink = Hanging()
    deliverer = begin(sink)
    assert sink.hangs.wait(60)
    deliverer.request_stop()
    deliverer.join(0)
    eventually(lambda: not deliverer.alive)

    assert (scene.checkpoint.failures, deliverer.retries.error) == (0, None)


def test_a_lost_lease_ends_it(scene: Scene, begin: Begin) -> None:
    """Quietly, with nothing sent."""
    scene.capture(1, 5)
    scene.lease.lost.set()
    sink = Recorder()
    deliverer = begin(sink)
    eventually(lambda: not deliverer.alive)

    assert (sink.opened, deliverer.retries.error) == (0, None)
