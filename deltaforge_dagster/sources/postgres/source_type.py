"""PostgreSQL as a kind of source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr

from deltaforge_dagster.config.engine import ValueOptions
from deltaforge_dagster.config.owned import OwnedResource
from deltaforge_dagster.config.postgres_dsn import postgres_dsn, postgres_place
from deltaforge_dagster.config.secrets import MASK
from deltaforge_dagster.errors import SpecError
from deltaforge_dagster.positions import Position, format_lsn
from deltaforge_dagster.sources.postgres.config import PostgresSourceConfig
from deltaforge_dagster.sources.postgres.position import LsnPosition
from deltaforge_dagster.sources.postgres.value_types import value_type
from deltaforge_dagster.sources.registry import PositionField, SourceContext, SourceType
from deltaforge_dagster.sources.value_types import ValueType
from deltaforge_dagster.tables import Column

if TYPE_CHECKING:  # they need the client library, Arrow and kernels
    from deltaforge_dagster.sources.postgres.snapshot.read_view import XidReadView
    from deltaforge_dagster.sources.postgres.source import PostgresSource


_SMALL = 100_000


class PostgresSourceType(SourceType[PostgresSourceConfig]):
    """A database of PostgreSQL, through a replication slot."""

    name = "postgres"
    title = "PostgreSQL"
    summary = "A PostgreSQL source: logical replication through pgoutput."
    config = PostgresSourceConfig
    connector = "postgresql"
    position_example = '{lsn: "0/16B6C50"}'
    outbox = "prefixes"
    timing = frozenset({"start_position"})
    marks_unchanged = True
    retains_log = True
    consequences = {  # noqa: RUF012 - constant
        "slot": "the slot must hold everything after the captured position; "
        "otherwise a run stops and says so",
        "publication": "is made when missing; one that somebody else made must have the tables",
    }

    def build(self, config: PostgresSourceConfig, context: SourceContext) -> PostgresSource:
        """Return a source, without connecting to the server."""
        # The module imports kernels.
        from deltaforge_dagster.sources.postgres.source import PostgresSource  # noqa: PLC0415

        engine = context.engine
        return PostgresSource(
            config, context.pipeline, engine.values, engine.postgres, engine.columns
        )

    def position(self, fields: Mapping[str, Any]) -> LsnPosition | None:
        """Return the position in these fields; None if there is no `lsn`."""
        return LsnPosition.from_fields(fields)

    def position_fields(
        self,
        config: PostgresSourceConfig,  # noqa: ARG002
    ) -> tuple[PositionField, ...]:
        """Return the fields `lsn` and `txId`."""
        return PositionField("lsn", "pos", "lsn"), PositionField("txId", "tx_id", "json")

    def read_view(self, fields: Mapping[str, Any]) -> XidReadView | None:
        """Return the read view in these fields; None if there is no `xmax`."""
        # The module imports Arrow.
        from deltaforge_dagster.sources.postgres.snapshot.read_view import (  # noqa: PLC0415
            XidReadView,
        )

        return XidReadView.from_fields(fields)

    def value_type(self, column: Column, options: ValueOptions) -> ValueType:  # noqa: ARG002
        """Return the type by its name."""
        return value_type(column.data_type)

    def position_number(self, position: Position) -> int:
        """Return the LSN."""
        assert isinstance(position, LsnPosition)
        return position.lsn

    def position_at(self, number: int) -> LsnPosition:
        """Return the position with this LSN."""
        return LsnPosition(number)

    def place(self, file: str | None, pos: int | None) -> str:  # noqa: ARG002
        """Return the LSN as `X/YYYYYYYY`."""
        return format_lsn(pos or 0)

    def table_variables(self, pattern: str) -> Mapping[str, str]:
        """Return the variables for schema and table; without a schema it is `public`."""
        first, dot, rest = pattern.partition(".")
        schema, table = (first, rest) if dot else ("public", first)
        return {"source.schema": schema, "source.table": table}

    def names(
        self,
        config: PostgresSourceConfig,
        pipeline: str,  # noqa: ARG002
    ) -> Mapping[str, str]:
        """Return the names of slot and publication."""
        return {"slot": config.slot, "publication": config.publication}

    def kept_log(self, config: PostgresSourceConfig, size: int | None) -> str:
        """Return that the slot retains log."""
        log = "log"
        if size is not None:
            log = (f"{size:,} bytes" if size < _SMALL else f"{size / 1e6:,.1f} MB") + " of log"
        return (
            f"replication slot {config.slot!r} of {'/'.join(self.database_place(config))} "
            f"still retains {log}"
        )

    def masked(self, config: PostgresSourceConfig) -> bool:
        """Return whether the connection string has a mask in place of its password."""
        from psycopg import conninfo  # noqa: PLC0415 - the client library

        return conninfo.conninfo_to_dict(config.dsn.get_secret_value()).get("password") == MASK

    def with_secret(self, config: PostgresSourceConfig, secret: str | None) -> PostgresSourceConfig:
        """Return a config with this password.

        Without one, libpq takes it from PGPASSWORD or a password file.
        """
        from psycopg import conninfo  # noqa: PLC0415 - the client library

        parameters = conninfo.conninfo_to_dict(config.dsn.get_secret_value())
        parameters["password"] = secret
        return config.model_copy(
            update={"dsn": SecretStr(conninfo.make_conninfo("", **parameters))}
        )

    def database_place(self, config: PostgresSourceConfig) -> tuple[str, ...]:
        """Return the server and the database."""
        return postgres_place(config.dsn)

    def owned(self, config: PostgresSourceConfig) -> Sequence[OwnedResource]:
        """Return the slot: who confirms its position decides for all which log is discarded."""
        server, _ = self.database_place(config)
        return [
            OwnedResource("replication slot", (server,), config.slot, "spec.source.config.slot")
        ]

    def warnings(self, config: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Return a warning for each key of the connection string that libpq does not know."""
        try:
            _, keys = postgres_dsn(config["dsn"])
        except (KeyError, TypeError, AttributeError, SpecError):
            return []
        return [
            ("dsn", f"has the key {key}, which PostgreSQL does not know; it is ignored")
            for key in keys
        ]

    def warm(self) -> None:
        """Compile the kernels of the stream, or load them from the cache."""
        from deltaforge_dagster.sources.postgres import warm  # noqa: PLC0415

        warm.warm()

    def warm_snapshots(self) -> None:
        """Compile the kernels of snapshots, or load them from the cache."""
        from deltaforge_dagster.sources.postgres.snapshot import copy_out, selected  # noqa: PLC0415

        copy_out.warm()
        selected.warm()


POSTGRES = PostgresSourceType()
