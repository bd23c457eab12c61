"""A batch on its way to NATS and the progress of its delivery, which outlive a connection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from deltaforge_dagster.sinks.base import SinkBatch


@dataclass(frozen=True, slots=True)
class Terms:
    """Settings shared by all sessions of a sink.

    Attributes:
        suffix: Suffix of the sink's message ids.
        pattern: Matches every subject to which the sink sends.
        stream: The stream that captures these subjects; None for core NATS.
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
    """How far a sink has sent, to decide which messages a stream may drop as duplicates.

    A stream drops a message whose id it already has. That is right if the sink missed the
    acknowledgement of the first attempt. It is wrong if other messages were stored after that
    message: after a reset or a restored source position the log is sent again, and if the stream
    dropped its newest part as duplicates, older values would remain behind newer ones. Such a
    message is stored again under another id.

    Attributes:
        sent: Segment and ordinal of the last message that was sent.
        acknowledged: Segment and ordinal of the last message that was acknowledged.
        fresh: Whether nothing was stored yet, so that messages of an earlier run may be duplicates.
        restarted: Whether the pass starts over, so that the next message must begin a new chain.
        again: Suffix for the ids of messages that are stored again; empty until one is.
    """

    sent: tuple[int, int] = (-1, -1)
    acknowledged: tuple[int, int] = (-1, -1)
    fresh: bool = True
    restarted: bool = False
    again: str = ""

    def begin(self, batch: SinkBatch) -> None:
        """Register the next batch; if it was acknowledged before, the pass starts over."""
        ordinal = cast("int", batch.messages.column("ordinal")[0].as_py())
        if (batch.segment, ordinal) <= self.acknowledged:
            self.sent = self.acknowledged = (batch.segment, ordinal - 1)
            self.fresh = False
            self.restarted = True


@dataclass(slots=True)
class Task:
    """A batch on its way.

    Attributes:
        batch: The batch.
        passing: The pass to which it belongs.
        row: The first row that is not known to have arrived.
        uncertain: Whether messages from that row may have arrived.
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

    def place(self, row: int) -> tuple[int, int]:
        """Return the segment and the ordinal of a row."""
        return self.batch.segment, self.ordinal(row)
