"""Table versions: how a table looked from some position of the log on.

A source makes them from what the log says (never from today's catalog), the state store gives
them numbers, and rows carry the stamp of the version they were decoded with.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table version, as the log and the catalog describe it."""

    name: str
    data_type: str
    type_oid: int | None
    nullable: bool
    ordinal_position: int


@dataclass(frozen=True, slots=True)
class TableSchema:
    """A version of a table: what the rows after some position are decoded with."""

    db: str
    schema: str | None
    table: str
    columns: tuple[Column, ...]
    primary_key: tuple[str, ...]

    @property
    def full_name(self) -> str:
        """`schema.table`, or `db.table` where the source has no schemas."""
        return f"{self.schema or self.db}.{self.table}"


@dataclass(frozen=True, slots=True)
class SchemaStamp:
    """A registered table version: fingerprint, version of the table, global sequence."""

    fingerprint: str
    version: int
    sequence: int
