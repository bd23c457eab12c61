"""Values and rows of SQLite as JSON text, for all modes and snapshots.

INTEGER and REAL are numbers, TEXT a string, NULL null, a BLOB `{"_base64":"..."}`, as is TEXT that
is not UTF-8; infinite numbers, which JSON lacks, are the strings `Infinity` and `-Infinity`. `-0.0`
becomes `0.0`, as in every text form of SQLite; the two are equal, even as keys.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from deltaforge_dagster.sources.turso.connection.sessions import Value


def json_value(value: Value) -> Any:
    """Return the JSON value for a value of SQLite."""
    match value:
        case bytes():
            return {"_base64": base64.b64encode(value).decode()}
        case float() if math.isinf(value):
            return "Infinity" if value > 0 else "-Infinity"
        case float():
            return value + 0.0
        case _:
            return value


def image(row: Mapping[str, Any]) -> str:
    """Return a row of values from `json_value` as JSON text."""
    return orjson.dumps(row).decode()


def row_image(row: Mapping[str, Value]) -> str:
    """Return a row of SQLite's values as JSON text."""
    return image({name: json_value(value) for name, value in row.items()})


def key_of(row: Mapping[str, Any], key: Sequence[str]) -> dict[str, Any] | None:
    """Return the key columns of a row; None without a key, or if the row lacks a key column."""
    if not key or any(name not in row for name in key):
        return None
    return {name: row[name] for name in key}
