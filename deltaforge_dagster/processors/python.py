"""The `python` processor: a user's function over batches of the change frame.

The function gets a table and returns one, with one row per event (`python_function`). It gets the
columns in `GIVEN`, with dictionary columns as plain text, and returns the same columns. Events are
identified by their `event_id`: a row with the id of an input event keeps that event's log position,
transaction and schema. A row with another id, or null, is new and gets the log position of the
event before it. The chain handles repeated and new ids.

Changed values are checked: row images must be JSON objects, because they are not parsed again on
the way to a sink.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.config.processors import PythonProcessor
from deltaforge_dagster.processors.base import checked
from deltaforge_dagster.processors.python_child import FunctionInChild
from deltaforge_dagster.processors.python_function import GIVEN, KINDS, UserFunction

_NULL_IN_NEW = ("schema_version", "schema_sequence", "synthetic")


class Python:
    """One `python` processor; used by one thread. It counts nothing.

    Args:
        config: The processor's block. With a time limit the function runs in a child process.
        code: The expected hash of the module's source; None if it is unknown.

    Raises:
        SpecError: The function cannot be loaded, or its module is not the expected one.
    """

    def __init__(self, config: PythonProcessor, code: str | None = None) -> None:
        self.counts: Counter[str] = Counter()
        self._config = config
        limited = config.limits.timeout_ms is not None
        self._function = (FunctionInChild if limited else UserFunction)(config, code)

    def process(self, frame: pa.RecordBatch) -> pa.RecordBatch:
        """Return the function's result for a batch of the change frame.

        Raises:
            ProcessorFailed: The function raised, returned something other than events, or took too
                long.
        """
        if not frame.num_rows:
            return frame
        events = pa.table({name: frame.column(name).cast(KINDS[name]) for name in GIVEN})
        table = self._function(events)
        returned = pa.RecordBatch.from_arrays(
            [column.combine_chunks() for column in table.columns], table.schema.names
        )
        return checked(self._config.id, frame, _placed(frame, returned))

    def close(self) -> None:
        """End the function's child process, if there is one. Safe to call twice."""
        self._function.close()


def _placed(frame: pa.RecordBatch, returned: pa.RecordBatch) -> pa.RecordBatch:
    """Complete a result with the columns that functions do not return, such as the log position.

    They come from the input event with the same id, or for a new event from the event before it.
    """
    ids = returned.column("event_id")
    if ids.equals(frame.column("event_id")):
        whole = frame
    else:
        matches = pc.index_in(ids, value_set=frame.column("event_id"))
        matched = matches.is_valid().to_numpy(zero_copy_only=False)
        rows = matches.fill_null(0).to_numpy().astype(np.int64)
        last = np.maximum.accumulate(np.where(matched, np.arange(len(rows)), -1))
        rows = np.where(last >= 0, rows[last], 0)
        whole = frame.take(pa.array(rows, pa.int64()))
        if not matched.all():
            for name in _NULL_IN_NEW:
                index = whole.schema.get_field_index(name)
                kept = pc.if_else(
                    pa.array(matched), whole.column(name), pa.scalar(None, whole.column(name).type)
                )
                whole = whole.set_column(index, whole.schema.field(index), kept)
    for name in GIVEN:
        index = whole.schema.get_field_index(name)
        field = whole.schema.field(index)
        column = returned.column(name)
        if isinstance(field.type, pa.DictionaryType):
            column = column.dictionary_encode()
        whole = whole.set_column(index, field, column)
    return whole
