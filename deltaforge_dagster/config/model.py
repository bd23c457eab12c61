"""The pipeline file as frozen values: every field that this version reads, with its default.

The models mirror the file: `PipelineSpec` is the document, `PipelineSpec.spec.source.config.slot` is
`spec.source.config.slot`. They hold what one block can check by itself; `load` checks what spans
blocks, derives missing ids, and turns unknown fields into warnings. Fields of our own live under
`spec.engine`. Numbers named `seconds` or `secs` are seconds, `ms` milliseconds, `bytes` bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from deltaforge_dagster.config.blocks import Block, Count, Name, Seconds, Text
from deltaforge_dagster.config.checkpoint import ONLY_POSTGRES
from deltaforge_dagster.config.engine import Engine, SegmentLimits
from deltaforge_dagster.config.processors import Processor
from deltaforge_dagster.config.sensing import SchemaSensing, is_off
from deltaforge_dagster.config.sinks import Sink
from deltaforge_dagster.config.sources import PostgresSource, Source, position_type
from deltaforge_dagster.config.unread import ConnectionPolicy, Sharding, Storage
from deltaforge_dagster.positions import parse_position


class Metadata(Block):
    """Who a pipeline is."""

    name: Name
    """The pipeline's name: up to 100 letters, digits, `-`, `_`, `.`. Part of asset keys, of
    journal paths and of what is kept in the state store; a renamed pipeline is a new one.
    """
    tenant: Text
    """`tenant_id` of every event, and the first part of its idempotency key."""
    labels: Mapping[str, str] = {}
    """Text to text, free."""
    annotations: Mapping[str, str] = {}
    """Text to text, free."""


class Batch(Block):
    """Upper limits of one acknowledgement inside a segment; each only when the file gives it.

    A change waits for others `max_ms` at most. `max_inflight` is accepted: what is sent next is
    prepared meanwhile, whatever it says.
    """

    max_events: Count | None = None
    """Messages of a unit. With `max_bytes` alone: 50,000."""
    max_bytes: Count | None = None
    """Of values, keys, headers and destinations. With `max_events` alone: 32 MiB. A single larger
    message is a unit.
    """
    max_ms: Annotated[int, Field(ge=0)] | None = None
    """How long a change waits for others, at most: lowers `engine.segment.min_ms`."""
    respect_source_tx: bool = True
    """A unit ends only where a transaction of the source ends; one that is larger than the limits
    makes a larger unit. Transactions of more than some 300,000 changes or 100 MiB are divided
    all the same, and so are those of more than 5,000 in Redis with `exactly_once`. Without
    `max_events` and `max_bytes` it means nothing: segments never divide a transaction.
    """
    max_inflight: Count | None = None
    """Accepted, without effect, which a warning says: what is sent next is prepared meanwhile in
    any case, and sent in order.
    """


class CommitPolicy(Block):
    """Which sinks the source must wait for before it may forget."""

    mode: Literal["required", "all", "quorum"] = "required"
    """Wait for every sink with `required: true`, for every sink, or for any `quorum` of them."""
    quorum: Count | None = None
    """With `mode: quorum`: how many; at most the number of sinks."""

    @model_validator(mode="after")
    def _check_quorum(self) -> CommitPolicy:
        if self.mode == "quorum" and self.quorum is None:
            raise ValueError("mode quorum needs `quorum`, the number of sinks that must have it")
        return self


class DeadLetterQueue(Block):
    """How many dead letters a pipeline keeps, for how long, and what happens when there is no room."""

    max_entries: Count = 10_000
    """How many entries there may be."""
    max_age_secs: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 604_800.0
    """Older entries are dropped, those that wait for others excepted; `0`: none is."""
    overflow_policy: Literal["drop_oldest", "reject", "block"] = "block"
    """When there is no room: the sink waits, the oldest entry is lost, or the new one is."""


class DeadLetters(Block):
    """The file's `journal`: whether changes that can never be delivered are put aside."""

    enabled: bool = False
    """Put such changes aside."""
    max_event_bytes: Count = 262_144
    """An entry shows its event up to this size, and a larger one without its row images. The whole
    change is kept all the same.
    """
    dlq: DeadLetterQueue = DeadLetterQueue()
    """The queue of the pipeline, for all of its sinks."""


class Spec(Block):
    """What a pipeline does: one source, its sinks, and the rules between them."""

    source: Source
    """The database whose changes are captured."""
    processors: tuple[Processor, ...] = ()
    """What happens to changes on the way, in this order ([processors.md](processors.md))."""
    sinks: Annotated[tuple[Sink, ...], Field(min_length=1)]
    """Where changes go. Every sink has its own checkpoint, and its own asset in Dagster."""
    batch: Batch | None = None
    """How a segment is divided for sinks; without it a sink takes a segment in as few steps as it
    can.
    """
    sink_batch_deadline_secs: Seconds | None = None
    """How long a sink may take for one batch that it is given, whatever its own timeouts are. Then
    it is closed, the failure counts as its others do, and it gets the batch again.
    """
    commit_policy: CommitPolicy = CommitPolicy()
    """Which sinks the source must wait for."""
    journal: DeadLetters = DeadLetters()
    """Dead letters: what becomes of changes that a sink can never be given."""
    engine: Engine = Engine()
    """Fields of our own, which DeltaForge ignores."""
    schema_sensing: Annotated[SchemaSensing | None, Field(exclude_if=is_off)] = None
    """What to find out about tables and the documents in their columns ([sensing.md](sensing.md))."""
    sharding: Annotated[Sharding | None, Field(exclude=True)] = None
    """Accepted and not read, by DeltaForge neither."""
    connection_policy: Annotated[ConnectionPolicy | None, Field(exclude=True)] = None
    """Accepted and not read, by DeltaForge neither."""

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
        if seed.type == "chaser" and not isinstance(self.source, PostgresSource):
            raise ValueError(f"engine.checkpoint.seed: {ONLY_POSTGRES}")
        if seed.position is not None and not isinstance(
            parse_position(json.dumps(dict(seed.position))), position_type(self.source)
        ):
            raise ValueError(
                "engine.checkpoint.seed.position: is the position of another kind of source"
            )
        return self

    @property
    def segment_limits(self) -> SegmentLimits:
        """The limits of segments, in which a change waits for others `batch.max_ms` at most."""
        limits = self.engine.segment
        if self.batch is None or self.batch.max_ms is None:
            return limits
        return limits.model_copy(update={"min_ms": min(limits.min_ms, self.batch.max_ms)})


class PipelineSpec(Block):
    """A pipeline file."""

    api_version: Annotated[str | None, Field(alias="apiVersion", exclude=True)] = None
    """By convention `deltaforge/v1`; not read."""
    kind: Annotated[str | None, Field(exclude=True)] = None
    """By convention `Pipeline`; not read."""
    storage: Annotated[Storage | None, Field(exclude=True)] = None
    """Not read, which a warning says: `DELTAFORGE_STATE_URL` names the state store."""
    metadata: Metadata
    """Who the pipeline is."""
    spec: Spec
    """What the pipeline does."""

    def masked(self) -> dict[str, Any]:
        """Return the effective spec, defaults included, as plain JSON values without passwords."""
        return self.model_dump(mode="json")
