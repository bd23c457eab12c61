"""The interface between a deliverer and a destination of messages: what every such sink promises.

Every sink delivers at least once. A sink whose `exactly_once` is true also keeps its own position:
in the same atomic step as the messages, it stores a `SinkPosition` that names the last of them. The
next opener of the sink reads it and knows what has arrived, even if the acknowledgement was lost.
The position does not decide alone: `pipeline.deliver.resumption` compares it with the checkpoint
and decides which of the two applies.

Before it stores anything, a sink that keeps its own position checks that the stored position is
still the one that it last read or stored. If it is not, another sender is active or the destination
has lost data: the sink raises `PositionMoved` and stores nothing. The deliverer then opens it
again, reads the position and decides again where to resume.

One change may become several messages: an update that changes a key becomes a delete and an insert,
and a delete may be followed by a tombstone. All messages of a change carry its ordinal, are
adjacent, and are never divided: no batch begins or ends between them, and a sink neither
acknowledges nor stores a position between them. Code that splits a batch calls `whole_ordinals` to
find a valid boundary.
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
"""Columns of `SinkBatch.messages`: the messages for one sink, one per row, in sending order.

`value` is the finished envelope, or null for a tombstone, which only sinks of some kinds receive
(`registry.MessageSinkType.takes_tombstones`). `headers` is a JSON object as text or null, `key` the
resolved message key or null. `event_id` and `idempotency_key` belong to the message; `change_id` is
the event id of its change in the journal, or null if it equals `event_id`.
"""

AVRO_MESSAGES = pa.schema(
    [
        *(pa.field("value", pa.binary()) if field.name == "value" else field for field in _FIELDS),
        pa.field("schema", pa.int32()),
    ]
)
"""Columns of `SinkBatch.messages` for Avro messages whose schema ids are not filled in yet.

Like `MESSAGES`, but `value` is binary, without the id of its schema. `schema` is the index
of the schema in `SinkBatch.schemas`, or null for a message that is not Avro. `AvroSink` fills in
the ids and passes the messages on without this column.
"""


@dataclass(frozen=True, slots=True)
class MessageSchema:
    """A schema of messages in Avro.

    Attributes:
        text: The schema, as JSON.
        record: The full name of its record.
    """

    text: str
    record: str


_NUMBERS = {"segment": int, "ordinal": int}
_NO_POSITION = "what is stored there is not a position of deltaforge"


@dataclass(frozen=True, slots=True)
class SinkPosition:
    """The last message that arrived at a sink, stored there in the same atomic step as the data.

    Attributes:
        uid: Uid of the pipeline; it changes whenever its journal starts from scratch.
        incarnation: Incarnation of the checkpoint under which the message was sent; a position of
            another incarnation does not count (`state.records.CheckpointRow`).
        segment: Number of the last message's segment.
        segment_id: Random id of that segment; in another state store, the same number may denote a
            different segment.
        ordinal: Ordinal of the last message in that segment.
        event_id: Event id of the last message's change; it identifies the change even if other
            segments hold it by then.
        start: Position up to which everything has arrived, JSON text (`positions`): the start of
            that segment, or its end if the message is its last one.
        end: Position after the last message, JSON text: the end of that segment.
        source: Id of the pipeline's source in the pipeline file.
        redriven: Token of the last dead letter delivered since that message, or empty.
    """

    uid: str
    incarnation: str
    segment: int
    segment_id: str
    ordinal: int
    event_id: str
    start: str
    end: str
    source: str
    redriven: str = ""

    def to_json(self) -> str:
        """Return the text that a sink stores: one JSON object with these fields.

        The incarnation is called `lineage` there, as in every position that sinks already store.
        """
        return orjson.dumps(
            {
                "uid": self.uid,
                "lineage": self.incarnation,
                "segment": self.segment,
                "segment_id": self.segment_id,
                "ordinal": self.ordinal,
                "event_id": self.event_id,
                "start": self.start,
                "end": self.end,
                "source": self.source,
                "redriven": self.redriven,
            }
        ).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Parse the text that `to_json` writes; unknown fields are ignored.

        Raises:
            SinkRejected: The text is not a position.
        """
        try:
            fields = orjson.loads(text)
            fields = {"redriven": "", **fields, "incarnation": fields["lineage"]}
            values = {name: fields[name] for name in cls.__slots__}
        except (ValueError, KeyError, TypeError) as error:
            raise SinkRejected(_NO_POSITION) from error
        if any(type(value) is not _NUMBERS.get(name, str) for name, value in values.items()):
            raise SinkRejected(_NO_POSITION)
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Origin:
    """The part of a sink's own position that all messages of a batch share.

    Attributes:
        pipeline: Name of the pipeline.
        uid: See `SinkPosition`.
        incarnation: See `SinkPosition`.
        source: See `SinkPosition`.
        start: Position at which the segment starts, JSON text.
        end: Position at which the segment ends, JSON text.
        rows: Number of rows in the segment, which identifies the last one.
        redrive: Set for dead letters, whose delivery does not move the position: the position to
            store again with them. A dead letter's token consists of the prefix in
            `redrive.redriven` and its ordinal in six digits.
    """

    pipeline: str
    uid: str
    incarnation: str
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
        messages: Columns of `MESSAGES`, at least one row. Ordinals never decrease: a gap stands for
            changes that the sink does not receive, equal ordinals are messages of one change.
        replay: Run id of a replay, with which every message is marked; None for live delivery.
        origin: Set if the sink must store its position with the messages; None in a replay, which
            moves no position, and for a sink that keeps none.
        refused: Changes in this part of the segment that can never be delivered; they have no
            messages in `messages`. Sinks ignore this attribute and never receive a batch without
            messages.
        schemas: The schemas of messages in Avro whose ids are not known yet; see `AVRO_MESSAGES`.
        earlier: Messages before those in `messages`, in parts that do not divide a change, to be
            sent in the same step. Only a sink with `Sink.takes_parts` receives some.
    """

    segment: int
    segment_id: str
    messages: pa.RecordBatch
    replay: str | None = None
    origin: Origin | None = None
    refused: tuple[Undeliverable, ...] = ()
    schemas: tuple[MessageSchema, ...] = ()
    earlier: tuple[pa.RecordBatch, ...] = ()

    @property
    def parts(self) -> tuple[pa.RecordBatch, ...]:
        """All messages of the batch, in sending order."""
        return *self.earlier, self.messages

    @property
    def num_rows(self) -> int:
        """Number of messages in all parts."""
        return sum(part.num_rows for part in self.parts)

    def position_at(self, row: int) -> SinkPosition:
        """Return the position of a sink that has received everything up to this row of `messages`.

        The batch must have an origin, and the row must be the last one of its ordinal.
        """
        assert self.origin is not None
        ordinal = cast("int", self.messages.column("ordinal")[row].as_py())
        if (redrive := self.origin.redrive) is not None:
            return replace(redrive, redriven=f"{redrive.redriven}{ordinal:06d}")
        change = self.messages.column("change_id")[row].as_py()
        event_id = self.messages.column("event_id")[row].as_py()
        return SinkPosition(
            uid=self.origin.uid,
            incarnation=self.origin.incarnation,
            segment=self.segment,
            segment_id=self.segment_id,
            ordinal=ordinal,
            event_id=cast("str", change or event_id),
            start=self.origin.end if ordinal == self.origin.rows - 1 else self.origin.start,
            end=self.origin.end,
            source=self.origin.source,
        )


def whole_ordinals(messages: pa.RecordBatch, start: int, stop: int) -> int:
    """Return the end of a part of a batch, so that no change's messages are divided.

    The part ends before row `stop`, or earlier, where the change begins whose messages row `stop`
    would divide. If that change begins at `start`, the part contains it whole and exceeds `stop`.

    Args:
        messages: Columns of `MESSAGES`.
        start: The part's first row; must be the first row of an ordinal.
        stop: Limit: the row after the last row that the part should have; greater than `start`.
    """
    ordinals = messages.column("ordinal").to_numpy()
    if stop >= len(ordinals):
        return len(ordinals)
    first, end = np.searchsorted(ordinals, [ordinals[stop], ordinals[stop] + 1]).tolist()
    return int(first if first > start else end)


@dataclass(slots=True)
class Traffic:
    """What a sink's client library does internally, counted for metrics.

    Attributes:
        commits: Transactions committed.
        aborts: Transactions begun and not committed.
        retries: Requests that the library sent again.
        waiting: Messages in the library's queue, as it last reported; None before it has.
        waiting_bytes: Size of these messages.
    """

    commits: int = 0
    aborts: int = 0
    retries: int = 0
    waiting: int | None = None
    waiting_bytes: int | None = None

    def take(self) -> Traffic:
        """Return the counts so far and reset them to 0."""
        taken = replace(self)
        self.commits = self.aborts = self.retries = 0
        return taken


def traffic_of(sink: Sink) -> Traffic | None:
    """Return the traffic of a sink's client library, or None if the sink does not count it."""
    traffic: Traffic | None = getattr(sink, "traffic", None)
    return traffic


