"""The `postgres` sink of a pipeline file."""

from __future__ import annotations

from typing import Self

from pydantic import SecretStr, field_serializer, field_validator, model_validator

from deltaforge_dagster.config.blocks import Count, Seconds
from deltaforge_dagster.config.postgres_dsn import checked_dsn
from deltaforge_dagster.config.secrets import mask
from deltaforge_dagster.sinks.postgres.server import DEFAULT_SCHEMA
from deltaforge_dagster.sinks.tables.config import TableSinkConfig

_MOST_PARTS = 2


class PostgresSinkConfig(TableSinkConfig):
    """Which database has the tables, and how they are kept."""

    dsn: SecretStr
    """The database, PostgreSQL 15 or newer:
    `postgres://user:password@host:port/database?sslmode=...`, or `host=... port=... user=...
    password=... dbname=...`.
    """
    soft_deletes: bool = False
    """With `mode: current`: a deleted row stays, with `df_deleted` set to true."""
    commit_seconds: Seconds = 1.0
    """A commit is made when its oldest change has waited for this long,
    or `commit_changes` wait.
    """
    commit_changes: Count = 100_000
    """A commit is made when so many changes wait. It has no more, unless a single segment has."""

    _check_dsn = field_validator("dsn")(staticmethod(checked_dsn))

    @property
    def full_destination(self) -> str:
        """The template of the tables' names with their schema."""
        return self.table if self.name_parts == _MOST_PARTS else f"{DEFAULT_SCHEMA}.{self.table}"

    @field_serializer("dsn")
    def _mask_dsn(self, dsn: SecretStr) -> str:
        return mask(dsn.get_secret_value())

    @model_validator(mode="after")
    def _check_modes(self) -> Self:
        if self.soft_deletes and self.mode != "current":
            raise ValueError(
                f"soft_deletes needs mode: current (mode {self.mode} keeps deleted rows anyway)"
            )
        if self.name_parts > _MOST_PARTS:
            raise ValueError(
                f"table has {self.name_parts} parts, and PostgreSQL's names have a schema and a "
                "table (write ${source.schema}.${source.table})"
            )
        return self
