"""The columns of a table over several of its versions.

The rows of a commit may have several table versions. They are added to a table together, so they get the
columns of all versions, each with a type that holds the values of all of them exactly.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from deltaforge_dagster.config.engine.engine import ValueOptions
from deltaforge_dagster.errors import TableRejected
from deltaforge_dagster.sources.registry import SourceType
from deltaforge_dagster.sources.value_types import MAX_DIGITS, ValueType, list_of
from deltaforge_dagster.tables import Column
from deltaforge_dagster.typed_rows.schema import TypedSchema

_TIMES = {"time", "timestamp"}
_DIGITS = re.compile(r"\((\d)\)")
_PADDED = re.compile(r"(character|char|binary)\(\d+\)")
_FLOAT_DIGITS = {32: 7, 64: 15}
"""Digits of the whole numbers that a float has exactly, by its bits."""


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
                    f"type holds the values of both. Load the table again; if this happens often, declare the column as text "
                    f"under `types` before"
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


def keeps_values(old: Column, new: Column, kind: SourceType[Any], options: ValueOptions) -> bool:
    """Return whether a column's values certainly stay what they are when the source gives it another type.

    Otherwise the source may have converted those that were there: rounded a number, cut off a time, or computed another
    value (`ALTER TABLE ... USING`). Texts that got less room count as kept: what is too long is refused.
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
    given = _DIGITS.search(data_type)
    return kind.second_digits if given is None else int(given[1])


def _wider_decimal(one: ValueType, other: ValueType) -> ValueType | None:
    scale = max(one.scale, other.scale)
    digits = max(one.precision - one.scale, other.precision - other.scale) + scale
    return None if digits > MAX_DIGITS else replace(one, precision=digits, scale=scale)
