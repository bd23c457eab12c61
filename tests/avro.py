"""Reads messages in Avro with fastavro, an implementation that shares nothing with ours."""

from __future__ import annotations

import io
import json
from typing import Any, cast

import fastavro

HEADER = 5
"""Bytes before a record: 0, and the id of its schema."""


def read(schema: str, value: bytes) -> dict[str, Any]:
    """Return a message, with values of logical types as Python has them."""
    return _read(json.loads(schema), value)


def read_plain(schema: str, value: bytes) -> dict[str, Any]:
    """Return a message, with values of logical types as the types that carry them."""
    return _read(_without_logical_types(json.loads(schema)), value)


def _read(schema: Any, value: bytes) -> dict[str, Any]:
    assert value[0] == 0
    content = io.BytesIO(value[HEADER:])
    found = fastavro.schemaless_reader(content, fastavro.parse_schema(schema), None)
    assert not content.read(), "bytes are left"
    return cast("dict[str, Any]", found)


def _without_logical_types(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_logical_types(one) for one in schema]
    if isinstance(schema, dict):
        return {k: _without_logical_types(v) for k, v in schema.items() if k != "logicalType"}
    return schema
