"""Checks, before anything is sent, what a NATS server and a stream accept from a sink.

`check_stream` reports problems of the stream's configuration when a session begins. `sendable`
finds a message that the server or the stream can never accept before its batch is sent, so that
everything before it can still be delivered.
"""

from __future__ import annotations

import numpy as np

from deltaforge_dagster.errors import SinkRejected, Undeliverable
from deltaforge_dagster.sinks.nats.link import NatsLink
from deltaforge_dagster.sinks.nats.pack import MAX_SUBJECT, Packer
from deltaforge_dagster.sinks.nats.stream import Stream, is_wild
from deltaforge_dagster.sinks.nats.task import Task, Terms

_WILDCARD_VERSION = (2, 11)
"""First version that supports `Nats-Expected-Last-Subject-Sequence-Subject`."""


def check_stream(link: NatsLink, stream: Stream, terms: Terms) -> None:
    """Check that a stream's configuration suits a sink.

    Raises:
        SinkRejected: It does not; the message says what to change.
    """
    where = f"{link.where}: stream {stream.name!r}"
    takes = stream.takes if terms.exactly_once else stream.takes_some
    if not takes(terms.pattern):
        raise SinkRejected(
            f"{where} does not take {terms.pattern!r}, only {', '.join(stream.subjects)}; "
            f"add it: nats stream edit {stream.name} --subjects=..."
        )
    for setting, wanted in (("no_ack", "acknowledges nothing"), ("sealed", "is sealed")):
        if stream.config.get(setting):
            raise SinkRejected(f"{where} {wanted} ({setting}: true); change that, or use another")
    if terms.exactly_once:
        _check_exactly_once(link, stream, terms)


def _check_exactly_once(link: NatsLink, stream: Stream, terms: Terms) -> None:
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
    if is_wild(terms.pattern) and (int(version[0]), int(version[1])) < _WILDCARD_VERSION:
        raise SinkRejected(
            f"{link.where} is NATS {link.info.get('version')}: exactly_once with a "
            "template needs 2.11 or newer"
        )


def sendable(
    link: NatsLink, stream: Stream | None, terms: Terms, packer: Packer, task: Task
) -> tuple[int, Undeliverable | None]:
    """Return the end of the messages that can be sent, and the error for the first one that cannot.

    If one message of a change cannot be sent, none of them is.
    """
    batch = task.batch
    limit = link.max_payload
    largest = None if stream is None else stream.max_message
    if largest is not None:
        limit = min(limit, largest)
    if batch.origin is not None and terms.exactly_once:
        limit -= len(batch.position_at(batch.messages.num_rows - 1).to_json())
    problem = packer.problem(limit)
    if problem is None:
        return batch.messages.num_rows, None
    ordinal = task.ordinal(problem.row)
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
