"""`spec.engine.checkpoint`: how often checkpoints are written, and where a new pipeline starts.

Event store replicators have similar options: a store for checkpoints, a number of events after
which they are written, and seeds for the first one. Here checkpoints are always kept in the state
store, because they are written in the transaction that compares the run's lease.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, model_validator

from deltaforge_dagster.config.blocks import AlsoAccepts, Block, Count, Name, Text, bare_type

DEFAULT_INSTANCE = "default"

ONLY_STATE = (
    "a checkpoint is written in the transaction that compares the run's lease, "
    "so it is where the lease is, in the state store, "
    "which DELTAFORGE_STATE_URL names (a SQLite file, PostgreSQL or memory)"
)
"""The reason, for messages, why checkpoints cannot be kept in another store."""


def _known_store(value: object) -> object:
    if value != "state":
        raise ValueError(f"must be state: {ONLY_STATE}")
    return value


class Seed(Block):
    """Where a new pipeline starts, in place of the source's own rule."""

    type: Literal["none", "chaser", "position"] = "none"
    """The form in which the position is given; `none`: no seed."""
    path: Text | None = None
    """`chaser`: a copy of the chaser file, exactly 8 bytes.

    `position`: a file that holds a position as JSON text.
    """
    position: Mapping[str, str | int | None] | None = None
    """`position`: `{lsn: "0/16B6C50"}`, or `{file: mysql-bin.000003, pos: 4, gtid_set: ...}`."""

    @model_validator(mode="after")
    def _check_form(self) -> Seed:
        if self.type == "chaser" and (self.path is None or self.position is not None):
            raise ValueError(
                "type chaser needs `path`, a copy of a file of 8 bytes, and nothing else"
            )
        if self.type == "position" and (self.path is None) == (self.position is None):
            raise ValueError("type position needs `position`, or `path`, a file that holds one")
        if self.type == "none" and (self.path or self.position):
            raise ValueError("type none reads nothing: leave path and position out")
        return self


class CheckpointOptions(Block):
    """How often checkpoints are written, what the first one is, and whose they are."""

    store: Annotated[Literal["state"], BeforeValidator(_known_store)] = "state"
    """Where checkpoints are kept: in the state store, `DELTAFORGE_STATE_URL`. Any other value is an
    error.
    """
    after: Count | None = None
    """The maximum number of messages that are acknowledged before a checkpoint is written, and
    therefore the maximum that is delivered again when a run is killed inside a segment
    (at-least-once delivery). Delivery batches are no larger than this, so small numbers are slow; 1
    sends one message at a time. By default the checkpoint is written at the end of each segment,
    and every second within a larger one. It is always written when a run ends normally.
    """
    instance_id: Name = DEFAULT_INSTANCE
    """Lets several installations run the same file with the same state store and servers: instance
    `b` of `orders` is the pipeline `orders.b`, with its own checkpoints, assets, journal and names
    on servers. Each instance needs its own `slot`, or with MySQL its own source `id`, from which
    the replica's server id is derived.
    """
    seed: Annotated[Seed, BeforeValidator(bare_type), AlsoAccepts({"const": "none"})] = Seed()
    """Where a new pipeline starts, in place of the source's own rule
    ([configuration.md](configuration.md#where-a-new-pipeline-begins)). Ignored once the pipeline
    has a position.
    """
