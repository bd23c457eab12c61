"""What every sink of a pipeline file has: its id, the shape of its messages, which events it gets."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from deltaforge_dagster.config.blocks import (
    AlsoAccepts,
    Block,
    Name,
    TemplateText,
    Text,
    bare_type,
)


class NativeEnvelope(Block):
    """A message is the event itself."""

    type: Literal["native"] = "native"


class DebeziumEnvelope(Block):
    """A message is the event as the payload of what Debezium writes."""

    type: Literal["debezium"]


class CloudEventsEnvelope(Block):
    """A message is a CloudEvent, whose types begin with `type_prefix`."""

    type: Literal["cloudevents"]
    type_prefix: Text
    """What the events' `type` begins with (`com.example.shop` makes `com.example.shop.created`)."""


Envelope = Annotated[
    NativeEnvelope | DebeziumEnvelope | CloudEventsEnvelope,
    Field(discriminator="type"),
    BeforeValidator(bare_type),
    AlsoAccepts({"enum": ["native", "debezium"]}),
]


class Encoding(Block):
    """How a message becomes bytes."""

    type: Literal["json"] = "json"


class SinkFilter(Block):
    """Which events a sink gets, by who made them; every condition must hold."""

    exclude_synthetic: bool = False
    """Only events that a source captured."""
    synthetic_only: bool = False
    """Only events that processors made."""
    producers: tuple[Text, ...] = ()
    """Only events that processors with these ids made."""


_OPERATIONS = {"create": "c", "update": "u", "delete": "d", "read": "r", "truncate": "t"}


def _operations(value: object) -> object:
    """Accept `c,u` and words for the list of letters; `none` is no operation."""
    if isinstance(value, str):
        value = () if value.strip() == "none" else tuple(one.strip() for one in value.split(","))
    if not isinstance(value, tuple | list):
        return value
    letters = [_OPERATIONS.get(one, one) if isinstance(one, str) else one for one in value]
    for one in letters:
        if one not in _OPERATIONS.values():
            raise ValueError(
                "knows c, u, d, r and t, or create, update, delete, read and truncate (`none` for "
                "no operation)"
            )
    return tuple(dict.fromkeys(letters))


class SinkConfig(Block):
    """What every sink has."""

    id: Name
    """Same letters as the pipeline's name; unique in the pipeline. A renamed sink is a new one.
    Derived with a warning when absent: type and index (`redis-0`).
    """
    required: bool = True
    """Whether the commit policy `required` waits for this sink."""
    start: Literal["tail", "journal", "snapshot"] | None = None
    """Where the sink begins when it is added to a pipeline that has run already: with what is
    captured from then on (`tail`), with the oldest segment that the journal still has, or with what
    is captured from then on and, by a [snapshot](snapshots.md#for-one-sink), the rows that are there.
    Without it, where the hindmost of the other sinks stands. The log and `deltaforge status` say
    where it began. Means nothing afterwards: `deltaforge checkpoint reset` moves a sink.
    """
    key: TemplateText | None = None
    """Message key; without it the event id, in Kafka the row's primary key, in NATS none. An
    unresolved variable becomes empty text. `${key.id}` is the same for every change of a row.
    """
    envelope: Envelope = NativeEnvelope()
    """Shape of a message ([events.md](events.md)): the event itself,
    `{"schema":null,"payload":<the event>}`, or a CloudEvent 1.0. `envelope: debezium` is
    accepted for the block.
    """
    encoding: Annotated[Encoding, BeforeValidator(bare_type), AlsoAccepts({"const": "json"})] = (
        Encoding()
    )
    """How a message becomes bytes. `encoding: json` is accepted for the block."""
    filter: SinkFilter | None = None
    """Which events the sink gets, by who made them; every condition must hold. Its checkpoint
    passes the others.
    """
    skipped_operations: Annotated[
        tuple[str, ...], BeforeValidator(_operations), AlsoAccepts({"type": "string"})
    ] = ()
    """Operations that the sink does not get: inserts, updates, deletes, snapshot rows, truncates.
    Words (`create`, `update`, `delete`, `read`, `truncate`) and one text (`u,d`, `none`) are
    accepted, too. The halves of an update count as what they are; other DDL is never skipped.
    """
    key_updates: Literal["update", "delete_insert"] = "update"
    """What becomes of an update that changes the row's primary key: one message, with the new key,
    or a delete of the old key and an insert of the new one
    ([events](events.md#several-messages-for-one-change)).
    """
