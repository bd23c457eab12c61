"""A batch on its way to NATS: what can be sent of it, and its progress, which outlives connections.

`check_stream` reports problems of the stream's configuration when a session begins. `sendable`
finds a message that the server or the stream can never accept before its batch is sent, so that
everything before it can still be delivered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np

from deltaforge_dagster.errors import SinkRejected, Undeliverable
from deltaforge_dagster.sinks.base import SinkBatch
from deltaforge_dagster.sinks.nats.link import NatsLink
from deltaforge_dagster.sinks.nats.pack import MAX_SUBJECT, Packer
from deltaforge_dagster.sinks.nats.stream import Stream, is_wild

_WILDCARD_VERSION = (2, 11)
"""First version that supports `Nats-Expected-Last-Subject-Sequence-Subject`."""


@dataclass(frozen=True, slots=True)
class PublishLimits:
    """What all sessions of a sink may publish: subjects, stream, and time for it.

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
class PublishAttempt:
    """How far an attempt to publish the log in order has come, live or in a replay.

    It decides which messages a stream may drop as duplicates.

    A stream drops a message whose id it already has. That is right if the sink missed the
    acknowledgement when it sent the message before. It is wrong if other messages were stored after
    that message: after a reset or a restored source position the log is sent again, and if the
    stream dropped its newest part as duplicates, older values would remain behind newer ones. Such
    a message is stored again under another id.

    Attributes:
        sent: Segment and ordinal of the last message that was sent.
        acknowledged: Segment and ordinal of the last message that was acknowledged.
        fresh: Whether nothing was stored yet, so that messages of an earlier run may be duplicates.
        restarted: Whether the log is sent again from an earlier place, so that the next message
            must begin a new chain.
        again: Suffix for the ids of messages that are stored again; empty until one is.
    """

    sent: tuple[int, int] = (-1, -1)
    acknowledged: tuple[int, int] = (-1, -1)
    fresh: bool = True
    restarted: bool = False
    again: str = ""

    def begin(self, batch: SinkBatch) -> None:
        """Register the next batch; if it was acknowledged before, start over."""
        ordinal = cast("int", batch.messages.column("ordinal")[0].as_py())
        if (batch.segment, ordinal) <= self.acknowledged:
            self.sent = self.acknowledged = (batch.segment, ordinal - 1)
            self.fresh = False
            self.restarted = True


@dataclass(slots=True)
class Publish:
    """A batch that is being published.

    Attributes:
        batch: The batch.
        attempt: The attempt to which it belongs.
        row: The first row that is not known to have arrived.
        uncertain: Whether messages from that row may have arrived.
    """

    batch: SinkBatch
    attempt: PublishAttempt
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


def check_stream(link: NatsLink, stream: Stream, limits: PublishLimits) -> None:
    """Check that a stream's configuration suits a sink.

    Raises:
        SinkRejected: It does not; the message says what to change.
    """
    where = f"{link.where}: stream {stream.name!r}"
    takes = stream.takes if limits.exactly_once else stream.takes_some
    if not takes(limits.pattern):
        raise SinkRejected(
            f"{where} does not take {limits.pattern!r}, only {', '.join(stream.subjects)}; "
            f"add it: nats stream edit {stream.name} --subjects=..."
        )
    for setting, wanted in (("no_ack", "acknowledges nothing"), ("sealed", "is sealed")):
        if stream.config.get(setting):
            raise SinkRejected(f"{where} {wanted} ({setting}: true); change that, or use another")
    if limits.exactly_once:
        _check_exactly_once(link, stream, limits)


def _check_exactly_once(link: NatsLink, stream: Stream, limits: PublishLimits) -> None:
    where = f"{link.where}: stream {stream.name!r}"
    config = stream.config
    if config.get("retention", "limits") != "limits":
        raise SinkRejected(
            f"{where} drops what was consumed (retention: {config['retention']}), and with it "
            "the sink's position; exactly_once needs retention limits"
        )
    if int(config.get("max_msgs_per_subject", -1)) > 0:
        raise SinkRejected(
            f"{where} keeps only some messages of each subject (max_msgs_per_subject), so that "
            "the sink's position can vanish; exactly_once needs a stream without that limit"
        )
    if config.get("subject_transform"):
        raise SinkRejected(f"{where} renames subjects, which exactly_once cannot follow")
    version = str(link.info.get("version", "0")).split(".")
    if is_wild(limits.pattern) and (int(version[0]), int(version[1])) < _WILDCARD_VERSION:
        raise SinkRejected(
            f"{link.where} is NATS {link.info.get('version')}: exactly_once with a "
            "template needs 2.11 or newer"
        )


def sendable(
    link: NatsLink, stream: Stream | None, limits: PublishLimits, packer: Packer, publish: Publish
) -> tuple[int, Undeliverable | None]:
    """Return the end of the messages that can be sent, and the error for the first one that cannot.

    If one message of a change cannot be sent, none of them is.
    """
    batch = publish.batch
    limit = link.max_payload
    largest = None if stream is None else stream.max_message
    if largest is not None:
        limit = min(limit, largest)
    if batch.origin is not None and limits.exactly_once:
        limit -= len(batch.position_at(batch.messages.num_rows - 1).to_json())
    problem = packer.problem(limit)
    if problem is None:
        return batch.messages.num_rows, None
    ordinal = publish.ordinal(problem.row)
    stop = int(np.searchsorted(batch.messages.column("ordinal").to_numpy(), ordinal))
    label = f"{link.where}: the message of segment {batch.segment}, ordinal {ordinal}"
    if problem.kind == "too large":
        return stop, Undeliverable(
            f"{label} is larger than {limit} bytes with its headers; raise the server's "
            "max_payload or the stream's max_msg_size, or leave out what makes it so large",
            ordinal,
            "too_large",
        )
    if problem.kind == "line break":
        text = f"{label} has a key with a line break or a zero byte, which no header can carry"
        return stop, Undeliverable(text, ordinal, "serialization")
    text = (
        f"{label} has no valid subject: it must not be empty or longer than {MAX_SUBJECT} bytes, "
        "nor have blanks, `*`, `>` or empty parts between dots"
    )
    return stop, Undeliverable(text, ordinal, "routing")


def not_taken(where: str, subject: str, stream: Stream) -> SinkRejected:
    """Return the error for a subject that the stream does not capture."""
    return SinkRejected(
        f"{where} does not take subject {subject!r}, only {', '.join(stream.subjects)}; add it: "
        f"nats stream edit {stream.name} --subjects=..."
    )
