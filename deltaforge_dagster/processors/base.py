"""The interface that every processor implements, and what processors share.

A processor gets batches of the change frame in log order and returns the rows to pass on, in the
order in which they are passed on: it may change rows, drop them and add new ones. One object serves
one Spark task, in one thread; state that it keeps between batches is lost when the task's process
ends or the processor fails.

The output of user code is checked (`checked`): after the chain, row images are concatenated into
messages and scanned by kernels that assume valid JSON. So every JSON text that was not among the
processor's input is parsed once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.errors import ProcessorFailed


class Processor(Protocol):
    """One processor of a pipeline file."""

    @property
    def counts(self) -> Counter[str]:
        """Counters besides rows in and out, by metric name, which `:` and a label may follow."""
        ...

    def process(self, frame: pa.RecordBatch) -> pa.RecordBatch:
        """Return the result of a batch, which has at least one row, with the same columns.

        Rows may be returned several times. New rows may have a new `event_id`, or null: the chain
        assigns ids and marks new rows as synthetic (`chain.identified`).

        Raises:
            ProcessorFailed: The processor failed; no row of the batch is passed on.
        """
        ...

    def close(self) -> None:
        """Release all resources. Safe to call twice."""
        ...


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


def replaced(frame: pa.RecordBatch, changes: Mapping[str, Mapping[int, Any]]) -> pa.RecordBatch:
    """Return a batch with new values, given by column name and row number."""
    for name, values in changes.items():
        index = frame.schema.get_field_index(name)
        frame = frame.set_column(index, frame.schema.field(index), _changed(frame, index, values))
    return frame


def _changed(frame: pa.RecordBatch, index: int, values: Mapping[int, Any]) -> pa.Array[Any]:
    column = frame.column(index)
    mask = np.zeros(len(column), np.bool_)
    mask[list(values)] = True
    kind = column.type
    plain = kind.value_type if isinstance(kind, pa.DictionaryType) else kind
    changed: pa.Array[Any] = pa.array([values.get(row) for row in range(len(column))], plain)
    if not mask.all():
        changed = pc.if_else(pa.array(mask), changed, column.cast(plain))
    return cast("pa.Array[Any]", changed.dictionary_encode()) if plain != kind else changed
