"""The seam between a deliverer and a destination: what every sink promises.

Every sink delivers at least once. One whose `exactly_once` is true also keeps its own position: with
each atomic step it stores, beside the messages, a `SinkPosition` that says which message was
the last. Whoever opens the sink next reads it and knows what has arrived, whatever became of the
acknowledgement. Such a position never stands alone: `pipeline.resume` compares it with the
checkpoint and decides which of the two counts.

A sink that keeps its position also finds out, before it stores anything, that the position is no
longer the one that it read or stored last: another sender is at work, or the destination has
lost data. Then it raises `PositionMoved` and stores nothing; the deliverer opens it again, reads the
position and decides anew.

One change may become several messages: an update that changes a key a delete and an insert, a delete
a tombstone, too. These have the ordinal of their change and stand next to one another, and they
belong together: a batch never begins or ends between them, and a sink acknowledges nothing and stores
no position between them. Whoever cuts a batch into parts asks `whole_ordinals` where.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, cast

import numpy as np
import orjson
import pyarrow as pa

from deltaforge_dagster.errors import SinkRejected, Undeliverable

SendGuard = Callable[[], None]
"""Called before anything leaves the process; raises `LeaseLost` when the run must stop sending."""

_FIELDS: list[pa.Field[Any]] = [
    pa.field("ordinal", pa.int64(), nullable=False),
    pa.field("destination", pa.string(), nullable=False),
    pa.field("key", pa.string()),
    pa.field("value", pa.string()),
    pa.field("event_id", pa.string(), nullable=False),
    pa.field("idempotency_key", pa.string(), nullable=False),
    pa.field("headers", pa.string()),
    pa.field("change_id", pa.string()),
]

MESSAGES = pa.schema(_FIELDS)
"""Columns of `SinkBatch.messages`: what one sink sends, one row per message, in order.

