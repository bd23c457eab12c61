"""Check that the output of user code is valid as a change frame.

After the chain, row images are concatenated into messages and scanned by kernels that assume valid
JSON. So every JSON text that was not among the processor's input is parsed once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.errors import ProcessorFailed
from deltaforge_dagster.processors.columns import replaced

_OPS = frozenset({"c", "u", "d", "r", "t", "ddl"})


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _is_headers(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(one, str) for one in value.values())


_JSON: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "before": (_is_object, "a JSON object"),
    "after": (_is_object, "a JSON object"),
    "key": (_is_object, "a JSON object"),
    "ddl": (_is_object, "a JSON object"),
    "headers": (_is_headers, "a JSON object of texts"),
    "tags": (_is_texts, "a JSON array of texts"),
}


def checked(name: str, given: pa.RecordBatch, made: pa.RecordBatch) -> pa.RecordBatch:
    """Return a processor's output if it is a valid batch of the change frame.

    Line breaks between JSON tokens become spaces, since some sinks write one message per line.

    Args:
        name: Id of the processor.
        given: The rows that it got.
        made: The rows that it returned.

    Raises:
        ProcessorFailed: The output is invalid; the message names the column but no value.
    """
    if not isinstance(made, pa.RecordBatch) or not made.schema.equals(given.schema):
        raise _failed(name, f"gave back {_difference(given.schema, made)}")
    for field in made.schema:
        if not field.nullable and made.column(field.name).null_count and field.name != "event_id":
            raise _failed(name, f"column {field.name} has nulls")
    ops = set(pc.unique(made.column("op").cast(pa.string())).to_pylist())
    if not ops <= _OPS:
        raise _failed(name, "column op has values other than c, u, d, r, t and ddl")
    for column, (good, what) in _JSON.items():
        made = _with_good_json(name, given, made, column, good, what)
    return made


def _with_good_json(  # noqa: PLR0917 - one call
    name: str,
    given: pa.RecordBatch,
    made: pa.RecordBatch,
    column: str,
    good: Callable[[Any], bool],
    what: str,
) -> pa.RecordBatch:
    new, old = made.column(column), given.column(column)
    if new.equals(old):
        return made
    changed = pc.and_(new.is_valid(), pc.invert(pc.is_in(new, value_set=old)))
    lines: dict[int, str] = {}
    for row in np.flatnonzero(changed.to_numpy(zero_copy_only=False)).tolist():
        text = new[row].as_py()
        try:
            valid = good(orjson.loads(text))
        except orjson.JSONDecodeError:
            valid = False
        if not valid:
            raise _failed(name, f"column {column} has a value that is not {what}")
        if "\n" in text or "\r" in text:
            # Valid JSON has line breaks only between tokens. Some sinks write one message per line.
            lines[row] = text.replace("\n", " ").replace("\r", " ")
    return replaced(made, {column: lines}) if lines else made


def _difference(wanted: pa.Schema, made: object) -> str:
    if not isinstance(made, pa.RecordBatch):
        return f"{type(made).__name__}, not a pyarrow RecordBatch"
    for field in wanted:
        if field.name not in made.schema.names:
            return f"no column {field.name}"
        found = made.schema.field(field.name).type
        if found != field.type:
            return f"a column {field.name} of type {found}, not {field.type}"
    return "columns in another order, or more of them"


def _failed(name: str, what: str) -> ProcessorFailed:
    return ProcessorFailed(f"processor {name}: {what}")
