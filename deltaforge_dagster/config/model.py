"""The models of the pipeline file: every field that this version reads, with its default.

The forms of the source and of a sink come from the registries of kinds. So this module imports
`sources` and `sinks`, which in turn import the rest of `config`. The models are frozen and mirror
the file: `PipelineSpec` is the document, and `PipelineSpec.spec.source.config.slot` is
`spec.source.config.slot`. Each model checks what its own block can check; `load` checks what spans
blocks, derives missing ids, and turns unknown fields into warnings. Fields that DeltaForge does not
have are under `spec.engine`. Numbers named `seconds` or `secs` are seconds, `ms` milliseconds,
`bytes` bytes.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import BaseModel, Field, SecretStr, model_validator

from deltaforge_dagster.config.blocks import Block, Count, Name, Seconds, Text
from deltaforge_dagster.config.engine import Engine, SegmentLimits
from deltaforge_dagster.config.processors import Processor
from deltaforge_dagster.config.sensing import SchemaSensing, is_off
from deltaforge_dagster.config.sinks import SinkBlock
from deltaforge_dagster.config.sources import SourceBlock
from deltaforge_dagster.errors import CorruptLog
from deltaforge_dagster.sinks.registry import sink_blocks
from deltaforge_dagster.sources.registry import (
    identify_position,
    no_chaser,
    source_blocks,
    source_types,
)

if TYPE_CHECKING:  # the kinds, which installed packages extend, are known only at run time
    Source = SourceBlock
    Sink = SinkBlock
else:
    Source = Annotated[
        Union[source_blocks()],  # noqa: UP007 - of a tuple
        Field(discriminator="type"),
    ]
    Sink = Annotated[
        Union[sink_blocks()],  # noqa: UP007 - of a tuple
        Field(discriminator="type"),
    ]


class Metadata(Block):
    """The identity of a pipeline."""

    name: Name
    """The pipeline's name: up to 100 letters, digits, `-`, `_`, `.`. Part of asset keys, journal
    paths and keys of the state store; a renamed pipeline is a new pipeline.
    """
    tenant: Text
    """`tenant_id` of every event, and the first part of its idempotency key."""
    labels: Mapping[str, str] = {}
    """Any labels, text to text."""
    annotations: Mapping[str, str] = {}
    """Any annotations, text to text."""


class Batch(Block):
    """Limits of a delivery batch: the messages of a segment that a sink acknowledges together.

    A limit applies only if the file sets it. `max_ms` limits how long a change waits for others.
    """

    max_events: Count | None = None
    """Messages of a delivery batch. If only `max_bytes` is set: 50,000."""
    max_bytes: Count | None = None
    """Bytes of values, keys, headers and destinations of a delivery batch.

    If only `max_events` is set: 32 MiB. A single larger message is a batch by itself.
    """
    max_ms: Annotated[int, Field(ge=0)] | None = None
    """The maximum time that a change waits for others: lowers `engine.segment.min_ms`."""
    respect_source_tx: bool = True
    """A delivery batch ends only at the end of a source transaction; a transaction that is larger
    than the limits makes a larger batch. Transactions of more than about 300,000 changes or 100 MiB
    are divided nevertheless, and so are those of more than 5,000 changes in Redis with
    `exactly_once`. Without `max_events` and `max_bytes` this has no effect: segments never divide a
    transaction.
    """
    max_inflight: Count | None = None
    """Accepted without effect, with a warning: the next messages are always encoded while the
    current ones are sent, and are sent in order.
    """


class CommitPolicy(Block):
    """Which sinks must have acknowledged a change before the source may discard it from its log."""

    mode: Literal["required", "all", "quorum"] = "required"
    """Wait for every sink with `required: true`, for every sink, or for any `quorum` of them."""
    quorum: Count | None = None
    """With `mode: quorum`: the number of sinks; at most all of them."""

    @model_validator(mode="after")
    def _check_quorum(self) -> CommitPolicy:
        if self.mode == "quorum" and self.quorum is None:
            raise ValueError("mode quorum needs `quorum`, the number of sinks that must have it")
        return self


class DeadLetterQueue(Block):
    """How many dead letters a pipeline keeps, for how long, and what a full queue means."""

    max_entries: Count = 10_000
    """The maximum number of entries."""
    max_age_secs: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 604_800.0
    """Older entries are dropped, except those that wait for others; `0`: entries are never dropped
    for their age.
    """
    overflow_policy: Literal["drop_oldest", "reject", "block"] = "block"
    """When the queue is full: `block` makes the sink wait, `drop_oldest` loses the oldest entry,
    `reject` loses the new one.
    """


class DeadLetters(Block):
    """The file's `journal`: whether undeliverable changes go to the dead letter queue."""

    enabled: bool = False
    """Put changes that can never be delivered into the dead letter queue."""
    max_event_bytes: Count = 262_144
    """An entry shows its event up to this size, and a larger event without its row images.

    The complete change is kept in any case.
    """
    dlq: DeadLetterQueue = DeadLetterQueue()
    """The pipeline's queue, shared by all of its sinks."""


Number = Annotated[int, Field(ge=0, lt=1 << 32)]


