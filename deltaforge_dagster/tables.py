"""Table versions: the columns and key of a table from some log position on.

A source builds a version as of a log position, the state store numbers
the versions, and each row has the stamp of the version with which it was decoded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal, Self


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table version.

    Attributes:
        name: Its name.
        data_type: Its type in the database's notation; for an ENUM or SET of MySQL with the labels.
        type_oid: PostgreSQL: OID of the type; None for other databases.
        nullable: Whether it may be null, as far as the source knows.
        ordinal_position: Its number in the table: 1, 2, 3 ...
        number: Its number in the database's catalog, which does not change when it is renamed
            (PostgreSQL); None if it has none, or if the number is unknown. Identifies the column,
            but is not part of the version.
        fill: The value that existing rows got when the column was added, as JSON as in row images;
            `null` without a default; None if it is unknown. Not a part of the version either.
        hidden: Whether a column rule replaces its values. Not a part of the version either.
    """

    name: str
    data_type: str
    type_oid: int | None
    nullable: bool
    ordinal_position: int
    number: int | None = field(default=None, compare=False)
    fill: str | None = field(default=None, compare=False)
    hidden: bool = field(default=False, compare=False)


TableFate = Literal["dropped", "made", "kept"]
"""What a statement does to a table name: after `dropped` no table has it (the table was dropped or
renamed); `made` creates a table, if there is none; `kept` gives the name to a table that already
exists."""


@dataclass(frozen=True, slots=True)
class LoggedTable:
    """A table whose changes are in the source's log.

    Attributes:
        identity: An identifier that no other table ever has, not even a later one with the same
            name.
        whole: Whether the log has all of its changes since it was created.
        empty: Whether it has never had a row, as far as is known.
    """

    identity: str
    whole: bool
    empty: bool


@dataclass(frozen=True, slots=True)
class TableSchema:
    """A version of a table, with which the rows after some position are decoded.

    Attributes:
        db: Name of the database.
        schema: Name of the schema; None if the source has no schemas.
        table: Name of the table.
        columns: Its columns, in the table's order.
        primary_key: Names of the columns of the rows' `key`; empty without one.
        relation: PostgreSQL: OID of the table, within which columns have numbers; None for other
            databases. Not a part of the version.
    """

    db: str
    schema: str | None
    table: str
    columns: tuple[Column, ...]
    primary_key: tuple[str, ...]
    relation: int | None = field(default=None, compare=False)

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
        columns = tuple(Column(**column) for column in fields["columns"])
        key = tuple(fields["primary_key"])
        return cls(
            fields["db"], fields["schema"], fields["table"], columns, key, fields.get("relation")
        )


@dataclass(frozen=True, slots=True)
class ColumnChanges:
    """What statements have done to the columns of a table.

    Needed for databases whose columns have no numbers. Names are compared without regard to case.

    Attributes:
        renamed: By name after the statements, the name before them.
        added: Columns that were added, under their names after the statements.
        dropped: Columns that were dropped, under their names before the statements.
        fills: The values that existing rows got in added columns, by name; see `Column.fill`.
        perhaps: Columns that were added only if no column had the name (`ADD COLUMN IF NOT
            EXISTS`).
        certain: Whether all of the statements were understood.
    """

    renamed: Mapping[str, str] = field(default_factory=dict)
    added: frozenset[str] = frozenset()
    dropped: frozenset[str] = frozenset()
    fills: Mapping[str, str] = field(default_factory=dict)
    perhaps: frozenset[str] = frozenset()
    certain: bool = True

    def then(self, later: ColumnChanges) -> ColumnChanges:
        """Return the combined effect of these changes, followed by later ones."""
        before = {new.lower(): old for new, old in self.renamed.items()}
        added = {name.lower() for name in self.added}
        dropped = {name.lower() for name in self.dropped}
        taken_away = {name.lower() for name in (*later.dropped, *later.renamed.values())}
        kept = {new: old for new, old in self.renamed.items() if new.lower() not in taken_away}
        renamed = {
            new: before.get(old.lower(), old)
            for new, old in later.renamed.items()
            if old.lower() not in added
        }
        moved = {new: old for new, old in later.renamed.items() if old.lower() in added}
        fills = {name.lower(): fill for name, fill in self.fills.items()}
        # Names that no column has after these changes: dropped or renamed, and not taken
        # again. A later `ADD COLUMN IF NOT EXISTS` with such a name does add the column.
        free = {*dropped, *(old.lower() for old in self.renamed.values())} - before.keys() - added
        readded = {name for name in later.perhaps if name.lower() in free}
        return ColumnChanges(
            renamed={**kept, **renamed},
            added=frozenset(
                {name for name in self.added if name.lower() not in taken_away}
                | moved.keys()
                | later.added
                | readded
            ),
            dropped=self.dropped
            | {
                before.get(name.lower(), name)
                for name in later.dropped
                if name.lower() not in added
            },
            fills={
                **{
                    name: fill
                    for name, fill in self.fills.items()
                    if name.lower() not in taken_away
                },
                **{new: fills[old.lower()] for new, old in moved.items() if old.lower() in fills},
                **later.fills,
            },
            perhaps=self.perhaps | later.perhaps - readded,
            certain=self.certain and later.certain,
        )

    def to_json(self) -> str:
        """Return the text that `from_json` reads back."""
        fields = {
            "renamed": dict(self.renamed), "added": sorted(self.added),
            "dropped": sorted(self.dropped), "fills": dict(self.fills),
            "perhaps": sorted(self.perhaps), "certain": self.certain,
        }  # fmt: skip
        return json.dumps(fields, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the changes that `to_json` wrote."""
        fields = json.loads(text)
        for name in ("added", "dropped", "perhaps"):
            fields[name] = frozenset(fields[name])
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class ColumnDetails:
    """Properties of a column that are only in the current catalog, not in the log.

    Attributes:
        nullable: Whether the column accepts NULL.
        default: The default in the catalog's notation; None without one, and for a column whose
            values are hidden.
        extra: How the database generates its values, such as `auto_increment`; empty if it does
            not.
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
    combined = [*(version for version in older if version not in newer), *newer]
    return combined[0] if len(combined) == 1 else combined
