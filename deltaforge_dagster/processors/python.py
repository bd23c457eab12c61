"""The `python` processor: a user's function over batches of the change frame.

The function gets one table and returns one, each row an event. It sees the columns of `GIVEN`, names as
plain texts, and gives the same columns back. An event is known by its `event_id`: a row that has
the id of an event takes over its place in the log, its transaction and its schema. A row with the
id of no event, or null, is new and stands where the event before it does. What becomes of
repeated and new ids is said in `identity`.

What differs from what was given is checked: row images must be JSON objects, since nothing parses
them again on the way to a sink.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.config.processors import PythonProcessor
from deltaforge_dagster.errors import ProcessorFailed, SpecError
from deltaforge_dagster.frame import FRAME
from deltaforge_dagster.processors.checks import checked
from deltaforge_dagster.processors.modules import line_in, loaded, source_hash

GIVEN = (
    "event_id", "op", "ts_us", "db", "schema", "table", "before", "after", "key", "ddl", "topic",
    "route_key", "headers", "raw_payload", "tags",
)  # fmt: skip
"""Columns that a function gets, and must give back."""

_NULL_IN_NEW = ("schema_version", "schema_sequence", "synthetic")

_Kinds: TypeAlias = Mapping[str, pa.DataType]


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if isinstance(kind, pa.DictionaryType) else kind


_KINDS: _Kinds = {name: _plain(FRAME.field(name).type) for name in GIVEN}


class Python:
    """One `python` processor; used by one thread. It counts nothing.

    Args:
        config: The block of the file.
        code: What the hash of the module's source must be; None where nobody knows.

    Raises:
        SpecError: The function cannot be loaded, or is not the one that is expected.
    """

    def __init__(self, config: PythonProcessor, code: str | None = None) -> None:
        self.counts: Counter[str] = Counter()
        self._config = config
        where = f"processor {config.id}: {config.function}"
        if code not in {None, source_hash(config.function, config.path)}:
            raise SpecError(f"{where}: the module's source is not the one that the run has")
        try:
            self._function, self._file = loaded(config.function, config.path)
        except SpecError as error:
            raise SpecError(f"{where}: {error}") from None

    def process(self, frame: pa.RecordBatch) -> pa.RecordBatch:
        """Return what the function makes of a batch of the change frame.

        Raises:
            ProcessorFailed: It raised, or gave back something else than events.
        """
        if not frame.num_rows:
            return frame
        given = pa.table({name: frame.column(name).cast(_KINDS[name]) for name in GIVEN})
        told = self._called(given.to_pandas() if self._config.format == "pandas" else given)
        table = self._frame(told) if self._config.format == "pandas" else self._table(told)
        made = pa.RecordBatch.from_arrays(
            [one.combine_chunks() for one in table.columns], table.schema.names
        )
        return checked(self._config.id, frame, _placed(frame, made))

    def close(self) -> None:
        """Do nothing: there is nothing to end."""

    def _called(self, given: Any) -> Any:
        try:
            return self._function(given)
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything
            line = line_in(error, self._file)
            where = "" if line is None else f" in line {line} of its module"
            raise self._failed(f"{type(error).__name__}{where}") from None

    def _table(self, told: Any) -> pa.Table:
        """Return an Arrow result with exactly the columns, and the types, of a frame."""
        if isinstance(told, pa.RecordBatch):
            told = pa.Table.from_batches([told])
        if not isinstance(told, pa.Table):
            raise self._failed(f"gave back {type(told).__name__}, not a pyarrow Table")
        self._check_names(told.schema.names)
        columns = {}
        for name, kind in _KINDS.items():
            column = told.column(name)
            if not _fits(column.type, kind):
                raise self._failed(f"column {name} is {column.type}, not {kind}")
            try:
                columns[name] = column.cast(kind)
            except pa.ArrowInvalid:
                raise self._failed(f"column {name} has values that are no {kind}") from None
        return pa.table(columns)

    def _frame(self, told: Any) -> pa.Table:
        """Return a pandas result likewise."""
        if not isinstance(told, pd.DataFrame):
            raise self._failed(f"gave back {type(told).__name__}, not a pandas DataFrame")
        self._check_names([str(one) for one in told.columns])
        columns = {}
        for name, kind in _KINDS.items():
            try:
                columns[name] = pa.Array.from_pandas(told[name], type=kind)
            except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
                said = f"column {name} is {told[name].dtype}, with values that are no {kind}"
                raise self._failed(said) from None
        return pa.table(columns)

    def _check_names(self, names: list[str]) -> None:
        for name in GIVEN:
            if names.count(name) != 1:
                raise self._failed(f"gave back {names.count(name)} columns {name}, not one")
        for name in names:
            if name not in GIVEN:
                raise self._failed(f"gave back the column {name}, which events do not have")

    def _failed(self, what: str) -> ProcessorFailed:
        return ProcessorFailed(f"processor {self._config.id}: {self._config.function}: {what}")


def _fits(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Say whether a column can be meant as one of the wanted type."""
    kind, types = _plain(found), pa.types
    if types.is_null(kind) or kind == wanted:
        return True
    if types.is_string(wanted):
        return types.is_large_string(kind) or types.is_string_view(kind)
    return types.is_int64(wanted) and types.is_integer(kind)


def _placed(frame: pa.RecordBatch, made: pa.RecordBatch) -> pa.RecordBatch:
    """Give rows of a result the places of the events that they are, or follow."""
    ids = made.column("event_id")
    if ids.equals(frame.column("event_id")):
        whole = frame
    else:
        found = pc.index_in(ids, value_set=frame.column("event_id"))
        known = found.is_valid().to_numpy(zero_copy_only=False)
        rows = found.fill_null(0).to_numpy().astype(np.int64)
        last = np.maximum.accumulate(np.where(known, np.arange(len(rows)), -1))
        rows = np.where(last >= 0, rows[last], 0)
        whole = frame.take(pa.array(rows, pa.int64()))
        if not known.all():
            for name in _NULL_IN_NEW:
                place = whole.schema.get_field_index(name)
                kept = pc.if_else(
                    pa.array(known), whole.column(name), pa.scalar(None, whole.column(name).type)
                )
                whole = whole.set_column(place, whole.schema.field(place), kept)
    for name in GIVEN:
        place = whole.schema.get_field_index(name)
        field = whole.schema.field(place)
        column = made.column(name)
        if isinstance(field.type, pa.DictionaryType):
            column = column.dictionary_encode()
        whole = whole.set_column(place, field, column)
    return whole
