"""The connection of a deliverer to its sink.

It is opened when something is to be sent, and closed after each failure.
"""

from __future__ import annotations

from collections.abc import Callable

from deltaforge_dagster.pipeline.deliver.resumption import Resumption
from deltaforge_dagster.pipeline.delivery import DeliveryContext
from deltaforge_dagster.sinks.base import Sink, Traffic, traffic_of
from deltaforge_dagster.state.records import CheckpointRow


class SinkConnection:
    """Opens and closes the sink of a deliverer.

    Args:
        context: The sink.
        build_sink: Makes the sink.
        resumption: Determines where the sink resumes after it was opened.

    Attributes:
        connected: Whether the sink is open and its own position was read.
        settled: Whether the checkpoint was compared with what the sink holds since it was opened.
    """

    def __init__(
        self, context: DeliveryContext, build_sink: Callable[[], Sink], resumption: Resumption
    ) -> None:
        self.connected = False
        self.settled = False
        self._lease = context.run.lease
        self._meter = context.meter
        self._build_sink = build_sink
        self._resumption = resumption
        self._sink: Sink | None = None

    @property
    def traffic(self) -> Traffic | None:
        """What the sink's client library has done, if it counts that."""
        return None if self._sink is None else traffic_of(self._sink)

    def open(self, checkpoint: CheckpointRow) -> Sink:
        """Return the open sink; if it was closed, open it and read the position that it keeps."""
        # One object for the whole run: a sink may remember its last connection, to end it.
        if self._sink is None:
            self._sink = self._build_sink()
        if not self.connected:
            # Opening may cut off another sender, which must not be the run that succeeds this one.
            self._lease.guard()
            self._sink.open()
            self._meter.opened()
            self._resumption.begin(self._sink, checkpoint)
            self.connected = True
        return self._sink

    def settle(self, checkpoint: CheckpointRow) -> CheckpointRow | None:
        """Open the sink; return the checkpoint to resume after.

        Return None while more must be captured first.
        """
        resumed = self._resumption.settle(self.open(checkpoint), checkpoint)
        self.settled = resumed is not None
        return resumed

    def close(self) -> None:
        """Close the sink; the next `open` connects again."""
        self.connected = self.settled = False
        self.interrupt()

    def interrupt(self) -> None:
        """Close the sink while another thread may be using it, which ends a send that hangs."""
        if self._sink is not None:
            self._sink.close()
