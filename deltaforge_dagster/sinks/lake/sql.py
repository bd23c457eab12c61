"""Text of Spark SQL: names, literals, types, and which types hold the values of which others.

Types are written as Spark writes them: `bigint`, `decimal(10,2)`, `array<string>`.
"""

from __future__ import annotations

import re

from deltaforge_dagster.sources.value_types import ValueType

_SCALARS = {
    "boolean": "boolean",
    "text": "string",
    "json": "string",
    "binary": "binary",
    "geometry": "binary",
    "uuid": "string",
    "date": "date",
    "time": "string",
}
_INTEGERS = {8: "tinyint", 16: "smallint", 32: "int", 64: "bigint"}
_DIGITS = {"tinyint": 3, "smallint": 5, "int": 10, "bigint": 19}
"""Integer types from the narrowest to the widest, with the digits of their largest values."""
_EXACT = {"float": {"tinyint", "smallint"}, "double": {"tinyint", "smallint", "int", "float"}}
"""By floating-point type, the types whose values it represents exactly."""
_DECIMAL = re.compile(r"decimal\((\d+),(\d+)\)")
_LIKE_TEXT = {"boolean", "date", *_DIGITS}
"""Types whose text in Spark is the text that a column of type `text` would have."""


def quoted(*names: str) -> str:
    """Return the quoted name with these parts."""
    return ".".join(f"`{name.replace('`', '``')}`" for name in names)


def literal(value: str) -> str:
    """Return a string literal."""
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def sql_type(type_: ValueType) -> str:
    """Return the type of a column with such values; unsigned integers are not supported."""
    match type_.kind:
        case "integer":
            assert type_.signed
            return _INTEGERS[type_.bits]
        case "float":
            return "float" if type_.bits == 32 else "double"
        case "decimal":
            return f"decimal({type_.precision},{type_.scale})"
        case "timestamp":
            return "timestamp" if type_.zone else "timestamp_ntz"
        case "list":
            assert type_.element is not None
            return f"array<{sql_type(type_.element)}>"
        case _:
            return _SCALARS[type_.kind]


def holds(wide: str, narrow: str) -> bool:
    """Return whether a cast from type `narrow` to type `wide` keeps each value exactly."""
    same = wide == narrow
    as_text = wide == "string" and (narrow in _LIKE_TEXT or bool(_DECIMAL.fullmatch(narrow)))
    as_float = narrow in _EXACT.get(wide, ())
    as_integer = _DIGITS.get(wide, 0) > _DIGITS.get(narrow, 99)
    return same or as_text or as_float or as_integer or _holds_decimal(wide, narrow)


def is_ordered(type_: str) -> bool:
    """Return whether bounds of a column's values tell well which files can have a value."""
    return type_ in {*_DIGITS, "date", "timestamp", "timestamp_ntz"} or bool(_DECIMAL.match(type_))


def _holds_decimal(wide: str, narrow: str) -> bool:
    if (target := _DECIMAL.fullmatch(wide)) is None:
        return False
    digits, scale = int(target[1]), int(target[2])
    if (source := _DECIMAL.fullmatch(narrow)) is not None:
        return scale >= int(source[2]) and digits - scale >= int(source[1]) - int(source[2])
    return digits - scale >= _DIGITS.get(narrow, 99)
