"""A batch on its way to NATS, and how far a sink has come with it: what outlives a connection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from deltaforge_dagster.sinks.base import SinkBatch


@dataclass(frozen=True, slots=True)
class Terms:
    """What a sink's sessions have in common.

    Attributes:
        suffix: Ends the ids of the sink's messages.
        pattern: Every subject the sink sends to fits it.
        stream: The stream that takes them; None for core NATS.
        exactly_once: Whether the sink keeps its position.
        batch_timeout: Seconds for one block, from its first byte to its acknowledgement.
    """

    suffix: str
    pattern: str
    stream: str | None
    exactly_once: bool
    batch_timeout: float


@dataclass(slots=True)
class Pass:
    """How far a sink has sent, to know which messages a stream may rightly have already.

    A stream drops a message that it has already, which is right when the sink did not hear of it the
    first time. It is wrong when the message stands before others that were stored since then: after a
    reset or a restored source position the log is sent anew, and dropping its newest part, which
    the stream remembers, would leave older values behind newer ones. Such a message is stored again,
    under another id.

    Attributes:
        sent: Segment and ordinal of the last message that was sent.
        acknowledged: The same of the last one acknowledged.
        fresh: Nothing was stored yet, so that what a run before this one has sent may be there.
        anew: It has begun anew with what is sent next.
        again: Ends the ids of messages that are stored again; empty as long as none was.
    """

    sent: tuple[int, int] = (-1, -1)
    acknowledged: tuple[int, int] = (-1, -1)
    fresh: bool = True
    anew: bool = False
    again: str = ""

    def begin(self, batch: SinkBatch) -> None:
        """Take note that a batch is to be sent; one from before the last one begins anew."""
        ordinal = cast("int", batch.messages.column("ordinal")[0].as_py())
        if (batch.segment, ordinal) <= self.acknowledged:
            self.sent = self.acknowledged = (batch.segment, ordinal - 1)
            self.fresh = False
            self.anew = True


@dataclass(slots=True)
class Task:
    """A batch on its way.

    Attributes:
        batch: The batch.
        passing: The pass it belongs to.
        row: The first one that is not known to have arrived.
        uncertain: Messages from there on may have arrived.
    """

    batch: SinkBatch
    passing: Pass
    row: int = 0
    uncertain: bool = False

    @property
    def done(self) -> bool:
        """Whether everything has arrived."""
        return self.row >= self.batch.messages.num_rows

    def ordinal(self, row: int) -> int:
        """Return the ordinal of a row."""
        return cast("int", self.batch.messages.column("ordinal")[row].as_py())
