"""What a source's column is in ClickHouse, and which types of an existing table hold its values."""

from __future__ import annotations

import re

from deltaforge_dagster.sources.value_types import ValueType

VERSION, DELETED, OP, TIME, EVENT = "_version", "_deleted", "_op", "_source_ts", "_event_id"
"""The columns that tables have beside those of the source."""

ROW_COLUMNS = (OP, VERSION, DELETED, TIME)
"""Those of them that every table has, in every mode."""

MOMENT = "DateTime64(6, 'UTC')"
"""The type of timestamps. One without a time zone has the same date and time as in the source."""

_SCALARS = {
    "boolean": "Bool",
    "text": "String",
    "json": "String",
    "binary": "String",
    "geometry": "String",
    "uuid": "UUID",
    "date": "Date32",
    "timestamp": MOMENT,
}


def own_columns(mode: str) -> dict[str, str]:
    """Return the types of the columns that a table has beside those of the source, by name."""
    columns = {
        OP: "LowCardinality(String)",
        VERSION: "UInt128",
        DELETED: "UInt8",
        TIME: MOMENT,
    }
    return columns | ({EVENT: "String"} if mode == "changelog" else {})


def column_type(type_: ValueType) -> str:
    """Return the type of values that are not null."""
    match type_.kind:
        case "integer":
            return f"{'' if type_.signed else 'U'}Int{type_.bits}"
        case "float":
            return f"Float{type_.bits}"
        case "decimal":
            return f"Decimal({type_.precision}, {type_.scale})"
        case "list":
            assert type_.element is not None
            return f"Array({nullable(column_type(type_.element))})"
        case kind:
            return _SCALARS[kind]


def nullable(type_: str) -> str:
    """Return the type that has null, too. Arrays cannot be null."""
    return type_ if type_.startswith("Array(") else f"Nullable({type_})"


def is_nullable(type_: str) -> bool:
    """Return whether a column of a type can be null."""
    return _unwrapped(type_, "LowCardinality").startswith("Nullable(")


def plain(type_: str) -> str:
    """Return a type without `LowCardinality` and `Nullable`.

    They do not change what values there are beside null.
    """
    return _unwrapped(_unwrapped(type_, "LowCardinality"), "Nullable")


def holds(target: str, wanted: str) -> bool:
    """Return whether a column of type `target` holds all values of type `wanted`, null aside."""
    target, wanted = plain(target), plain(wanted)
    if target.startswith("Array(") and wanted.startswith("Array("):
        target, wanted = _unwrapped(target, "Array"), _unwrapped(wanted, "Array")
        return (is_nullable(target) or not is_nullable(wanted)) and holds(target, wanted)
    if target == wanted:
        return True
    for pattern, fits in _FITTING:
        if (old := pattern.fullmatch(target)) and (new := pattern.fullmatch(wanted)):
            return fits(old, new)
    return False


def _integer_fits(old: re.Match[str], new: re.Match[str]) -> bool:
    if old[1] == new[1]:
        return int(old[2]) >= int(new[2])
    return not old[1] and int(old[2]) > int(new[2])


def _float_fits(old: re.Match[str], new: re.Match[str]) -> bool:
    return int(old[1]) >= int(new[1])


def _decimal_fits(old: re.Match[str], new: re.Match[str]) -> bool:
    digits, scale = int(old[1]), int(old[2])
    return scale >= int(new[2]) and digits - scale >= int(new[1]) - int(new[2])


def _time_fits(old: re.Match[str], new: re.Match[str]) -> bool:
    """Return whether the unit is the same: with a finer one, `DateTime64` ends earlier."""
    return old[1] == new[1]


_FITTING = (
    (re.compile(r"(U?)Int(\d+)"), _integer_fits),
    (re.compile(r"Float(\d+)"), _float_fits),
    (re.compile(r"Decimal\((\d+), (\d+)\)"), _decimal_fits),
    (re.compile(r"DateTime64\((\d+)(?:, '[^']*')?\)"), _time_fits),
)


def _unwrapped(type_: str, name: str) -> str:
    return type_[len(name) + 1 : -1] if type_.startswith(f"{name}(") else type_
