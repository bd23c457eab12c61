"""Compute destinations and keys of messages, for whole batches of the change frame.

For destination and key alike, a value that a processor set on the event takes precedence over the
sink's template. Without a template the key is the event id (`message_key`); the row's primary key,
for sinks in which the key decides the order of changes (`row_key`); or null, for sinks that need
none (`set_key`).

A variable is a path into the native event, or into the row's primary key. Its text is the content
of a string, or the JSON text of any other value, as in the event; a null or missing value is
*unresolved*. That is an error in a destination, and empty text in a key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast
from urllib.parse import quote

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.config.templates import KEY, Template
from deltaforge_dagster.kernels.json_fields import field_texts
from deltaforge_dagster.kernels.message_text import (
    Mask,
    Optional,
    Piece,
    Values,
    concat,
    constant,
    decimals,
    flags,
    values_of,
)
from deltaforge_dagster.processors.messages.envelope import (
    EventOrigin,
    is_snapshot,
    position_values,
    wire_op,
)

_ALWAYS = frozenset(
    {
        ("op",), ("ts_ms",), ("event_id",), ("tenant_id",),
        ("source", "version"), ("source", "connector"), ("source", "name"), ("source", "ts_ms"),
        ("source", "db"), ("source", "table"),
    }
)  # fmt: skip
"""Variables that have a value in every event."""


def destination(template: Template, origin: EventOrigin, frame: pa.RecordBatch) -> pa.StringArray:
    """Return the destinations; null where a variable is unresolved."""
    return _destination(_text(template, origin, frame), template, origin, frame)


def url(template: Template, origin: EventOrigin, frame: pa.RecordBatch) -> pa.StringArray:
    """Return the destinations that are URLs; null where a variable is unresolved.

    Values of variables are percent-encoded, except letters, digits and `-._~` (RFC 6570, "Simple
    String Expansion"), so that a value never becomes another part of the URL. A URL that a
    processor set stays as it is.
    """
    urls = _text(template, origin, frame, _percent_encoded)
    return _destination(urls, template, origin, frame)


def _destination(
    destinations: pa.StringArray, template: Template, origin: EventOrigin, frame: pa.RecordBatch
) -> pa.StringArray:
    missing = None
    for path in _conditional(template):
        unknown = _unknown(_variable(path, origin, frame), frame)
        missing = unknown if missing is None else missing | unknown
    if missing is not None and missing.any():
        destinations = pc.if_else(pa.array(missing), pa.scalar(None, pa.string()), destinations)
    topic = frame.column("topic")
    if topic.null_count == len(topic):
        return destinations
    return _first(_nulled(topic), destinations)


def can_be_unresolved(template: Template) -> bool:
    """Return whether a variable of the template can be unresolved."""
    return bool(_conditional(template))


def unresolved(template: Template, origin: EventOrigin, frame: pa.RecordBatch) -> pa.StringArray:
    """Return for each row the path of the first unresolved variable of the destination, or null."""
    paths = pa.nulls(frame.num_rows, pa.string())
    for path in reversed(_conditional(template)):
        unknown = _unknown(_variable(path, origin, frame), frame)
        if unknown.any():
            paths = pc.if_else(pa.array(unknown), pa.scalar(".".join(path)), paths)
    return paths


def empty_variables(
    template: Template, origin: EventOrigin, frame: pa.RecordBatch
) -> pa.StringArray:
    """Return for each row the paths of the unresolved variables in its key, one per line, or null.

    A key that a processor set has no variables.
    """
    pieces: list[Piece] = []
    for path in _conditional(template):
        unknown = _unknown(_variable(path, origin, frame), frame)
        unknown &= frame.column("route_key").is_null().to_numpy(zero_copy_only=False)
        if unknown.any():
            pieces.append(Optional("", constant(".".join(path)).where(unknown), "\n"))
    if not pieces:
        return pa.nulls(frame.num_rows, pa.string())
    return _nulled(concat(frame.num_rows, pieces))


def message_key(
    template: Template | None, origin: EventOrigin, frame: pa.RecordBatch
) -> pa.StringArray:
    """Return the message keys; never null."""
    keys = frame.column("event_id") if template is None else _text(template, origin, frame)
    return _first(frame.column("route_key"), keys)


def row_key(frame: pa.RecordBatch) -> pa.StringArray:
    """Return the default keys for sinks in which the key decides the order; never null.

    The key is each row's primary key as JSON text, or the event id if the table has no primary key.
    """
    return _first(frame.column("route_key"), frame.column("key"), frame.column("event_id"))


def set_key(frame: pa.RecordBatch) -> pa.Array[Any]:
    """Return the keys that processors set, or null: the default of sinks that need no key."""
    return frame.column("route_key")


def idempotency_key(origin: EventOrigin, frame: pa.RecordBatch) -> pa.StringArray:
    """Return `tenant|db.table|transaction id|event id`: the same each time the change is read."""
    return concat(
        frame.num_rows,
        [
            f"{origin.tenant or '_'}|", Optional("", values_of(frame.column("db"))),
            ".", Optional("", values_of(frame.column("table"))),
            "|", Optional("", values_of(frame.column("tx_id"))),
            "|", Optional("", values_of(frame.column("event_id"))),
        ],
    )  # fmt: skip


def headers(
    templates: Mapping[str, Template], origin: EventOrigin, frame: pa.RecordBatch
) -> pa.StringArray:
    """Return the headers of messages, JSON objects, with those of templates before their own.

    Unresolved variables are empty text.
    """
    names = list(templates)
    columns = [_text(template, origin, frame).to_pylist() for template in templates.values()]
    own = cast("list[str | None]", frame.column("headers").to_pylist())
    documents = [
        orjson.dumps({**dict(zip(names, row[:-1], strict=True)), **orjson.loads(row[-1] or "{}")})
        for row in zip(*columns, own, strict=True)
    ]
    return pa.array([document.decode() for document in documents], pa.string())


def _nulled(texts: pa.Array[Any]) -> pa.StringArray:
    """Return texts with null in place of empty texts."""
    nulled: pa.StringArray = pc.if_else(
        pc.equal(texts, pa.scalar("")), pa.scalar(None, pa.string()), texts
    )
    return nulled


def _first(*columns: pa.Array[Any]) -> pa.StringArray:
    """Return the first non-null value of each row."""
    candidates = [values for values in columns[:-1] if values.null_count < len(values)]
    for number, column in enumerate(candidates):
        if not column.null_count:
            candidates = candidates[: number + 1]
            break
    else:
        candidates.append(columns[-1])
    return cast(
        "pa.StringArray", pc.coalesce(*candidates) if len(candidates) > 1 else candidates[0]
    )


def _text(
    template: Template,
    origin: EventOrigin,
    frame: pa.RecordBatch,
    encode: Callable[[pa.StringArray], pa.StringArray] | None = None,
) -> pa.StringArray:
    """Return the template's text for each row: unresolved variables empty, the others encoded."""
    pieces: list[Piece] = []
    for part in template.parts:
        if isinstance(part, str):
            pieces.append(part)
            continue
        values = _variable(part.path, origin, frame)
        if encode is not None:
            values = values_of(encode(concat(frame.num_rows, [Optional("", values)])))
        pieces.append(Optional("", values))
    return concat(frame.num_rows, pieces)


def _percent_encoded(texts: pa.StringArray) -> pa.StringArray:
    """Return texts with every character percent-encoded except letters, digits and `-._~`."""
    if not pc.any(pc.match_substring_regex(texts, "[^A-Za-z0-9._~-]")).as_py():
        return texts
    distinct = texts.dictionary_encode()
    encoded = [quote(str(text), safe="") for text in distinct.dictionary.to_pylist()]
    return pa.array(encoded, pa.string()).take(distinct.indices)


def _conditional(template: Template) -> list[tuple[str, ...]]:
    return [variable.path for variable in template.variables if variable.path not in _ALWAYS]


def _unknown(values: Values | None, frame: pa.RecordBatch) -> Mask:
    """Return a mask of the rows in which a variable has no value."""
    if values is None:
        return np.ones(frame.num_rows, np.bool_)
    return ~values.valid if len(values.valid) else np.zeros(frame.num_rows, np.bool_)


def _variable(path: tuple[str, ...], origin: EventOrigin, frame: pa.RecordBatch) -> Values | None:
    """Return the texts at `path` of the native events; null where it is unresolved.

    Returns None if it is unresolved in all rows.
    """
    image, *fields = path
    if image in {"before", "after", KEY, "ddl", "tags"}:
        documents = frame.column(image)
        return values_of(
            field_texts(cast("pa.StringArray", documents), fields) if fields else documents
        )
    if path in _VARIABLES:
        return _VARIABLES[path](origin, frame)
    return (
        _position_texts(fields[0], origin, frame)
        if image == "source" and len(fields) == 1
        else None
    )


_Variable = Callable[[EventOrigin, pa.RecordBatch], Values | None]


def _plain(name: str) -> _Variable:
    return lambda _, frame: values_of(frame.column(name))


def _number(name: str, divisor: int = 1) -> _Variable:
    return lambda _, frame: decimals(frame.column(name), divisor)


def _position_texts(name: str, origin: EventOrigin, frame: pa.RecordBatch) -> Values | None:
    """Return the texts of a position field of the source; null for snapshot rows.

    Returns None if the source has no such field.
    """
    for field in origin.position_fields:
        if field.name == name and (values := position_values(field, frame)) is not None:
            snapshot = is_snapshot(frame)
            return values.where(~snapshot) if snapshot.any() else values
    return None


_VARIABLES: Mapping[tuple[str, ...], _Variable] = {
    ("op",): lambda _, frame: wire_op(frame),
    ("ts_ms",): _number("ts_us", 1000),
    ("event_id",): _plain("event_id"),
    ("tenant_id",): lambda origin, _: constant(origin.tenant),
    ("transaction", "id"): _plain("tx_id"),
    ("schema_version",): _plain("schema_version"),
    ("schema_sequence",): _number("schema_sequence"),
    ("synthetic",): _plain("synthetic"),
    ("tx_end",): lambda _, frame: flags(frame.column("tx_end").to_numpy(zero_copy_only=False)),
    ("source", "version"): lambda origin, _: constant(origin.version),
    ("source", "connector"): lambda origin, _: constant(origin.connector),
    ("source", "name"): lambda origin, _: constant(origin.name),
    ("source", "ts_ms"): _number("ts_us", 1000),
    ("source", "db"): _plain("db"),
    ("source", "schema"): _plain("schema"),
    ("source", "table"): _plain("table"),
    ("source", "snapshot"): lambda _, frame: flags(is_snapshot(frame)),
}
