"""Convert computed values to JSON text, in the same formats as captured values (docs/types.md).

=====================  =================================================================
null                   `null`
boolean, integer       boolean, number
float                  number, the shortest that parses to the same value; `"NaN"`, `"Infinity"`
decimal                string with the type's scale: `"99.90"`
text                   string
date                   `"2026-03-01"`
timestamp              `"2026-03-01T12:00:00.000000Z"`; no `Z` if the type has no time zone
binary                 `{"_base64":"..."}`
list, struct, map      array, object, object
=====================  =================================================================
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.errors import ProcessorFailed
from deltaforge_dagster.processors.exact_json import dumps

_NULL = pa.scalar("null", pa.string())


def json_texts(column: pa.Array[Any]) -> pa.StringArray:
    """Return the JSON text of each value.

    Raises:
        ProcessorFailed: There is no JSON form for values of this type.
    """
    return cast("pa.StringArray", _texts(column).fill_null(_NULL))


def _texts(column: Any) -> Any:  # noqa: C901, PLR0911 - one line per type
    kind, types = column.type, pa.types
    if types.is_null(kind):
        return pa.nulls(len(column), pa.string())
    if types.is_boolean(kind) or types.is_integer(kind):
        return column.cast(pa.string())
    if types.is_floating(kind):
        finite = pc.is_finite(column)
        negative = pc.less(column, pa.scalar(0, kind))
        named = pc.if_else(pc.is_nan(column), "NaN", pc.if_else(negative, *_INFINITE))
        return pc.if_else(finite, column.cast(pa.string()), _quoted(named))
    if types.is_decimal(kind):
        return _from_values(column, lambda number: f'"{number:f}"')
    if types.is_string(kind) or types.is_large_string(kind):
        return _from_values(column, dumps)
    if types.is_date(kind):
        return _quoted(column.cast(pa.string()))
    if types.is_timestamp(kind):
        zone = "" if kind.tz is None else "Z"
        plain = column.cast(pa.timestamp("us", "UTC" if zone else None))
        return _quoted(pc.strftime(plain, f"%Y-%m-%dT%H:%M:%S{zone}"))
    if types.is_binary(kind):
        return _from_values(column, lambda data: f'{{"_base64":"{b64encode(data).decode()}"}}')
    if types.is_list(kind):
        return _lists(cast("pa.ListArray[Any]", column))
    if types.is_struct(kind):
        return _structs(cast("pa.StructArray", column))
    if types.is_map(kind):
        return _maps(cast("pa.MapArray[Any, Any]", column))
    raise ProcessorFailed(f"values of type {kind} have no JSON form (cast them)")


_INFINITE = ("-Infinity", "Infinity")


def _quoted(texts: Any) -> Any:
    """Quote texts that need no escapes."""
    return pc.binary_join_element_wise('"', texts, '"', "")


def _from_values(column: pa.Array[Any], text: Any) -> pa.Array[Any]:
    texts = [None if value is None else text(value) for value in column.to_pylist()]
    return pa.array(texts, pa.string())


def _joined(counts: Iterable[int | None], items: Iterator[str], brackets: str) -> pa.Array[Any]:
    """Join the next `count` items into one text for each count; null for a null count."""
    texts = [
        None if count is None else f"{brackets[0]}{','.join(islice(items, count))}{brackets[1]}"
        for count in counts
    ]
    return pa.array(texts, pa.string())


def _lists(column: pa.ListArray[Any]) -> pa.Array[Any]:
    items = cast("list[str]", json_texts(column.flatten()).to_pylist())
    return _joined(column.value_lengths().to_pylist(), iter(items), "[]")


def _structs(column: pa.StructArray) -> Any:
    names = [f"{dumps(member.name)}:" for member in column.type]
    children = [json_texts(member).to_pylist() for member in column.flatten()]
    texts = [
        "{" + ",".join(map("".join, zip(names, values, strict=True))) + "}"
        for values in (zip(*children, strict=True) if names else [()] * len(column))
    ]
    return pc.if_else(column.is_valid(), pa.array(texts, pa.string()), pa.scalar(None, pa.string()))


def _maps(column: pa.MapArray[Any, Any]) -> pa.Array[Any]:
    entries: Any = column.cast(
        pa.list_(pa.struct([("key", column.type.key_type), ("value", column.type.item_type)]))
    )
    pairs = entries.flatten()
    names = pairs.field("key").cast(pa.string()).to_pylist()
    values = json_texts(pairs.field("value")).to_pylist()
    items = [f"{dumps(name)}:{value}" for name, value in zip(names, values, strict=True)]
    return _joined(entries.value_lengths().to_pylist(), iter(items), "{}")
