"""Blocks of a pipeline file that are validated but not used."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, SecretStr, model_validator

from deltaforge_dagster.config.blocks import Block, Text

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
