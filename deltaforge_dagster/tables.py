"""Table versions: the columns and key of a table from some log position on.

A source builds a version as of a log position, the state store numbers
the versions, and each row has the stamp of the version with which it was decoded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Self


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table version.

    Attributes:
        name: Its name.
        data_type: Its type in the database's notation; for an ENUM or SET of MySQL with the labels.
        type_oid: PostgreSQL: OID of the type; None for other databases.
        nullable: Whether it may be null, as far as the source knows.
        ordinal_position: Its number in the table: 1, 2, 3 ...
        former: Its name in the version before, if the source knows that it was renamed since. Not a part of the version: it
            says how this version came about.
    """

    name: str
    data_type: str
    type_oid: int | None
    nullable: bool
    ordinal_position: int
    former: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class TableSchema:
    """A version of a table, with which the rows after some position are decoded.

    Attributes:
        db: Name of the database.
        schema: Name of the schema; None if the source has no schemas.
        table: Name of the table.
        columns: Its columns, in the table's order.
        primary_key: Names of the columns of the rows' `key`; empty without one.
    """

    db: str
    schema: str | None
    table: str
    columns: tuple[Column, ...]
    primary_key: tuple[str, ...]

    @property
    def full_name(self) -> str:
        """`schema.table`, or `db.table` if the source has no schemas."""
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
    """Properties of a column that are only in the current catalog, not in the log.

    Attributes:
        nullable: Whether the column accepts NULL.
        default: The default in the catalog's notation; None without one, and for a column whose values are
            hidden.
        extra: How the database generates its values, such as `auto_increment`; empty if it does not.
    """

    nullable: bool
    default: str | None
    extra: str


@dataclass(frozen=True, slots=True)
class TableDetails:
    """Properties of a table that are only in the current catalog, not in the log.

    Attributes:
        columns: Its columns by name.
        engine: MySQL: the storage engine; None for other databases.
        charset: MySQL: the default character set of new text columns.
        collation: MySQL: the default collation of new text columns.
    """

    columns: Mapping[str, ColumnDetails]
    engine: str | None = None
    charset: str | None = None
    collation: str | None = None


@dataclass(frozen=True, slots=True)
class SchemaStamp:
    """The identifiers of a registered table version.

    Attributes:
        fingerprint: Hash of its content, `sha256:...`.
        version: Number of the version of this table: 1, 2, 3 ...
        sequence: Number of the version among those of all tables of the pipeline.
    """

    fingerprint: str
    version: int
    sequence: int


Contained = str | Sequence[str]
"""The fingerprint of the table version of some rows, or of several versions in the rows' order."""


def fingerprints(contained: Contained) -> list[str]:
    """Return the fingerprints of the versions as a list, the newest last."""
    return [contained] if isinstance(contained, str) else list(contained)


def contained(before: Contained | None, after: Contained) -> Contained:
    """Combine the versions of earlier and later rows, ordered by the last occurrence of each."""
    older = [] if before is None else fingerprints(before)
    newer = fingerprints(after)
    found = [*(one for one in older if one not in newer), *newer]
    return found[0] if len(found) == 1 else found
