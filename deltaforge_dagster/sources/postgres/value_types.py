"""Types of PostgreSQL's columns, by the names that table versions have: `format_type`'s.

The names of built-in types have no schema. Every other type (enums, domains, types of extensions)
is text, since a table version does not say what it is made of; only PostGIS's geometries are known
by their name.
"""

from __future__ import annotations

import re

from deltaforge_dagster.sources import value_types as types
from deltaforge_dagster.sources.value_types import ValueType

_NAMED = {
    "boolean": types.BOOLEAN,
    "smallint": types.INT16,
    "integer": types.INT32,
    "bigint": types.INT64,
    "oid": types.UINT32,
    "real": types.FLOAT32,
    "double precision": types.FLOAT64,
    "json": types.JSON,
    "jsonb": types.JSON,
    "bytea": types.BINARY,
    "uuid": types.UUID,
    "date": types.DATE,
    "time without time zone": types.TIME,
    "timestamp without time zone": types.TIMESTAMP,
    "timestamp with time zone": types.TIMESTAMPTZ,
}
_NUMERIC = re.compile(r"numeric\((\d+),(-?\d+)\)")
_PRECISION = re.compile(r"^(time|timestamp)\(\d\) ")
_GEOMETRY = re.compile(r"(.*\.)?(geometry|geography)(\(.*\))?")


def value_type(data_type: str) -> ValueType:
    """Return the value type for the name of a data type; text for types that have no other."""
    if data_type.endswith("[]"):
        return types.list_of(value_type(data_type.removesuffix("[]")))
    name = _PRECISION.sub(r"\1 ", data_type)
    if name in _NAMED:
        return _NAMED[name]
    numeric = _NUMERIC.fullmatch(name)
    if numeric is not None:
        return types.decimal(int(numeric[1]), int(numeric[2]))
    return types.GEOMETRY if _GEOMETRY.fullmatch(name) else types.TEXT
