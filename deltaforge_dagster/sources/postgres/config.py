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

from deltaforge_dagster.config.blocks import Block, Text, resolved
from deltaforge_dagster.config.secrets import mask
from deltaforge_dagster.config.sources.base import OnSchemaDrift, SourceConfig, TablePattern
from deltaforge_dagster.config.sources.snapshot import Snapshot
from deltaforge_dagster.config.urls import check_encoded
from deltaforge_dagster.errors import CorruptLog, SpecError
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
    """Patterns of prefixes of logical messages; `*` and `%` match any text. Messages that match have the
    schema `__outbox` instead of `__wal_message`.
    """


class PostgresSourceConfig(SourceConfig):
    """How to read the database."""

    dsn: SecretStr
    """`postgres://user:password@host:port/database?sslmode=...`, or `host=... port=... user=...
    password=... dbname=...` (or `database=`). Defaults of the second form for host, port, user and
    database: localhost, 5432, postgres, postgres. Keys that PostgreSQL does not know are ignored with a
    warning.
    """
    slot: Annotated[Text, AfterValidator(_slot)]
    """Replication slot; created if missing. Only `deltaforge checkpoint reset --all` drops it, if nothing can be
    read from it any more. Lower-case letters, digits and `_`.
    """
    publication: Annotated[Text, AfterValidator(_publication)]
    """Publication; created if missing, with the tables that match, and extended when more tables match.
    A publication that somebody else created is checked and never changed.
    """
    tables: tuple[TablePattern, ...]
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
    on_schema_drift: OnSchemaDrift = "adapt"
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


DSN_DEFAULTS = {"host": "localhost", "port": "5432", "user": "postgres", "dbname": "postgres"}
"""Defaults of a `key=value` connection string."""

_PAIR = re.compile(
    r"(?sa)\s*(\w+)\s*=\s*('(?:[^'\\]|\\.)*'|(?:\\.|[^\s'\\])(?:\\.|[^\s\\])*|)(?=\s|\Z)"
)


def postgres_dsn(text: str) -> tuple[str, tuple[str, ...]]:
    """Return `text` as a connection string that libpq accepts, and the names of ignored keys.

    Both forms of the manual ("Connection Strings") are accepted: a URL, and `key=value` pairs. In the
    second form, `database` is a synonym for `dbname`, missing keys have fixed defaults (libpq would
    use environment variables and the operating system's user), and keys that libpq does not know are
    ignored.

    Raises:
        SpecError: The text has neither form. The message does not quote the text.
    """
    import psycopg  # noqa: PLC0415 - the client library
    from psycopg import conninfo  # noqa: PLC0415

    ignored: tuple[str, ...] = ()
    if not text.startswith(("postgres://", "postgresql://")):
        text, ignored = _from_pairs(text)
    else:
        check_encoded(text)
    try:
        conninfo.conninfo_to_dict(text)
    except psycopg.ProgrammingError:
        valid = False  # libpq's message quotes the text, including the password
    else:
        valid = True
    if not valid:
        raise SpecError(_WRONG)
    return text, ignored


_WRONG = (
    "is not a PostgreSQL connection string (write postgres://user:password@host:port/database, "
    "with special characters of the password percent-encoded, or host=... user=... password=...)"
)


def _from_pairs(text: str) -> tuple[str, tuple[str, ...]]:
    from psycopg import conninfo, pq  # noqa: PLC0415 - the client library

    known = {option.keyword.decode() for option in pq.Conninfo.get_defaults()}
    kept = dict(DSN_DEFAULTS)
    ignored: list[str] = []
    at = 0
    end = len(text.rstrip())
    while at < end:
        pair = _PAIR.match(text, at)
        if pair is None:
            raise SpecError(_WRONG)
        key = "dbname" if pair[1] == "database" else pair[1]
        if key in known:
            value = pair[2][1:-1] if pair[2].startswith("'") else pair[2]
            kept[key] = re.sub(r"\\(.)", r"\1", value, flags=re.DOTALL)
        else:
            ignored.append(pair[1])
        at = pair.end()
    if kept == DSN_DEFAULTS and end == 0:
        raise SpecError(_WRONG)
    return conninfo.make_conninfo("", **kept), tuple(ignored)
