"""Convert rows of a DataFrame to messages.

=============  ========================  ==========================================================
column         type                      meaning
=============  ========================  ==========================================================
`value`        string                    The message. Null only for Kafka: a tombstone.
`key`          string                    The message's key; if absent or null: none.
`destination`  string                    Stream, topic or subject; if absent or null: that of the
                                         option.
`headers`      map of strings, or JSON   If absent or null: none.
`event_id`     string                    Id by which consumers detect duplicates; if absent or
                                         null: the job's name, the partition and the row's
                                         number in it.
=============  ========================  ==========================================================

Other columns are rejected. Names are case-insensitive, as in Spark.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import orjson
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import MapType, StringType, StructType

from deltaforge_dagster.errors import SinkRejected, SpecError
from deltaforge_dagster.sinks.base import MESSAGES
from deltaforge_dagster.spark import Kind

_COLUMNS = ("value", "key", "destination", "headers", "event_id")


def check(kind: Kind, schema: StructType, options: Mapping[str, str]) -> None:
    """Check the columns of a DataFrame.

    Raises:
        SpecError: A column is missing, unknown or of the wrong type, or there is no destination.
    """
    types = {field.name.lower(): field.dataType for field in schema.fields}
    problems = [
        f"column {name!r} is unknown; known are {', '.join(_COLUMNS)}"
        for name in types
        if name not in _COLUMNS
    ]
    for name, data_type in types.items():
        texts = isinstance(data_type, MapType) and data_type.simpleString() == "map<string,string>"
        if not (isinstance(data_type, StringType) or (name == "headers" and texts)):
            wanted = "map<string,string> or string" if name == "headers" else "string"
            problems.append(f"column {name!r} is {data_type.simpleString()}; it must be {wanted}")
    if "value" not in types:
        problems.append("there is no column 'value', the message")
    if kind.destination not in options and kind.spark.always_named:
        problems.append(f"option {kind.destination!r} is needed")
    elif kind.destination not in options and "destination" not in types:
        problems.append(f"option {kind.destination!r} or a column 'destination' is needed")
    if problems:
        raise SpecError(*(f"{kind.format}: {problem}" for problem in problems))


def messages(
    kind: Kind, rows: pa.RecordBatch, default: str | None, ids: str, first: int
) -> pa.RecordBatch:
    """Return rows as `MESSAGES`, with ordinals from `first` on.

    Args:
        kind: The sink type.
        rows: Rows of a DataFrame whose columns were checked.
        default: The destination of rows without one; None if there is no default.
        ids: The prefix for the ids of rows without one; the row's number is appended.
        first: The number of the first row in its partition.

    Raises:
        SinkRejected: A row has no destination or no value.
    """
    count = rows.num_rows
    inputs = dict(zip((name.lower() for name in rows.schema.names), rows.columns, strict=True))
    ordinals = pa.array(range(first, first + count), pa.int64())
    nothing = pa.nulls(count, pa.string())

    def text(name: str) -> Any:
        return inputs[name].cast(pa.string()) if name in inputs else nothing

    destination = text("destination")
    if default is not None:
        destination = pc.fill_null(destination, default)
    numbered = pc.binary_join_element_wise(ids, cast("Any", ordinals.cast(pa.string())), "")
    event_id = pc.coalesce(text("event_id"), numbered)
    columns = {
        "ordinal": ordinals,
        "destination": _whole(kind, "destination", destination, first),
        "key": text("key"),
        "value": text("value")
        if kind.type.takes_tombstones
        else _whole(kind, "value", text("value"), first),
        "event_id": event_id,
        "idempotency_key": event_id,
        "headers": _headers(inputs["headers"]) if "headers" in inputs else nothing,
        "change_id": nothing,
    }
    return pa.RecordBatch.from_arrays([columns[name] for name in MESSAGES.names], schema=MESSAGES)


def _whole(kind: Kind, name: str, column: Any, first: int) -> Any:
    if column.null_count:
        row = first + pc.index(pc.is_null(column), True).as_py()
        raise SinkRejected(f"{kind.format}: row {row} of the partition has no {name}")
    return column


def _headers(column: Any) -> Any:
    if not pa.types.is_map(column.type):
        return column.cast(pa.string())
    texts = [
        None if pairs is None else orjson.dumps(dict(pairs)).decode()
        for pairs in column.to_pylist()
    ]
    return pa.array(texts, pa.string())
