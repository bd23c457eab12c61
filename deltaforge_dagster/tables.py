"""Table versions: how a table looked from some position of the log on.

A source makes them from what the log says (never from today's catalog), the state store gives
them numbers, and rows carry the stamp of the version they were decoded with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Self


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

    def to_json(self) -> str:
        """Return the text that `from_json` reads back."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the version that `to_json` wrote."""
        fields = json.loads(text)
        columns = tuple(Column(**one) for one in fields["columns"])
        key = tuple(fields["primary_key"])
        return cls(fields["db"], fields["schema"], fields["table"], columns, key)


@dataclass(frozen=True, slots=True)
class ColumnDetails:
    """What a catalog says of a column now, and the log does not.

    Attributes:
        nullable: Whether the database takes NULL.
        default: The default as the catalog writes it; None without one, and for a column whose values are hidden.
        extra: How the database makes its values, such as `auto_increment`; empty where it does not.
    """

    nullable: bool
    default: str | None
    extra: str


@dataclass(frozen=True, slots=True)
class TableDetails:
    """What a catalog says of a table now, and the log does not.

    Attributes:
        columns: Its columns by name.
        engine: MySQL's storage engine; None elsewhere, as are the next two.
        charset: The character set of new text columns.
        collation: Their collation.
    """

    columns: Mapping[str, ColumnDetails]
    engine: str | None = None
    charset: str | None = None
    collation: str | None = None


@dataclass(frozen=True, slots=True)
class SchemaStamp:
    """A registered table version: fingerprint, version of the table, global sequence."""

    fingerprint: str
    version: int
    sequence: int


Contained = str | Sequence[str]
"""Fingerprint of the one version that rows of a table have, or those of several in the rows' order."""


def fingerprints(contained: Contained) -> list[str]:
    """Return the fingerprints of the versions that rows have, the newest last."""
    return [contained] if isinstance(contained, str) else list(contained)


def contained(before: Contained | None, after: Contained) -> Contained:
    """Return the versions of rows that follow one another, each where it came last."""
    older = [] if before is None else fingerprints(before)
    newer = fingerprints(after)
    found = [*(one for one in older if one not in newer), *newer]
    return found[0] if len(found) == 1 else found