class Storage(Block):
    """Where DeltaForge keeps its state; here `DELTAFORGE_STATE_URL` decides, for all pipelines."""

    backend: Literal["sqlite", "memory", "postgres"] = "sqlite"
    """Not used."""
    path: Text = "./data/deltaforge.db"
    """Not used."""
    dsn: SecretStr | None = None
    """Not used."""

    @model_validator(mode="after")
    def _check_dsn(self) -> Storage:
        if self.backend == "postgres" and self.dsn is None:
            raise ValueError("backend postgres needs `dsn`")
        return self


class Sharding(Block):
    """A hint for dividing work; not used."""

    mode: Text
    """Not used."""
    count: Number | None = None
    """Not used."""
    key: Text | None = None
    """Not used."""


class ConnectionLimits(Block):
    """Limits on connections; not used."""

    max_dedicated_per_source: Number | None = None
    """Not used."""


class ConnectionPolicy(Block):
    """How to connect to sources; not used."""

    default_mode: Text | None = None
    """Not used."""
    preferred_replica: Text | None = None
    """Not used."""
    limits: ConnectionLimits | None = None
    """Not used."""


class Spec(Block):
    """What a pipeline does: one source, its sinks, and the rules between them."""

    source: Source
    """The database whose changes are captured."""
    processors: tuple[Processor, ...] = ()
    """What transforms changes before delivery, in this order ([processors.md](processors.md))."""
    sinks: Annotated[tuple[Sink, ...], Field(min_length=1)]
    """Where changes are delivered.

    Every sink has its own checkpoint, and its own asset in Dagster.
    """
    batch: Batch | None = None
    """How a segment is divided into delivery batches; by default a sink takes a segment in as few
    steps as it can.
    """
    sink_batch_deadline_secs: Seconds | None = None
    """How long a sink may take for one batch, whatever its own timeouts are. After that the sink is
    closed, which counts as an ordinary failure, and it gets the batch again.
    """
    commit_policy: CommitPolicy = CommitPolicy()
    """Which sinks must have acknowledged a change before the source may discard it."""
    journal: DeadLetters = DeadLetters()
    """Dead letters: what happens to changes that can never be delivered to a sink."""
    engine: Engine = Engine()
    """Fields that DeltaForge does not have, and ignores."""
    schema_sensing: Annotated[SchemaSensing | None, Field(exclude_if=is_off)] = None
    """What to learn about tables and the documents in their columns ([sensing.md](sensing.md))."""
    sharding: Annotated[Sharding | None, Field(exclude=True)] = None
    """Accepted and not used, as in DeltaForge."""
    connection_policy: Annotated[ConnectionPolicy | None, Field(exclude=True)] = None
    """Accepted and not used, as in DeltaForge."""

    @model_validator(mode="after")
    def _check_hold_key(self) -> Spec:
        if self.engine.dlq.hold_key and not self.journal.enabled:
            raise ValueError(
                "engine.dlq.hold_key holds changes back behind dead letters, so it needs "
                "journal.enabled: true"
            )
        return self

    @model_validator(mode="after")
    def _check_seed(self) -> Spec:
        seed = self.engine.checkpoint.seed
        kind = source_types()[self.source.type]
        if seed.type == "chaser" and kind.position_at(0) is None:
            raise ValueError(f"engine.checkpoint.seed: {no_chaser()}")
        if seed.position is not None:
            with contextlib.suppress(CorruptLog):  # `file.rules` reports an invalid position
                if identify_position(json.dumps(dict(seed.position)))[0] is not kind:
                    raise ValueError(
                        "engine.checkpoint.seed.position: is the position of another kind of source"
                    )
        return self

    @property
    def segment_limits(self) -> SegmentLimits:
        """The limits of segments, with `min_ms` lowered to `batch.max_ms` if that is set."""
        limits = self.engine.segment
        if self.batch is None or self.batch.max_ms is None:
            return limits
        return limits.model_copy(update={"min_ms": min(limits.min_ms, self.batch.max_ms)})


class PipelineSpec(Block):
    """A pipeline file."""

    api_version: Annotated[str | None, Field(alias="apiVersion", exclude=True)] = None
    """By convention `deltaforge/v1`; not used."""
    kind: Annotated[str | None, Field(exclude=True)] = None
    """By convention `Pipeline`; not used."""
    storage: Annotated[Storage | None, Field(exclude=True)] = None
    """Not used, with a warning: `DELTAFORGE_STATE_URL` names the state store."""
    metadata: Metadata
    """The pipeline's identity."""
    spec: Spec
    """What the pipeline does."""

    def masked(self) -> dict[str, Any]:
        """Return the effective spec, defaults included, as plain JSON values without passwords."""
        return self.model_dump(mode="json")

    def secrets(self) -> dict[str, str]:
        """Return every secret by its path, such as `spec.sinks[redis].config.uri`.

        The path names a sink or processor by its id.
        """
        return dict(_secret_values(self))


def _secret_values(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each secret in a model."""
    if isinstance(value, SecretStr):
        yield path, value.get_secret_value()
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _secret_values(getattr(value, name), f"{path}.{name}" if path else name)
    elif isinstance(value, Mapping):
        for name, member in value.items():
            yield from _secret_values(member, f"{path}.{name}")
    elif isinstance(value, tuple | list):
        for index, member in enumerate(value):
            own = getattr(member, "config", member)
            yield from _secret_values(member, f"{path}[{getattr(own, 'id', index)}]")
