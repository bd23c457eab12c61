"""When a deliverer opens its sink, and when it asks what the sink holds."""

from __future__ import annotations

import pytest

from deltaforge_dagster.errors import LeaseLost, SinkRejected
from deltaforge_dagster.pipeline.deliver.resumption import Resumption
from deltaforge_dagster.pipeline.deliver.sender import SinkConnection
from deltaforge_dagster.sinks.base import Sink, SinkPosition
from tests.pipeline.deliver.scene import Recorder, Scene, scene

__all__ = ["scene"]


class Garbled(Recorder):
    """A sink that holds no position where one should be."""

    def position(self) -> SinkPosition | None:
        """Refuse."""
        raise SinkRejected("garbage")


def connect(scene: Scene, sink: Sink) -> tuple[SinkConnection, list[Sink]]:
    """Return a connection, and what it has made."""
    made: list[Sink] = []

    def build() -> Sink:
        made.append(sink)
        return sink

    context = scene.context()
    return SinkConnection(context, build, Resumption(context)), made


def test_one_sink_for_a_run(scene: Scene) -> None:
    """It is opened when it is needed, and again after it was closed, but made once."""
    sink = Recorder()
    connection, made = connect(scene, sink)
    assert connection.traffic is None
    connection.close()
    assert made == []

    for number in (1, 2):
        assert not connection.connected
        assert connection.settle(scene.checkpoint) == scene.checkpoint
        assert connection.open(scene.checkpoint) is sink
        assert (connection.connected, connection.settled, sink.opened) == (True, True, number)
        connection.close()
        assert (connection.settled, sink.closed) == (False, number)
    assert made == [sink]


def test_who_has_lost_the_lease_opens_nothing(scene: Scene) -> None:
    """To open a sink may end the sender that was there before, which is the successor then."""
    sink = Recorder()
    connection, _ = connect(scene, sink)
    scene.lease.lost.set()

    with pytest.raises(LeaseLost):
        connection.open(scene.checkpoint)

    assert sink.opened == 0


def test_who_does_not_say_what_it_holds_is_not_connected(scene: Scene) -> None:
    """The next attempt opens and asks again."""
    sink = Garbled(exactly_once=True)
    connection, _ = connect(scene, sink)

    for number in (1, 2):
        with pytest.raises(SinkRejected):
            connection.open(scene.checkpoint)
        assert (connection.connected, sink.opened) == (False, number)
    connection.interrupt()
    assert sink.closed == 1
