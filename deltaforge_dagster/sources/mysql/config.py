"""The `mysql` source of a pipeline file."""

from __future__ import annotations

from typing import Annotated

from pydantic import (
    AfterValidator,
    Field,
    SecretStr,
    field_serializer,
    field_validator,
    model_validator,
)

from deltaforge_dagster.config.blocks import Block, Text, resolved
from deltaforge_dagster.config.globs import overlap, table_parts
from deltaforge_dagster.config.secrets import mask
from deltaforge_dagster.config.sources.base import OnSchemaDrift, SourceConfig, TablePattern
from deltaforge_dagster.config.sources.snapshot import Snapshot
from deltaforge_dagster.errors import SpecError
from deltaforge_dagster.sources.mysql.dsn import mysql_dsn


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


class OutboxTables(Block):
    """Which tables are outboxes."""

    tables: Annotated[
        tuple[Annotated[Text, AfterValidator(_outbox_pattern)], ...], Field(min_length=1)
    ]
    """Patterns of outbox tables, `database.table` or `table` in any database; `*` and `%` match any text,
    anywhere. The source's `tables` must capture them, too.
    """


class MysqlSourceConfig(SourceConfig):
    """How to read the server's binary log."""

    id: Text
    """Identifies the source; part of every event id, and the replica's server id is derived from it. If
    absent, the pipeline's name is used, with a warning.
    """
    dsn: SecretStr
    """`mysql://user:password@host:port/database?ssl-mode=VERIFY_CA&ssl-ca=...`, with the options
    `ssl-mode`, `ssl-ca`, `ssl-cert` and `ssl-key` of MySQL's own programs; other options are rejected.
    """
    tables: tuple[TablePattern, ...] = ()
    """Tables to capture: `shop.orders`; `orders` means that table in any database; a part may end in `*`
    or `%`. Absent or `[]` means every user table. Case-sensitive; `_` is an ordinary character.
    """
    on_schema_drift: OnSchemaDrift = "adapt"
    """What to do when another server has taken the source's place and its tables differ: continue with
    them, or stop. See "Another server" in [mysql.md](mysql.md).
    """
    snapshot: Snapshot | None = None
    """When and how the existing rows of the tables are read ([snapshots.md](snapshots.md))."""
    outbox: OutboxTables | None = None
    """Which tables are outboxes; see [outbox](processors.md#outbox)."""

    @model_validator(mode="after")
    def _check_outbox(self) -> MysqlSourceConfig:
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
