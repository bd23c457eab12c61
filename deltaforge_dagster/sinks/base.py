"""The seam between a deliverer and a destination: what every sink promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

SendGuard = Callable[[], None]
"""Called before anything leaves the process; raises `LeaseLost` when the run must stop sending."""

_FIELDS: list[pa.Field[Any]] = [
    pa.field("ordinal", pa.int64(), nullable=False),
    pa.field("destination", pa.string(), nullable=False),
    pa.field("key", pa.string()),
    pa.field("value", pa.string(), nullable=False),
    pa.field("event_id", pa.string(), nullable=False),
    pa.field("idempotency_key", pa.string(), nullable=False),
    pa.field("headers", pa.string()),
]

MESSAGES = pa.schema(_FIELDS)
"""Columns of `SinkBatch.messages`: what one sink sends, one row per message, in order.

`value` is the finished envelope, `headers` a JSON object as text or null, `key` the resolved
message key or null.
"""


@dataclass(frozen=True, slots=True)
class SinkBatch:
    """Consecutive messages of one segment for one sink.

    Attributes:
        segment: Number of the segment.
        segment_id: The segment's random id, part of a sink's own position.
        messages: Columns of `MESSAGES`; ordinals increase, gaps are events filtered out.
        replay: Run id of a replay, which marks every message; None for live delivery.
    """

    segment: int
    segment_id: str
    messages: pa.RecordBatch
    replay: str | None = None


@dataclass(frozen=True, slots=True)
class SinkPosition:
    """What a sink itself says has arrived, stored there in the same atomic step as the data."""

    pipeline_uid: str
    segment: int
    segment_id: str
    ordinal: int
    source_position: str


class Sink(Protocol):
    """One destination. Methods raise errors of the one tree; used by one thread at a time."""

    def open(self) -> None:
        """Connect and check what can be checked; may be called again after `close`.

        Raises:
            SinkUnavailable: Not reachable now.
            AuthFailed: Credentials refused.
        """
        ...

    def position(self) -> SinkPosition | None:
        """Return what the sink says has arrived, None when it keeps no position."""
        ...

    def send(self, batch: SinkBatch, guard: SendGuard) -> int:
        """Deliver the whole batch in order and return its last ordinal, once acknowledged.

        On an error an unknown prefix of the batch may have arrived, and nothing after that
        prefix: sending the batch again may repeat messages but never reorders a key.
        """
        ...

    def close(self) -> None:
        """Release connections; nothing is sent afterwards. Safe to call twice, from any thread."""
        ...
