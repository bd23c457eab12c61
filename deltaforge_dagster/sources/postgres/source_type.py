"""PostgreSQL as a kind of source: its options, and what the rest of the program asks of it.

Column types go by the names that table versions have: `format_type`'s. The names of built-in types
have no schema. Every other type (enums, domains, types of extensions) is text, since a table
version does not say what it is made of; only PostGIS's geometries are known by their name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SecretStr,
    field_serializer,
    field_validator,
)

from deltaforge_dagster.config.blocks import Block, Text
from deltaforge_dagster.config.engine import ValueOptions
from deltaforge_dagster.config.owned import OwnedResource
from deltaforge_dagster.config.postgres_dsn import checked_dsn, postgres_dsn, postgres_place
from deltaforge_dagster.config.secrets import MASK, mask
from deltaforge_dagster.config.sources import OnSchemaDrift, Snapshot, SourceConfig, TablePattern
from deltaforge_dagster.errors import CorruptLog, SpecError
from deltaforge_dagster.positions import Position, format_lsn
from deltaforge_dagster.sources import value_types as types
from deltaforge_dagster.sources.postgres.position import LsnPosition, parse_lsn
from deltaforge_dagster.sources.registry import PositionField, SourceContext, SourceType
from deltaforge_dagster.sources.value_types import ValueType
from deltaforge_dagster.tables import Column

if TYPE_CHECKING:  # they need the client library, Arrow and kernels
    from deltaforge_dagster.sources.postgres.snapshot.read_view import XidReadView
    from deltaforge_dagster.sources.postgres.source import PostgresSource

_NAMED = {
    "boolean": types.BOOLEAN,
    "smallint": types.INT16,
    "integer": types.INT32,
    "bigint": types.INT64,
    "oid": types.UINT32,
    "real": types.FLOAT32,
    "double precision": types.FLOAT64,
    "json": types.JSON,
    "jsonb": types.JSON,
    "bytea": types.BINARY,
    "uuid": types.UUID,
    "date": types.DATE,
    "time without time zone": types.TIME,
    "timestamp without time zone": types.TIMESTAMP,
    "timestamp with time zone": types.TIMESTAMPTZ,
}
_NUMERIC = re.compile(r"numeric\((\d+),(-?\d+)\)")
_PRECISION = re.compile(r"^(time|timestamp)\(\d\) ")
_GEOMETRY = re.compile(r"(.*\.)?(geometry|geography)(\(.*\))?")
_SMALL = 100_000


def _slot(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9_]{1,63}", text):
        raise ValueError(
            "must be 1 to 63 lower-case letters, digits or `_` (PostgreSQL allows no other "
            "names for replication slots)"
        )
    return text


def _publication(text: str) -> str:
    if len(text.encode()) > 63:
        raise ValueError("is longer than 63 bytes, the longest name that PostgreSQL has")
    return text


def _start_position(value: object) -> object:
    if value in ("earliest", "latest") or isinstance(value, StartLsn):
        return value
    try:
        if isinstance(value, dict) and set(value) == {"lsn"} and isinstance(value["lsn"], str):
            parse_lsn(value["lsn"])
            return value
    except CorruptLog:
        pass
    raise ValueError('must be earliest, latest or {lsn: "X/Y"} with hexadecimal X and Y')


class StartLsn(Block):
    """A start position given as an LSN."""

    lsn: str
    """The position, `"0/16B6C50"`; the slot must still hold it."""


class OutboxPrefixes(Block):
    """Which logical messages are outbox events."""

    prefixes: Annotated[tuple[Text, ...], Field(min_length=1)]
    """Patterns of prefixes of logical messages; `*` and `%` match any text.

    Messages that match have the schema `__outbox` instead of `__wal_message`.
    """


class PostgresSourceConfig(SourceConfig):
    """How to read the database."""

    dsn: SecretStr
    """`postgres://user:password@host:port/database?sslmode=...`, or `host=... port=... user=...
    password=... dbname=...` (or `database=`). Defaults of the second form for host, port, user and
    database: localhost, 5432, postgres, postgres. Keys that PostgreSQL does not know are ignored
    with a warning.
    """
    slot: Annotated[Text, AfterValidator(_slot)]
    """Replication slot; created if missing.

    `deltaforge recover` and `deltaforge checkpoint reset --all` drop it if nothing can be read from
    it any more, `deltaforge remove` in any case. Lower-case letters, digits and `_`.
    """
    publication: Annotated[Text, AfterValidator(_publication)]
    """Publication; created if missing, with the tables that match, and extended when more tables
    match. A publication that somebody else created is checked and never changed.
    """
    tables: tuple[TablePattern, ...]
    """Tables to capture: `public.orders`; `orders` means `public.orders`; a part may end in `*` or
    `%` (`shop.*`, `shop.order_%`, `*.orders`). `[]` means every user table. Case-sensitive; `_` is
    an ordinary character.
    """
    start_position: Annotated[
        Literal["earliest", "latest"] | StartLsn, BeforeValidator(_start_position)
    ] = "earliest"
    """Where a new pipeline starts: at the oldest change that the slot still holds, at the current
    position (for a new slot both are the same), or at an LSN. Ignored once the pipeline has a
    position.
    """
    on_schema_drift: OnSchemaDrift = "adapt"
    """What to do when another server has taken the source's place and its tables differ: continue
    with them, or stop. See "Another server" in [postgres.md](postgres.md).
    """
    snapshot: Snapshot | None = None
    """When and how the existing rows of the tables are read ([snapshots.md](snapshots.md))."""
    outbox: OutboxPrefixes | None = None
    """Which logical messages are outbox events; see [outbox](processors.md#outbox)."""

    _check_dsn = field_validator("dsn")(staticmethod(checked_dsn))

    @field_serializer("dsn")
    def _mask_dsn(self, dsn: SecretStr) -> str:
        return mask(dsn.get_secret_value())


class PostgresSourceType(SourceType[PostgresSourceConfig]):
    """A database of PostgreSQL, through a replication slot."""

    name = "postgres"
    sample: Mapping[str, Any] = {
        "dsn": "{{ env.POSTGRES_DSN }}",
        "slot": "NAME",
        "publication": "NAME",
        "tables": ["public.*"],
    }
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


def value_type(data_type: str) -> ValueType:
    """Return the value type for the name of a data type; text for types that have no other."""
    if data_type.endswith("[]"):
        return types.list_of(value_type(data_type.removesuffix("[]")))
    name = _PRECISION.sub(r"\1 ", data_type)
    if name in _NAMED:
        return _NAMED[name]
    numeric = _NUMERIC.fullmatch(name)
    if numeric is not None:
        return types.decimal(int(numeric[1]), int(numeric[2]))
    return types.GEOMETRY if _GEOMETRY.fullmatch(name) else types.TEXT
