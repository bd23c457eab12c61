"""The columns of a table over several of its versions.

The rows of a commit may have several table versions. They are added to a table together, so they get the
columns of all versions, each with a type that holds the values of all of them exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from deltaforge_dagster.errors import TableRejected
from deltaforge_dagster.sources.value_types import MAX_DIGITS, ValueType, list_of
from deltaforge_dagster.typed_rows.schema import TypedSchema


def union(versions: Sequence[TypedSchema], table: str) -> TypedSchema:
    """Return the columns of the newest version, then those that only older ones have.

    Args:
        versions: The versions, oldest first; at least one.
        table: The name of the table, for errors.

    Raises:
        TableRejected: No type holds the values of a column in all versions.
    """
    *older, newest = versions
    columns = {column.name: column for column in newest.columns}
    for version in reversed(older):
        for column in version.columns:
            known = columns.setdefault(column.name, column)
            type_ = wider(known.type, column.type)
            if type_ is None:
                raise TableRejected(
                    f"table {table}: column {column.name} was {column.type.name} and became {known.type.name}, and no "
                    f"type holds the values of both; declare it as text under `types`, and make the column of an "
                    f"existing table text"
                )
            columns[column.name] = replace(known, type=type_)
    return replace(newest, columns=tuple(columns.values()))


def wider(one: ValueType, other: ValueType) -> ValueType | None:
    """Return the type that has the values of both types, None if there is none."""
    if one == other:
        return one
    match one.kind, other.kind:
        case ("integer", "integer") | ("float", "float") if replace(one, bits=other.bits) == other:
            return max(one, other, key=lambda type_: type_.bits)
        case ("decimal", "decimal"):
            return _wider_decimal(one, other)
        case ("list", "list"):
            assert one.element is not None
            assert other.element is not None
            element = wider(one.element, other.element)
            return None if element is None else list_of(element)
        case _:
            # A form is read beside the usual one, so it has the values of both. Geometries have no usual form.
            pairs = ((one, other), (other, one))
            return next((a for a, b in pairs if replace(a, form="plain") == b), None)


def _wider_decimal(one: ValueType, other: ValueType) -> ValueType | None:
    scale = max(one.scale, other.scale)
    digits = max(one.precision - one.scale, other.precision - other.scale) + scale
    return None if digits > MAX_DIGITS else replace(one, precision=digits, scale=scale)
