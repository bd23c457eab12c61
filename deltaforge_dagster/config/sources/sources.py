"""The sources of a pipeline file: which database is read, and how."""

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
    model_validator,
)

from deltaforge_dagster.config.blocks import Block, Text, resolved
from deltaforge_dagster.config.globs import overlap, table_parts
from deltaforge_dagster.config.secrets import mask
from deltaforge_dagster.config.sources.dsn import mysql_dsn, postgres_dsn
from deltaforge_dagster.config.sources.snapshot import Snapshot
from deltaforge_dagster.config.sources.turso import TursoSource
from deltaforge_dagster.errors import CorruptLog, SpecError
from deltaforge_dagster.positions import (
    BinlogPosition,
    KnownPosition,
    LsnPosition,
    TursoPosition,
    parse_lsn,
)

# `schema.table` or `table`; the first dot is the separator, and a wildcard may only end a part.
_TABLE_PATTERN = re.compile(r"(?:[^.*%]+[*%]?|[*%]) (?: \. (?:[^*%]+[*%]?|[*%]) )?", re.VERBOSE)


def _table_pattern(text: str) -> str:
    if not _TABLE_PATTERN.fullmatch(text):
        raise ValueError(
            "is not a table pattern (write schema.table, where a part may end in `*` or `%` for "
            "any rest, and has no other wildcard)"
        )
    return text


def _share_a_table(one: str, other: str) -> bool:
    """Return whether some MySQL table matches both patterns."""
    parts = zip(table_parts(one), table_parts(other), strict=True)
    return all(overlap(first, second) for first, second in parts)


def _outbox_pattern(text: str) -> str:
    if not all(table_parts(text)):
        raise ValueError(
            "is not a table pattern (write database.table, where * and % are any text)"
        )
    return text


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
    """Patterns of prefixes of logical messages; `*` and `%` match any text. Messages that match have the
    schema `__outbox` instead of `__wal_message`.
    """


class OutboxTables(Block):
    """Which tables are outboxes."""

    tables: Annotated[
        tuple[Annotated[Text, AfterValidator(_outbox_pattern)], ...], Field(min_length=1)
    ]
    """Patterns of outbox tables, `database.table` or `table` in any database; `*` and `%` match any text,
    anywhere. The source's `tables` must capture them, too.
    """


class PostgresConfig(Block):
    """How to read a PostgreSQL database."""

    id: Text
    """Identifies the source; part of every event id. If absent, the pipeline's name is used, with a
    warning.
    """
    dsn: SecretStr
    """`postgres://user:password@host:port/database?sslmode=...`, or `host=... port=... user=...
    password=... dbname=...` (or `database=`). Defaults of the second form for host, port, user and
    database: localhost, 5432, postgres, postgres. Keys that PostgreSQL does not know are ignored with a
    warning.
    """
    slot: Annotated[Text, AfterValidator(_slot)]
    """Replication slot; created if missing, never dropped. Lower-case letters, digits and `_`."""
    publication: Annotated[Text, AfterValidator(_publication)]
    """Publication; created if missing, with the tables that match, and extended when more tables match.
    A publication that somebody else created is checked and never changed.
    """
    tables: tuple[Annotated[Text, AfterValidator(_table_pattern)], ...]
    """Tables to capture: `public.orders`; `orders` means `public.orders`; a part may end in `*` or `%`
    (`shop.*`, `shop.order_%`, `*.orders`). `[]` means every user table. Case-sensitive; `_` is an
    ordinary character.
    """
    start_position: Annotated[
        Literal["earliest", "latest"] | StartLsn, BeforeValidator(_start_position)
    ] = "earliest"
    """Where a new pipeline starts: at the oldest change that the slot still holds, at the current
    position (for a new slot both are the same), or at an LSN. Ignored once the pipeline has a position.
    """
    on_schema_drift: Literal["adapt", "halt"] = "adapt"
    """What to do when another server has taken the source's place and its tables differ: continue with
    them, or stop. See "Another server" in [postgres.md](postgres.md).
    """
    snapshot: Snapshot | None = None
    """When and how the existing rows of the tables are read ([snapshots.md](snapshots.md))."""
    outbox: OutboxPrefixes | None = None
    """Which logical messages are outbox events; see [outbox](processors.md#outbox)."""

    @field_validator("dsn")
    @classmethod
    def _check_dsn(cls, dsn: SecretStr) -> SecretStr:
        text = resolved(dsn.get_secret_value())
        try:
            return SecretStr(postgres_dsn(text)[0])
        except SpecError as error:
            raise ValueError(str(error)) from None

    @field_serializer("dsn")
    def _mask_dsn(self, dsn: SecretStr) -> str:
        return mask(dsn.get_secret_value())


class PostgresSource(Block):
    """A PostgreSQL source: logical replication through pgoutput."""

    type: Literal["postgres"]
    config: PostgresConfig
    """How to read the database."""


class MysqlConfig(Block):
    """How to read a MySQL server."""

    id: Text
    """Identifies the source; part of every event id, and the replica's server id is derived from it. If
    absent, the pipeline's name is used, with a warning.
    """
    dsn: SecretStr
    """`mysql://user:password@host:port/database?ssl-mode=VERIFY_CA&ssl-ca=...`, with the options
    `ssl-mode`, `ssl-ca`, `ssl-cert` and `ssl-key` of MySQL's own programs; other options are rejected.
    """
    tables: tuple[Annotated[Text, AfterValidator(_table_pattern)], ...] = ()
    """Tables to capture: `shop.orders`; `orders` means that table in any database; a part may end in `*`
    or `%`. Absent or `[]` means every user table. Case-sensitive; `_` is an ordinary character.
    """
    on_schema_drift: Literal["adapt", "halt"] = "adapt"
    """What to do when another server has taken the source's place and its tables differ: continue with
    them, or stop. See "Another server" in [mysql.md](mysql.md).
    """
    snapshot: Snapshot | None = None
    """When and how the existing rows of the tables are read ([snapshots.md](snapshots.md))."""
    outbox: OutboxTables | None = None
    """Which tables are outboxes; see [outbox](processors.md#outbox)."""

    @model_validator(mode="after")
    def _check_outbox(self) -> MysqlConfig:
        for pattern in () if self.outbox is None else self.outbox.tables:
            if self.tables and not any(_share_a_table(pattern, one) for one in self.tables):
                raise ValueError(
                    f"outbox.tables: {pattern} matches no table that `tables` captures (an outbox is "
                    "captured like any table: add it there, too)"
                )
        return self

    @field_validator("dsn")
    @classmethod
    def _check_dsn(cls, dsn: SecretStr) -> SecretStr:
        try:
            mysql_dsn(resolved(dsn.get_secret_value()))
        except SpecError as error:
            raise ValueError(str(error)) from None
        return dsn

    @field_serializer("dsn")
    def _mask_dsn(self, dsn: SecretStr) -> str:
        return mask(dsn.get_secret_value())


class MysqlSource(Block):
    """A MySQL source: the binary log, read as a replica does."""

    type: Literal["mysql"]
    config: MysqlConfig
    """How to read the server's binary log."""


Source = Annotated[PostgresSource | MysqlSource | TursoSource, Field(discriminator="type")]


def position_type(source: Source) -> type[KnownPosition]:
    """Return the class of a source's positions."""
    match source:
        case MysqlSource():
            return BinlogPosition
        case TursoSource():
            return TursoPosition
        case _:
            return LsnPosition