`value` is the finished envelope, or null for a tombstone, which only Kafka sinks are given.
`headers` is a JSON object as text or null, `key` the resolved message key or null. `event_id` and
`idempotency_key` are the message's own; `change_id` is the event id of its change in the journal, or
null where that is the same.
"""


_NUMBERS = {"segment": int, "ordinal": int}
_NO_POSITION = "what is stored there is not a position of deltaforge"


@dataclass(frozen=True, slots=True)
class SinkPosition:
    """What a sink itself says has arrived, stored there in the same atomic step as the data.

    Attributes:
        uid: Of the pipeline, new whenever its journal starts afresh.
        lineage: Of the checkpoint under which this was sent; a position of another lineage does
            not count (`state.records.CheckpointRow`).
        segment: Number of the segment of the last message.
        segment_id: Random id of that segment: a number may mean another one in another store.
        ordinal: Of the last message in that segment.
        event_id: Of the last message's change; finds it again in whatever segments hold it by then.
        start: Everything up to this position has arrived, JSON text (`positions`): where that
            segment starts, or where it ends when the message is its last one.
        end: The last message lies before this position, JSON text: where that segment ends.
        source: Id of the pipeline's source, as the pipeline file has it.
        redriven: Token of the dead letter that was delivered last since that message, else empty.
    """

    uid: str
    lineage: str
    segment: int
    segment_id: str
    ordinal: int
    event_id: str
    start: str
    end: str
    source: str
    redriven: str = ""

    def to_json(self) -> str:
        """Return the text that a sink stores: one JSON object of these fields."""
        return orjson.dumps(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Return the position that `to_json` wrote; fields added since then are passed over.

        Raises:
            SinkRejected: The text is none.
        """
        try:
            fields = orjson.loads(text)
            values = {name: fields[name] for name in cls.__slots__ if name != "redriven"}
            values["redriven"] = fields.get("redriven", "")
        except (ValueError, KeyError, TypeError) as error:
            raise SinkRejected(_NO_POSITION) from error
        if any(type(one) is not _NUMBERS.get(name, str) for name, one in values.items()):
            raise SinkRejected(_NO_POSITION)
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the messages of a batch come from, as far as a sink's own position needs it.

    Attributes:
        pipeline: Name of the pipeline.
        uid: See `SinkPosition`.
        lineage: See `SinkPosition`.
        source: See `SinkPosition`.
        start: Position at which the segment starts, JSON text.
        end: Position at which it ends, JSON text.
        rows: How many rows it has, which tells the last one.
        redrive: For dead letters, whose delivery moves no position: the position to store with them
            again. The token of each is the beginning in its `redriven` and the ordinal, six digits.
    """

    pipeline: str
    uid: str
    lineage: str
    source: str
    start: str
    end: str
    rows: int
    redrive: SinkPosition | None = None


@dataclass(frozen=True, slots=True)
class SinkBatch:
    """Consecutive messages of one segment for one sink.

    Attributes:
        segment: Number of the segment.
        segment_id: The segment's random id, part of a sink's own position.
        messages: Columns of `MESSAGES`, at least one row. Ordinals never decrease; gaps are events
            that the sink does not get, equal ones messages of one change.
        replay: Run id of a replay, which marks every message; None for live delivery.
        refused: Changes among these that can never be delivered; nothing of them is in `messages`.
            A sink does not look at them, and is not given a batch without messages.
        origin: Given when the sink shall store its position with the messages; None in a replay,
            which moves no position, and for a sink that keeps none.
    """

    segment: int
    segment_id: str
    messages: pa.RecordBatch
    replay: str | None = None
    origin: Origin | None = None
    refused: tuple[Undeliverable, ...] = ()

    def position_at(self, row: int) -> SinkPosition:
        """Return the position of a sink that has everything up to the batch's row of that index.

        Only for a batch with an origin, and for the last row of an ordinal.
        """
        assert self.origin is not None
        ordinal = cast("int", self.messages.column("ordinal")[row].as_py())
        if (again := self.origin.redrive) is not None:
            return replace(again, redriven=f"{again.redriven}{ordinal:06d}")
        change = self.messages.column("change_id")[row].as_py()
        own = self.messages.column("event_id")[row].as_py()
        return SinkPosition(
            uid=self.origin.uid,
            lineage=self.origin.lineage,
            segment=self.segment,
            segment_id=self.segment_id,
            ordinal=ordinal,
            event_id=cast("str", change or own),
            start=self.origin.end if ordinal == self.origin.rows - 1 else self.origin.start,
            end=self.origin.end,
            source=self.origin.source,
        )


def whole_ordinals(messages: pa.RecordBatch, start: int, stop: int) -> int:
    """Return where a part of a batch ends that begins at row `start` and may have rows up to `stop`.

    The part ends before row `stop`, or where the messages of that row's change begin if these would
    be divided; after them if it begins with them: then it has more rows than it may.

    Args:
        messages: Columns of `MESSAGES`.
        start: The part's first row; that of an ordinal, too.
        stop: Behind the last row that the part may have; more than `start`.
    """
    ordinals = messages.column("ordinal").to_numpy()
    if stop >= len(ordinals):
        return len(ordinals)
    first, end = np.searchsorted(ordinals, [ordinals[stop], ordinals[stop] + 1]).tolist()
    return int(first if first > start else end)


@dataclass(slots=True)
class Traffic:
    """What a client library does by itself, counted until somebody takes the counts.

    Attributes:
        commits: Transactions committed.
        aborts: Transactions that were begun and not committed.
        retries: Requests that it sent again by itself.
        waiting: Messages in its queue, when it last said so.
        waiting_bytes: Their size.
    """

    commits: int = 0
    aborts: int = 0
    retries: int = 0
    waiting: int = 0
    waiting_bytes: int = 0

    def take(self) -> Traffic:
        """Return what it was, and count from 0 again."""
        taken = replace(self)
        self.commits = self.aborts = self.retries = 0
        return taken


def traffic_of(sink: Sink) -> Traffic | None:
    """Return what a sink's client library does, None where nobody counts that."""
    traffic: Traffic | None = getattr(sink, "traffic", None)
    return traffic


class Sink(Protocol):
    """One destination. Methods raise errors of the one tree; used by one thread at a time."""

    @property
    def exactly_once(self) -> bool:
        """Whether the sink stores its own position with every batch that has an origin."""
        ...

    @property
    def commits(self) -> bool:
        """Whether each `send` ends with a commit that takes time: fewer, larger batches are faster."""
        ...

    def open(self) -> None:
        """Connect and check what can be checked; may be called again after `close`.

        Raises:
            SinkUnavailable: Not reachable now.
            AuthFailed: Credentials refused.
        """
        ...

    def position(self) -> SinkPosition | None:
        """Return what the sink holds as its position, None when it holds or keeps none.

        Asked after each `open`, before the first batch with an origin; a replay never asks. What
        any sender sent before has arrived by then, or never will, and is in the answer.

        Raises:
            SinkRejected: Something else is stored in its place; the message says where. Sending
                a batch with an origin overwrites it all the same.
        """
        ...

    def send(self, batch: SinkBatch, guard: SendGuard) -> int:
        """Deliver the whole batch in order and return its last ordinal, once acknowledged.

        On an error an unknown prefix of the batch may have arrived, and nothing after that
        prefix: sending the batch again may repeat messages but never reorders a key.

        With an origin the batch goes in atomic steps, each of which stores the position of its
        last message with it. After an error `position` says which prefix has arrived.

        Raises:
            PositionMoved: The position there is neither the one read nor the one stored last.
        """
        ...

    def close(self) -> None:
        """Release connections; nothing is sent afterwards. Safe to call twice, from any thread."""
        ...
