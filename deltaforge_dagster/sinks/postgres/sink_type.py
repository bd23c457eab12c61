"""Tables of a PostgreSQL database as a kind of sink, and its `config` in a pipeline file."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deltaforge_dagster.config.postgres_dsn import postgres_place
from deltaforge_dagster.sinks.registry import (
    KEYS_CHANGED,
    LATER_CHANGES,
    NEEDS_RESYNC,
    TABLES_MOVED,
    TYPES_CHANGED,
    DatabaseSinkType,
    SinkContext,
)
from deltaforge_dagster.sources.findings import Finding

if TYPE_CHECKING:  # they need the client library, Arrow and kernels
    from deltaforge_dagster.sinks.postgres.server import TargetServer
    from deltaforge_dagster.sinks.tables.comparer import TableComparer
    from deltaforge_dagster.sinks.tables.writer import TableOwner, TableWriter
    from deltaforge_dagster.typed_rows.schema import TargetTypes
from typing import Self

from pydantic import SecretStr, field_serializer, field_validator, model_validator

from deltaforge_dagster.config.blocks import Count, Seconds
from deltaforge_dagster.config.postgres_dsn import checked_dsn
from deltaforge_dagster.config.secrets import mask
from deltaforge_dagster.sinks.tables.config import TableSinkConfig

DEFAULT_SCHEMA = "public"
"""The schema of a table whose name has none."""

_MOST_PARTS = 2

_CHECK_SECONDS = 5


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


class PostgresSinkType(DatabaseSinkType[PostgresSinkConfig]):
    """Tables of a PostgreSQL database."""

    name = "postgres"
    sample: Mapping[str, Any] = {"dsn": "{{ env.COPY_DSN }}", "table": "NAME.${source.table}"}
    summary = "A PostgreSQL sink: it keeps tables in a database as they are in the source."
    config = PostgresSinkConfig
    destinations = "tables"
    timing = frozenset({"commit_seconds", "commit_changes"})
    consequences: Mapping[str, str] = {
        **dict.fromkeys(["table", "dsn"], TABLES_MOVED),
        **dict.fromkeys(["mode", "soft_deletes"], NEEDS_RESYNC),
        "keys": KEYS_CHANGED,
        "types": TYPES_CHANGED,
        **dict.fromkeys(["filter", "skipped_operations"], LATER_CHANGES),
    }

    def column_types(self) -> TargetTypes:
        """Return which types PostgreSQL's columns can have."""
        from deltaforge_dagster.sinks.postgres.types import (  # noqa: PLC0415 - needs Arrow
            TARGET_TYPES,
        )

        return TARGET_TYPES

    def owned_place(self, config: PostgresSinkConfig) -> tuple[str, ...]:
        """Return the server and the database."""
        return postgres_place(config.dsn)

    def build_writer(self, config: PostgresSinkConfig, owner: TableOwner) -> TableWriter:
        """Return what writes the tables of a sink, not connected yet."""
        from deltaforge_dagster.sinks.postgres.writer import (  # noqa: PLC0415 - client library
            PostgresWriter,
        )

        return PostgresWriter(config, owner)

    def build_comparer(
        self, config: PostgresSinkConfig, owner: TableOwner, destination: Sequence[str]
    ) -> TableComparer:
        """Return what compares a table of a sink with the source, not connected yet."""
        from deltaforge_dagster.sinks.postgres.comparer import (  # noqa: PLC0415 - client library
            PostgresComparer,
        )

        return PostgresComparer(config, owner, destination)

    def preflight(
        self, config: PostgresSinkConfig, context: SinkContext, names: Sequence[str]
    ) -> list[Finding]:
        """Check that a new enough server answers, and the role may make and write the tables."""
        import psycopg  # noqa: PLC0415 - client library

        from deltaforge_dagster.sinks.postgres.preflight import findings  # noqa: PLC0415
        from deltaforge_dagster.sinks.postgres.server import connection_error  # noqa: PLC0415

        server = _server(config, context.pipeline)
        try:
            with contextlib.closing(server.connect(_CHECK_SECONDS)) as connection:
                return list(findings(connection, server, context.pipeline, names))
        except psycopg.Error as error:
            raise connection_error(error, server.where, server.user) from None

    def names(self, config: PostgresSinkConfig, pipeline: str) -> Mapping[str, str]:
        """Return the tables' mode, where they are, and the table that records their commits."""
        address = _server(config, pipeline).address
        return {"mode": config.mode, "database": address, "commits": "deltaforge.commits"}

    def metadata(self, config: PostgresSinkConfig) -> Mapping[str, str]:
        """Return the mode of the tables, and the server and database that have them."""
        return {"mode": config.mode, "database": _server(config, "").address}

    def warm(self) -> None:
        """Compile the kernels that write rows for COPY."""
        from deltaforge_dagster.sinks.postgres import copy_rows  # noqa: PLC0415 - has kernels

        copy_rows.warm()


def _server(config: PostgresSinkConfig, pipeline: str) -> TargetServer:
    from deltaforge_dagster.sinks.postgres.server import (  # noqa: PLC0415 - client library
        TargetServer,
    )

    name = f"deltaforge:{pipeline}:{config.id}"
    return TargetServer.from_dsn(config.dsn.get_secret_value(), config.id, name)


POSTGRES = PostgresSinkType()
