"""The `postgres` source of a pipeline file."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SecretStr,
    field_serializer,
    field_validator,
)

from deltaforge_dagster.config.blocks import Block, Text
from deltaforge_dagster.config.postgres_dsn import checked_dsn
from deltaforge_dagster.config.secrets import mask
from deltaforge_dagster.config.sources import OnSchemaDrift, Snapshot, SourceConfig, TablePattern
from deltaforge_dagster.errors import CorruptLog
from deltaforge_dagster.sources.postgres.position import parse_lsn


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