class Sink(Protocol):
    """One destination, used by one thread at a time.

    Methods raise subclasses of `DeltaforgeError`.
    """

    @property
    def exactly_once(self) -> bool:
        """Whether the sink stores its own position with every batch that has an origin."""
        ...

    @property
    def takes_parts(self) -> bool:
        """Whether batches have `SinkBatch.earlier` parts.

        They are for a sink whose every `send` ends with a costly commit: fewer, larger batches are
        faster then, and nothing has to be copied for them.
        """
        ...

    def open(self) -> None:
        """Connect and check the configuration where possible; may be called again after `close`.

        Raises:
            SinkUnavailable: The destination cannot be reached now.
            AuthFailed: The destination refused the credentials.
        """
        ...

    def position(self) -> SinkPosition | None:
        """Return the sink's own position, or None if none is stored or the sink keeps none.

        Called after each `open`, before the first batch with an origin; a replay never calls it.
        Everything that any earlier sender sent has either arrived by then and is covered by the
        position, or will never arrive.

        Raises:
            SinkRejected: Something else is stored in its place; the message says where. Sending
                a batch with an origin overwrites it nevertheless.
        """
        ...

    def send(self, batch: SinkBatch, guard: SendGuard) -> int:
        """Deliver the whole batch in order and return its last ordinal once it is acknowledged.

        After an error, an unknown prefix of the batch may have arrived, and nothing after that
        prefix: sending the batch again may repeat messages but never reorders those of a key. A
        sink that delivers several messages at once keeps this for each key: an unknown prefix of
        the messages of a key may have arrived, and nothing after it. A sink that knows that
        everything up to some ordinal was acknowledged sets `acknowledged` of the error, so that
        only the rest is sent again.

        A batch with an origin is sent in atomic steps, each of which also stores the position of
        its last message. After an error, `position` tells which prefix has arrived.

        Raises:
            PositionMoved: The stored position is not the one that this sink last read or stored.
        """
        ...

    def close(self) -> None:
        """Release connections; nothing is sent afterwards.

        May be called twice and from any thread.
        """
        ...
