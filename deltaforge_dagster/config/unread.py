"""What a pipeline file may say and nobody reads here; its form is checked all the same."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, SecretStr, model_validator

from deltaforge_dagster.config.blocks import Block, Text

Number = Annotated[int, Field(ge=0, lt=1 << 32)]


class Storage(Block):
    """Where DeltaForge keeps its state; here `DELTAFORGE_STATE_URL` says so, for all pipelines."""

    backend: Literal["sqlite", "memory", "postgres"] = "sqlite"
    """Not read."""
    path: Text = "./data/deltaforge.db"
    """Not read."""
    dsn: SecretStr | None = None
    """Not read."""

    @model_validator(mode="after")
    def _check_dsn(self) -> Storage:
        if self.backend == "postgres" and self.dsn is None:
            raise ValueError("backend postgres needs `dsn`")
        return self


class Sharding(Block):
    """A hint how to divide work; not read."""

    mode: Text
    """Not read."""
    count: Number | None = None
    """Not read."""
    key: Text | None = None
    """Not read."""


class ConnectionLimits(Block):
    """How many connections; not read."""

    max_dedicated_per_source: Number | None = None
    """Not read."""


class ConnectionPolicy(Block):
    """How to connect to sources; not read."""

    default_mode: Text | None = None
    """Not read."""
    preferred_replica: Text | None = None
    """Not read."""
    limits: ConnectionLimits | None = None
    """Not read."""
