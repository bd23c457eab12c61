"""The sources of a pipeline file: which database to read, and how."""

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
from deltaforge_dagster.config.dsn import mysql_dsn, postgres_dsn
from deltaforge_dagster.config.globs import overlap, table_parts
from deltaforge_dagster.config.secrets import mask
from deltaforge_dagster.config.snapshot import Snapshot
from deltaforge_dagster.config.turso import TursoSource
from deltaforge_dagster.errors import CorruptLog, SpecError
from deltaforge_dagster.positions import (
    BinlogPosition,
    KnownPosition,
    LsnPosition,
    TursoPosition,
    parse_lsn,
)

# `schema.table` or `table`; the first dot divides, and only a part's end may be a wildcard.
_TABLE_PATTERN = re.compile(r"(?:[^.*%]+[*%]?|[*%]) (?: \. (?:[^*%]+[*%]?|[*%]) )?", re.VERBOSE)


def _table_pattern(text: str) -> str:
    if not _TABLE_PATTERN.fullmatch(text):
        raise ValueError(
            "is not a table pattern (write schema.table, where a part may end in `*` or `%` for "
            "any rest, and has no other wildcard)"
        )
    return text


def _share_a_table(one: str, other: str) -> bool:
    """Say whether two patterns of MySQL's tables have a table in common."""
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
    """That place in the log, `"0/16B6C50"`; it must lie in what the slot holds."""


class OutboxPrefixes(Block):
    """Which logical messages are those of outboxes."""

    prefixes: Annotated[tuple[Text, ...], Field(min_length=1)]
    """Patterns of prefixes of logical messages; `*` and `%` stand for any text. What fits has the
    schema `__outbox` instead of `__wal_message`."""


class OutboxTables(Block):
    """Which tables are outboxes."""

    tables: Annotated[
        tuple[Annotated[Text, AfterValidator(_outbox_pattern)], ...], Field(min_length=1)
    ]
    """Patterns of tables that are outboxes, `database.table` or `table` in any database; `*` and `%`
    stand for any text, anywhere. The pipeline's `tables` must capture them, too."""


class PostgresConfig(Block):
    """How to read a PostgreSQL database."""

    id: Text
    """Names the source; part of every event id. Derived with a warning when absent: the pipeline's
    name.
    """
    dsn: SecretStr
    """`postgres://user:password@host:port/database?sslmode=...`, or `host=... port=... user=...
    password=... dbname=...` (or `database=`). Without host, port, user or database: localhost,
    5432, postgres, postgres. Keys that PostgreSQL does not know are ignored with a warning.
    """
    slot: Annotated[Text, AfterValidator(_slot)]
    """Replication slot, made when missing, never dropped. Lower-case letters, digits and `_`."""
    publication: Annotated[Text, AfterValidator(_publication)]
    """Made when missing, with the tables that match, and extended when more do; one that somebody
    else made is checked and never changed.
    """
    tables: tuple[Annotated[Text, AfterValidator(_table_pattern)], ...]
    """`public.orders`; `orders` means `public.orders`; a part may end in `*` or `%` (`shop.*`,
    `shop.order_%`, `*.orders`). `[]` is every table of users. Case counts, `_` is an ordinary
    character.
    """
    start_position: Annotated[
        Literal["earliest", "latest"] | StartLsn, BeforeValidator(_start_position)
    ] = "earliest"
    """Where a new pipeline begins: the oldest change that the slot still holds, or now (for a new
    slot both are now), or at an LSN. Means nothing once the pipeline has a position.
    """
    on_schema_drift: Literal["adapt", "halt"] = "adapt"
    """What to do when another server took the source's place and its tables differ: go on with
    them, or stop. See "Another server" in [postgres.md](postgres.md).
    """
    snapshot: Snapshot | None = None
    """When and how the tables' present rows are read ([snapshots.md](snapshots.md))."""
    outbox: OutboxPrefixes | None = None
    """Which logical messages are events of outboxes; see [outbox](processors.md#outbox)."""

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
    """How to read it."""


class MysqlConfig(Block):
    """How to read a MySQL server."""

    id: Text
    """Names the source; part of every event id, and what the server id is derived from. Derived
    with a warning when absent: the pipeline's name.
    """
    dsn: SecretStr
    """`mysql://user:password@host:port/database?ssl-mode=VERIFY_CA&ssl-ca=...`, with the options
    `ssl-mode`, `ssl-ca`, `ssl-cert` and `ssl-key` of MySQL's own programs and no others.
    """
    tables: tuple[Annotated[Text, AfterValidator(_table_pattern)], ...] = ()
    """`shop.orders`; `orders` is that table in any database; a part may end in `*` or `%`. Left
    out or `[]`: every table of users. Case counts, `_` is an ordinary character.
    """
    on_schema_drift: Literal["adapt", "halt"] = "adapt"
    """What to do when another server took the source's place and its tables differ: go on with
    them, or stop. See "Another server" in [mysql.md](mysql.md).
    """
    snapshot: Snapshot | None = None
    """When and how the tables' present rows are read ([snapshots.md](snapshots.md))."""
    outbox: OutboxTables | None = None
    """Which tables are outboxes; see [outbox](processors.md#outbox)."""

    @model_validator(mode="after")
    def _check_outbox(self) -> MysqlConfig:
        for pattern in () if self.outbox is None else self.outbox.tables:
            if self.tables and not any(_share_a_table(pattern, one) for one in self.tables):
                raise ValueError(
                    f"outbox.tables: {pattern} fits no table that `tables` captures (an outbox is "
                    "read as other tables are: add it there, too)"
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
    """A MySQL source: the binary log, read as a replica reads it."""

    type: Literal["mysql"]
    config: MysqlConfig
    """How to read it."""


Source = Annotated[PostgresSource | MysqlSource | TursoSource, Field(discriminator="type")]


def position_type(source: Source) -> type[KnownPosition]:
    """Return what positions of a source are."""
    match source:
        case MysqlSource():
            return BinlogPosition
        case TursoSource():
            return TursoPosition
        case _:
            return LsnPosition
