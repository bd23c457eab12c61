"""The differences between two versions of a table, for people: one line each."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from deltaforge_dagster.state.schemas import SchemaVersion, TableHistory
from deltaforge_dagster.tables import Column, TableSchema


@dataclass(frozen=True, slots=True)
class SchemaDifference:
    """A difference of one column or of the key.

    `before` and `after` describe the column or key; None where it does not exist.
    """

    kind: Literal["added", "dropped", "changed", "moved", "key"]
    name: str
    before: str | None
    after: str | None

    def __str__(self) -> str:
        match self.kind:
            case "added":
                return f"+ {self.name} {self.after}"
            case "dropped":
                return f"- {self.name} {self.before}"
            case "moved":
                return f"~ {self.name}: column {self.before} -> {self.after}"
            case "changed":
                return f"~ {self.name}: {self.before} -> {self.after}"
        return f"~ key: {self.before} -> {self.after}"


def differences(
    before: TableSchema, after: TableSchema, others: Collection[str] = ()
) -> list[SchemaDifference]:
    """Return the differences between two versions of a table.

    Dropped columns come first, then other columns in the order of `after`, then the key.

    Args:
        before: The earlier version.
        after: The later version.
        others: Names that stand for different columns in the two versions.
    """
    old = {column.name: column for column in before.columns}
    new = {column.name: column for column in after.columns}
    deltas = [
        SchemaDifference("dropped", name, _described(column), None)
        for name, column in old.items()
        if name not in new or name in others
    ]
    for name, column in new.items():
        former = None if name in others else old.get(name)
        if former is None:
            deltas.append(SchemaDifference("added", name, None, _described(column)))
        elif _described(former) != _described(column) or former.type_oid != column.type_oid:
            deltas.append(SchemaDifference("changed", name, _described(former), _described(column)))
    old_order = [name for name in old if name in new]
    new_order = [name for name in new if name in old]
    for name in old_order:
        if old_order.index(name) != new_order.index(name):
            ordinals = (str(columns[name].ordinal_position) for columns in (old, new))
            deltas.append(SchemaDifference("moved", name, *ordinals))
    if before.primary_key != after.primary_key:
        deltas.append(SchemaDifference("key", "", _key(before), _key(after)))
    return deltas


def changes_of(history: TableHistory, version: SchemaVersion) -> list[SchemaDifference]:
    """Return the differences between a version and the previous one; none for the first."""
    before = history.before(version)
    if before is None:
        return []
    identities = version.columns.identities
    others = {
        name
        for name, identity in before.columns.identities.items()
        if identities.get(name, identity) != identity
    }
    return differences(before.table, version.table, others)


def _described(column: Column) -> str:
    return column.data_type + ("" if column.nullable else " not null")


def _key(table: TableSchema) -> str:
    return ", ".join(table.primary_key) or "none"
