"""`spec.engine.checkpoint`: how often checkpoints are written, and what a new pipeline's is.

Replicators of event stores have options of this kind: a store for checkpoints, a number of events after
which they are written, seeds for the first one. Here the state store is the one place for checkpoints,
since they are written in the transaction that compares the run's lease.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, model_validator

from deltaforge_dagster.config.blocks import AlsoAccepts, Block, Count, Name, Text, bare_type
from deltaforge_dagster.errors import CorruptLog
from deltaforge_dagster.positions import parse_position

DEFAULT_INSTANCE = "default"

ONLY_STATE = (
    "a checkpoint is written in the transaction that compares the run's lease, so it is where the lease is, "
    "in the state store, which DELTAFORGE_STATE_URL names (a SQLite file, PostgreSQL or memory)"
)
"""Why there is no other store."""

ONLY_POSTGRES = (
    "a chaser file holds one number, which is a position of PostgreSQL only (use type position)"
)
"""Why other sources have no such seed."""

_Fields = Mapping[str, str | int | None]


def _known_store(value: object) -> object:
    if value != "state":
        raise ValueError(f"must be state: {ONLY_STATE}")
    return value


def _position(fields: _Fields) -> _Fields:
    try:
        parse_position(json.dumps(dict(fields)))
    except CorruptLog as error:
        raise ValueError(
            'is no position (write {lsn: "0/16B6C50"}, or {file: mysql-bin.000003, pos: 4}, '
            "perhaps with gtid_set)"
        ) from error
    return fields


class Seed(Block):
    """Where a new pipeline begins, instead of where its source says."""

    type: Literal["none", "chaser", "position"] = "none"
    """What the position is read from."""
    path: Text | None = None
    """`chaser`: a copy of a file of exactly 8 bytes. `position`: a file with a position as JSON
    text.
    """
    position: Annotated[_Fields, AfterValidator(_position)] | None = None
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
    """Where checkpoints are: in the state store, `DELTAFORGE_STATE_URL`. Anything else is an
    error.
    """
    after: Count | None = None
    """At most so many messages are acknowledged without a written checkpoint: the most that
    arrives again, at least once, when a run is killed inside a segment. They are sent in units
    of no more than that, so that small numbers are slow; 1 is one message at a time. By default
    the checkpoint is written at the end of each segment, and every second inside a larger one.
    It is always written when a run ends in order.
    """
    instance_id: Name = DEFAULT_INSTANCE
    """Lets several installations run one file over one state store and the same servers: an
    instance `b` of `orders` is the pipeline `orders.b`, with checkpoints, assets, journal and
    names on servers of its own. Each needs a `slot` of its own, in MySQL a source `id`, which
    decides the id that it reads with.
    """
    seed: Annotated[Seed, BeforeValidator(bare_type), AlsoAccepts({"const": "none"})] = Seed()
    """Where a new pipeline begins, instead of where the source's own rule says
    ([configuration.md](configuration.md#where-a-new-pipeline-begins)). Means nothing once it
    has a position.
    """
