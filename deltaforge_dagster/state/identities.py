"""Which column each name of a table version stands for.

Rows are journaled under the names that columns have at that time, and names move: a column is
renamed, another one is added under a name that was dropped, two columns swap names. So each column
of a version has an *identity*, a text that stays the same under other names and that no other
column of the table ever gets: the name under which it was first seen, `@`, and the sequence of the
version that had it first.

PostgreSQL numbers the columns of a table (`Column.number`). For MySQL the statements in the log say
what happens to columns (`ColumnChanges`). Where neither is known, columns go by their names; where
that may be wrong, all columns of the version get new identities that end with `?`, so that tables
with older rows are not written until they are loaded again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from deltaforge_dagster.tables import ColumnChanges, TableSchema

_UNCERTAIN = "?"


def is_certain(identity: str) -> bool:
    """Return whether it is known that no column of an earlier version was this one."""
    return not identity.endswith(_UNCERTAIN)


def dropped_name(identity: str) -> str:
    """Return the name of a dropped column in tables once another column has its former name.

    No other column gets this name.
    """
    name, _, sequence = identity.removesuffix(_UNCERTAIN).rpartition("@")
    return f"{name}_dropped_{sequence}"


@dataclass(frozen=True, slots=True)
class VersionColumns:
    """The columns of a table version.

    Attributes:
        identities: The identity of each column, by name.
        numbers: The number of each column (`Column.number`), by name; unknown ones are left out.
        relation: See `TableSchema.relation`.
        fills: The value that older rows have in each column that is new in this version, by name:
            JSON as in row images; None if that is not known.
    """

    identities: Mapping[str, str]
    numbers: Mapping[str, int] = field(default_factory=dict)
    relation: int | None = None
    fills: Mapping[str, str | None] = field(default_factory=dict)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """Return the columns that `to_fields` has described."""
        return cls(**fields)

    def to_fields(self) -> dict[str, Any]:
        """Return an object for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class KnownColumns:
    """What is known of the columns of a version that may be new.

    Attributes:
        same: By name, the identities of those columns that earlier versions had.
        fills: The fills (see `VersionColumns`) of the other columns.
        certain: Whether it is certain that the other columns are new, and not renamed ones.
    """

    same: Mapping[str, str]
    fills: Mapping[str, str | None]
    certain: bool

    def are(self, version: VersionColumns, had: Collection[str]) -> bool:
        """Return whether a registered version with the same definition has these columns.

        Args:
            version: Its columns.
            had: The identities of all columns that the table has had up to now.
        """
        taken = {*had, *self.same.values()}
        return all(
            identity == self.same[name]
            if name in self.same
            else identity not in taken and is_certain(identity) is self.certain
            for name, identity in version.identities.items()
        )

    def registered(self, table: TableSchema, sequence: int) -> VersionColumns:
        """Return the columns of a new version with this sequence number."""
        mark = "" if self.certain else _UNCERTAIN
        return VersionColumns(
            {
                column.name: self.same.get(column.name, f"{column.name}@{sequence}{mark}")
                for column in table.columns
            },
            {column.name: column.number for column in table.columns if column.number is not None},
            table.relation,
            self.fills,
        )


def known_columns(
    table: TableSchema,
    before: VersionColumns | None,
    versions: Iterable[VersionColumns],
    changes: ColumnChanges,
) -> KnownColumns:
    """Return which columns of a version the table had before.

    Args:
        table: The version.
        before: The columns of the version before; None for the first one.
        versions: The columns of all versions.
        changes: What statements have done since the version before came into force.
    """
    if before is None:
        return KnownColumns({}, {}, certain=True)
    numbered = all(column.number is not None for column in table.columns)
    if (
        table.relation is not None
        and numbered
        and before.relation == table.relation
        and before.numbers
    ):
        return _by_number(table, versions)
    return _by_name(table, before, changes)


def _by_number(table: TableSchema, versions: Iterable[VersionColumns]) -> KnownColumns:
    owners: dict[int, str] = {}
    for version in versions:
        if version.relation == table.relation:
            for name, number in version.numbers.items():
                owners[number] = version.identities[name]
    same = {
        column.name: owners[column.number]
        for column in table.columns
        if column.number is not None and column.number in owners
    }
    fills = {column.name: column.fill for column in table.columns if column.name not in same}
    return KnownColumns(same, fills, certain=True)


def _by_name(table: TableSchema, before: VersionColumns, changes: ColumnChanges) -> KnownColumns:
    if not (changes.certain and _names_suffice(table, before)):
        return KnownColumns(
            {}, dict.fromkeys(column.name for column in table.columns), certain=False
        )
    folded = {name.lower(): identity for name, identity in before.identities.items()}
    former = {new.lower(): old for new, old in changes.renamed.items()}
    added = {name.lower() for name in changes.added}
    same: dict[str, str] = {}
    for column in table.columns:
        name = column.name.lower()
        if name in added:
            continue
        former_name = former.get(name, column.name)
        identity = before.identities.get(former_name) or folded.get(former_name.lower())
        if identity is not None and identity not in same.values():
            same[column.name] = identity
    stated = {name.lower(): fill for name, fill in changes.fills.items()}
    fills = {
        column.name: None if column.hidden else stated.get(column.name.lower(), column.fill)
        for column in table.columns
        if column.name not in same
    }
    return KnownColumns(same, fills, certain=True)


def _names_suffice(table: TableSchema, before: VersionColumns) -> bool:
    """Return whether names identify columns, although their numbers are not known.

    A database that numbers columns does not reorder them. So a column that has another place among
    the others, or appeared while another one disappeared, may be a renamed one. The columns of a
    table that was created again (another relation) go by their names.
    """
    if table.relation is None or before.relation not in {None, table.relation}:
        return True
    names = [column.name for column in table.columns]
    kept = [name for name in before.identities if name in names]
    if names[: len(kept)] != kept:
        return False
    return len(kept) == len(names) or len(kept) == len(before.identities)
