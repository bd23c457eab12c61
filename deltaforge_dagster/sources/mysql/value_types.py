"""Value types of MySQL's columns, by the name of the column type.

The names are those that table versions have: as in `information_schema`, but without labels.
"""

from __future__ import annotations

import re
from dataclasses import replace

from deltaforge_dagster.config.engine import ValueOptions
from deltaforge_dagster.sources import value_types as types
from deltaforge_dagster.sources.value_types import ValueType

_BYTES = replace(types.BINARY, form="text")
_GEOMETRY = ValueType("geometry", form="srid")
_NAMED = {
    "tinyint": types.INT8,
    "smallint": types.INT16,
    "mediumint": types.INT32,
    "int": types.INT32,
    "bigint": types.INT64,
    "tinyint unsigned": types.UINT8,
    "smallint unsigned": types.UINT16,
    "mediumint unsigned": types.UINT32,
    "int unsigned": types.UINT32,
    "bigint unsigned": types.UINT64,
    "float": types.FLOAT32,
    "double": types.FLOAT64,
    "float unsigned": types.FLOAT32,
    "double unsigned": types.FLOAT64,
    "year": types.INT16,
    "date": types.DATE,
    "time": types.TIME,
    "datetime": types.TIMESTAMP,
    "timestamp": replace(types.TIMESTAMPTZ, form="micros"),
    "json": types.JSON,
    "uuid": types.UUID,
    "vector": types.list_of(types.FLOAT32),
    "binary": _BYTES,
    "varbinary": _BYTES,
    "tinyblob": types.BINARY,
    "blob": types.BINARY,
    "mediumblob": types.BINARY,
    "longblob": types.BINARY,
} | dict.fromkeys(
    (
        "geometry", "point", "linestring", "polygon", "multipoint", "multilinestring",
        "multipolygon", "geometrycollection", "geomcollection",
    ),
    _GEOMETRY,
)  # fmt: skip
_NAME = re.compile(
    r"(?P<name>[a-z]+)(?:\((?P<first>\d+)(?:,(?P<second>\d+))?\))?(?P<unsigned> unsigned)?"
)


def value_type(data_type: str, options: ValueOptions) -> ValueType:
    """Return the value type of a column type; text for a column type that has none of its own.

    Args:
        data_type: The name of the column type.
        options: The forms that the pipeline file asks for.
    """
    match = _NAME.fullmatch(data_type)
    if match is None:
        return types.TEXT
    name, first = match["name"], int(match["first"] or 0)
    if name == "decimal":
        return types.decimal(first, int(match["second"] or 0))
    if name == "bit":
        return next(
            integer
            for integer in (types.UINT8, types.UINT16, types.UINT32, types.UINT64)
            if first <= integer.bits
        )
    if name == "enum" and options.mysql_enum == "index":
        return types.UINT16
    if name == "set" and options.mysql_set == "bits":
        return types.UINT64
    return _NAMED.get(name + (match["unsigned"] or ""), types.TEXT)
