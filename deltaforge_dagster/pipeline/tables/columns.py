"""Combines the columns of several versions of a table.

The rows of a commit may have several table versions. They are added to a table together, so they
get the columns of all versions, each with a type that represents the values of all versions
exactly.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from deltaforge_dagster.config.engine import ValueOptions
from deltaforge_dagster.errors import TableRejected
from deltaforge_dagster.sources.registry import SourceType
from deltaforge_dagster.sources.value_types import MAX_DIGITS, ValueType, list_of
from deltaforge_dagster.tables import Column
from deltaforge_dagster.typed_rows.schema import TypedSchema

_TIMES = {"time", "timestamp"}
_DIGITS = re.compile(r"\((\d)\)")
_PADDED = re.compile(r"(character|char|binary)\(\d+\)")
_FLOAT_DIGITS = {32: 7, 64: 15}
"""Number of decimal digits of integers that a float of so many bits represents exactly."""


def union(versions: Sequence[TypedSchema], table: str) -> TypedSchema:
    """Return the columns of the newest version, then those that only older versions have.

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
            newer = columns.setdefault(column.name, column)
            type_ = wider(newer.type, column.type)
            if type_ is None:
                raise TableRejected(
                    f"table {table}: column {column.name} was {column.type.name} and became "
                    f"{newer.type.name}, and no type holds the values of both. Load "
                    f"the table again; if this happens often, declare the column as text under "
                    f"`types` before"
                )
            columns[column.name] = replace(newer, type=type_)
    return replace(newest, columns=tuple(columns.values()))


def wider(left: ValueType, right: ValueType) -> ValueType | None:
    """Return the type that represents the values of both types; None if there is none."""
    if left == right:
        return left
    match left.kind, right.kind:
        case ("integer", "integer") | ("float", "float") if replace(left, bits=right.bits) == right:
            return max(left, right, key=lambda type_: type_.bits)
        case ("decimal", "decimal"):
            return _wider_decimal(left, right)
        case ("list", "list"):
            assert left.element is not None
            assert right.element is not None
            element = wider(left.element, right.element)
            return None if element is None else list_of(element)
        case _:
            # A type in a special form also reads values in the plain form, so it represents both.
            # Geometries have no plain form.
            pairs = ((left, right), (right, left))
            return next((a for a, b in pairs if replace(a, form="plain") == b), None)


def keeps_values(old: Column, new: Column, kind: SourceType[Any], options: ValueOptions) -> bool:
    """Return whether a column's values certainly stay the same when the source changes its type.

    Otherwise the source may have converted existing values: rounded a number, truncated a time, or
    computed another value (`ALTER TABLE ... USING`). Values of a text type that became shorter
    count as kept: values that are too long are refused.
    """
    if old.data_type == new.data_type:
        return True
    if any(_PADDED.fullmatch(column.data_type) for column in (old, new)):
        return False
    before, after = kind.value_type(old, options), kind.value_type(new, options)
    if before.kind in _TIMES and before.kind == after.kind:
        digits = [_second_digits(column.data_type, kind) for column in (old, new)]
        return before.zone == after.zone and digits[0] <= digits[1]
    if before.kind == "integer" and after.kind in {"decimal", "float"}:
        whole = (
            after.precision - after.scale if after.kind == "decimal" else _FLOAT_DIGITS[after.bits]
        )
        return whole >= len(str(2**before.bits))
    return after.kind == "text" or wider(before, after) == after


def _second_digits(data_type: str, kind: SourceType[Any]) -> int:
    digits = _DIGITS.search(data_type)
    return kind.second_digits if digits is None else int(digits[1])


def _wider_decimal(left: ValueType, right: ValueType) -> ValueType | None:
    scale = max(left.scale, right.scale)
    digits = max(left.precision - left.scale, right.precision - right.scale) + scale
    return None if digits > MAX_DIGITS else replace(left, precision=digits, scale=scale)
