"""Types of PostgreSQL's columns: those of new tables, and which columns hold which values.

Types are named as `format_type` names them: `bigint`, `numeric(10,2)`, `timestamp with time zone`,
`text[]`.
"""

from __future__ import annotations

import re

from deltaforge_dagster.sources.value_types import ValueType
from deltaforge_dagster.typed_rows.schema import TargetTypes, TypedColumn

TARGET_TYPES = TargetTypes(unsigned=False, own_equality=True)
"""What a column can be: all but unsigned integers."""

TEXT = "text"
_SCALARS = {
    "boolean": "boolean",
    "text": TEXT,
    "json": "json",
    "binary": "bytea",
    "geometry": "bytea",
    "uuid": "uuid",
    "date": "date",
    "time": "time without time zone",
}
_INTEGERS = {8: "smallint", 16: "smallint", 32: "integer", 64: "bigint"}
_DIGITS = {"smallint": 5, "integer": 10, "bigint": 19}
"""Integers from the narrowest to the widest, and the digits of their largest values."""
_EXACT = {"real": {"smallint"}, "double precision": {"smallint", "integer", "real"}}
"""Types whose values are all exact as floating-point numbers."""
_NUMERIC = re.compile(r"numeric\((\d+),(\d+)\)")
_LIKE_TEXT = {"boolean", "date", "uuid", "json", "jsonb", *_DIGITS}
"""Types whose text in PostgreSQL is the text that a column of type `text` would have."""

_OWN_TEXT = re.compile(
    r"numeric|interval|inet|cidr|macaddr8?|time(\(\d\))? with time zone|(bit|bit varying)(\(\d+\))?"
)
"""Types of PostgreSQL that typed rows have as text.

The text is PostgreSQL's own, so a column can have the type itself.
"""
_EXACT_TEXT = {
    TEXT, "character varying", "numeric", "interval", "inet", "cidr", "macaddr", "macaddr8",
    "bit varying", "time with time zone",
}  # fmt: skip
"""Types that store a text exactly or refuse it. With a length, a cast would truncate or round."""
_COMPARED_AS_TEXT = re.compile(
    r"(numeric\(|real|double|boolean|smallint|integer|bigint|uuid|bytea"
    r"|date|timestamp|time|inet|cidr|macaddr|bit).*"
    r"|text|character varying.*"
)
"""Types in which values that differ in typed rows are never equal.

Floats are among them, because typed rows have only one zero and one NaN in keys.
"""
_STAGED_AS_TEXT = {"decimal", "json", "list"}
"""Kinds of values that are sent as text, which the server reads as the column's type."""


def column_type(type_: ValueType) -> str:
    """Return the type of a column with such values; unsigned integers have none."""
    match type_.kind:
        case "integer":
            assert type_.signed
            return _INTEGERS[type_.bits]
        case "float":
            return "real" if type_.bits == 32 else "double precision"
        case "decimal":
            return f"numeric({type_.precision},{type_.scale})"
        case "timestamp":
            return f"timestamp {'with' if type_.zone else 'without'} time zone"
        case "list":
            assert type_.element is not None
            return f"{_element(type_.element)}[]"
        case _:
            return _SCALARS[type_.kind]


def new_type(column: TypedColumn, *, declared: bool) -> str:
    """Return the type of a new column.

    What the source's PostgreSQL has as `jsonb`, `numeric`, `inet` and so on is the same here,
    unless the file declares a type.
    """
    source = column.source_type or ""
    if not declared and column.type.kind == "json" and source == "jsonb":
        return source
    if not declared and column.type.kind == "text" and _OWN_TEXT.fullmatch(source):
        return source
    return column_type(column.type)


def staged_type(type_: ValueType) -> str:
    """Return the type in which the values are sent."""
    return TEXT if type_.kind in _STAGED_AS_TEXT else column_type(type_)


def takes(existing: str, column: TypedColumn, *, enum: bool) -> bool:
    """Return whether a column of a table never stores a value of a source's column changed.

    It takes every value as it is, or the server refuses the value with an error.

    Args:
        existing: The type of the table's column.
        column: The source's column.
        enum: Whether the table's column has an enumerated type.
    """
    wanted = column_type(column.type)
    if column.type.kind == "text":
        # The server reads the text as it reads its own, and refuses what is none of the type's
        # values.
        return existing in _EXACT_TEXT or existing == column.source_type or enum
    return holds(existing, wanted)


def holds(wide: str, narrow: str) -> bool:
    """Return whether a column of type `wide` holds each value of type `narrow` exactly.

    A cast converts the values.
    """
    same = wide == narrow or (wide, narrow) == ("jsonb", "json")
    number = narrow in _DIGITS or bool(_NUMERIC.fullmatch(narrow))
    as_text = wide == TEXT and (narrow in _LIKE_TEXT or number)
    as_float = narrow in _EXACT.get(wide, ())
    as_integer = _DIGITS.get(wide, 0) > _DIGITS.get(narrow, 99)
    as_number = wide == "numeric" and number
    return same or as_text or as_float or as_integer or as_number or _holds_numeric(wide, narrow)


def is_exact(type_: str) -> bool:
    """Return whether no two different values of typed rows are equal in a column of a type.

    In `numeric` 10.0 and 10.00 are equal, in `interval` a day and 24 hours, in `jsonb` documents
    with such numbers, in `citext` what differs in case only. What is not known is not exact,
    either.
    """
    return _COMPARED_AS_TEXT.fullmatch(type_) is not None


def _holds_numeric(wide: str, narrow: str) -> bool:
    if (target := _NUMERIC.fullmatch(wide)) is None:
        return False
    digits, scale = int(target[1]), int(target[2])
    if (source := _NUMERIC.fullmatch(narrow)) is not None:
        return scale >= int(source[2]) and digits - scale >= int(source[1]) - int(source[2])
    return digits - scale >= _DIGITS.get(narrow, 99)


def _element(type_: ValueType) -> str:
    """Return the type of an array's elements.

    An array of arrays has more dimensions, which its type does not say.
    """
    return column_type(type_).removesuffix("[]")
