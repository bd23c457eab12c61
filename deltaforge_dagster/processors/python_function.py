"""Load and call the user's function of a `python` processor, and check its result.

The function gets an Arrow table or a pandas data frame with the columns in `GIVEN` and returns one
with the same columns. Errors report only the class and line of an exception, because its message
may contain values of rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import pyarrow as pa

from deltaforge_dagster.config.processors import PythonProcessor
from deltaforge_dagster.errors import ProcessorFailed, SpecError
from deltaforge_dagster.frame import FRAME
from deltaforge_dagster.processors.code import line_in, loaded, source_hash

GIVEN = (
    "event_id", "op", "ts_us", "db", "schema", "table", "before", "after", "key", "ddl", "topic",
    "route_key", "headers", "raw_payload", "tags",
)  # fmt: skip
"""The columns that a function gets and must return."""

_Kinds: TypeAlias = Mapping[str, pa.DataType]


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if isinstance(kind, pa.DictionaryType) else kind


KINDS: _Kinds = {name: _plain(FRAME.field(name).type) for name in GIVEN}
"""The type of each of these columns; dictionary columns are plain text here."""


class UserFunction:
    """A user's function that is called in this process; used by one thread.

    Args:
        config: The processor's block.
        code: The expected hash of the module's source; None if it is unknown.

    Raises:
        SpecError: The function cannot be loaded, or its module is not the expected one.
    """

    def __init__(self, config: PythonProcessor, code: str | None = None) -> None:
        self._config = config
        self._where = f"processor {config.id}: {config.function}"
        if code not in {None, source_hash(config.function, config.path)}:
            raise SpecError(f"{self._where}: the module's source is not the one that the run has")
        try:
            self._function, self._file = loaded(config.function, config.path)
        except SpecError as error:
            raise SpecError(f"{self._where}: {error}") from None

    def __call__(self, events: pa.Table) -> pa.Table:
        """Return the function's result for events, with the columns and types of `KINDS`.

        Raises:
            ProcessorFailed: The function raised, or returned something other than events.
        """
        if self._config.format == "pandas":
            return self._frame(self._called(events.to_pandas()))
        return self._table(self._called(events))

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def _called(self, events: Any) -> Any:
        try:
            return self._function(events)
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything
            line = line_in(error, self._file)
            where = "" if line is None else f" in line {line} of its module"
            raise self._failed(f"{type(error).__name__}{where}") from None

    def _table(self, returned: Any) -> pa.Table:
        """Return an Arrow result with exactly the columns and types of `KINDS`."""
        if isinstance(returned, pa.RecordBatch):
            returned = pa.Table.from_batches([returned])
        if not isinstance(returned, pa.Table):
            raise self._failed(f"returned {type(returned).__name__}, not a pyarrow Table")
        self._check_names(returned.schema.names)
        columns = {}
        for name, kind in KINDS.items():
            column = returned.column(name)
            if not _fits(column.type, kind):
                raise self._failed(f"column {name} is {column.type}, not {kind}")
            try:
                columns[name] = column.cast(kind)
            except pa.ArrowInvalid:
                raise self._failed(
                    f"column {name} has values that are not of type {kind}"
                ) from None
        return pa.table(columns)

    def _frame(self, returned: Any) -> pa.Table:
        """Convert a pandas result to a table with exactly the columns and types of `KINDS`."""
        import pandas as pd  # noqa: PLC0415 - takes long, and only some functions use it

        if not isinstance(returned, pd.DataFrame):
            raise self._failed(f"returned {type(returned).__name__}, not a pandas DataFrame")
        self._check_names([str(name) for name in returned.columns])
        columns = {}
        for name, kind in KINDS.items():
            try:
                columns[name] = pa.Array.from_pandas(returned[name], type=kind)
            except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
                problem = (
                    f"column {name} is {returned[name].dtype}, "
                    f"with values that are not of type {kind}"
                )
                raise self._failed(problem) from None
        return pa.table(columns)

    def _check_names(self, names: list[str]) -> None:
        for name in GIVEN:
            if names.count(name) != 1:
                raise self._failed(f"returned {names.count(name)} columns {name}, not one")
        for name in names:
            if name not in GIVEN:
                raise self._failed(f"returned the column {name}, which events do not have")

    def _failed(self, problem: str) -> ProcessorFailed:
        return ProcessorFailed(f"{self._where}: {problem}")


def _fits(offered: pa.DataType, wanted: pa.DataType) -> bool:
    """Return whether a column of type `offered` can be cast to the type `wanted`."""
    kind, types = _plain(offered), pa.types
    if types.is_null(kind) or kind == wanted:
        return True
    if types.is_string(wanted):
        return types.is_large_string(kind) or types.is_string_view(kind)
    return types.is_int64(wanted) and types.is_integer(kind)
