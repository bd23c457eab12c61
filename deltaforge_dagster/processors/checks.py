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
from deltaforge_dagster.processors.base import replaced

_OPS = frozenset({"c", "u", "d", "r", "t", "ddl"})


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_text_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _is_headers(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


_JSON: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "before": (_is_object, "a JSON object"),
    "after": (_is_object, "a JSON object"),
    "key": (_is_object, "a JSON object"),
    "ddl": (_is_object, "a JSON object"),
    "headers": (_is_headers, "a JSON object of texts"),
    "tags": (_is_text_list, "a JSON array of texts"),
}


def checked(name: str, received: pa.RecordBatch, returned: pa.RecordBatch) -> pa.RecordBatch:
    """Return a processor's output if it is a valid batch of the change frame.

    Line breaks between JSON tokens become spaces, since some sinks write one message per line.

    Args:
        name: Id of the processor.
        received: The rows that the processor got.
        returned: The rows that it returned.

    Raises:
        ProcessorFailed: The output is invalid; the message names the column but no value.
    """
    if not isinstance(returned, pa.RecordBatch) or not returned.schema.equals(received.schema):
        raise _failed(name, f"returned {_difference(received.schema, returned)}")
    for field in returned.schema:
        if (
            not field.nullable
            and returned.column(field.name).null_count
            and field.name != "event_id"
        ):
            raise _failed(name, f"column {field.name} has nulls")
    ops = set(pc.unique(returned.column("op").cast(pa.string())).to_pylist())
    if not ops <= _OPS:
        raise _failed(name, "column op has values other than c, u, d, r, t and ddl")
    for column, (is_valid, form) in _JSON.items():
        returned = _with_good_json(name, received, returned, column, is_valid, form)
    return returned


def _with_good_json(  # noqa: PLR0917 - one call
    name: str,
    received: pa.RecordBatch,
    returned: pa.RecordBatch,
    column: str,
    is_valid: Callable[[Any], bool],
    form: str,
) -> pa.RecordBatch:
    new, old = returned.column(column), received.column(column)
    if new.equals(old):
        return returned
    changed = pc.and_(new.is_valid(), pc.invert(pc.is_in(new, value_set=old)))
    lines: dict[int, str] = {}
    for row in np.flatnonzero(changed.to_numpy(zero_copy_only=False)).tolist():
        text = new[row].as_py()
        try:
            valid = is_valid(orjson.loads(text))
        except orjson.JSONDecodeError:
            valid = False
        if not valid:
            raise _failed(name, f"column {column} has a value that is not {form}")
        if "\n" in text or "\r" in text:
            # Valid JSON has line breaks only between tokens. Some sinks write one message per line.
            lines[row] = text.replace("\n", " ").replace("\r", " ")
    return replaced(returned, {column: lines}) if lines else returned


def _difference(wanted: pa.Schema, returned: object) -> str:
    if not isinstance(returned, pa.RecordBatch):
        return f"{type(returned).__name__}, not a pyarrow RecordBatch"
    for field in wanted:
        if field.name not in returned.schema.names:
            return f"no column {field.name}"
        data_type = returned.schema.field(field.name).type
        if data_type != field.type:
            return f"a column {field.name} of type {data_type}, not {field.type}"
    return "columns in another order, or more of them"


def _failed(name: str, problem: str) -> ProcessorFailed:
    return ProcessorFailed(f"processor {name}: {problem}")
