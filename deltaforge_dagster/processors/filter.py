"""The `filter` processor: an event passes if it matches all conditions.

The conditions are `ops`, `tables` and `fields`; one that is absent matches every event. Fields are
read from `after`, by a dotted path through objects; null counts as missing. For an event without
the field, or without `after`:

=====================================  =====================================================
`not_exists`, `not_in`                 passes
`changed`                              passes when one side is missing or the event lacks an image
everything else, even `ne`             does not pass
=====================================  =====================================================

Numbers are compared by value (`42` equals `42.0`), texts by their characters. A number never
matches a text.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import numpy as np
import pyarrow as pa

from deltaforge_dagster.config.globs import Globs
from deltaforge_dagster.config.processors import FilterProcessor, Predicate
from deltaforge_dagster.kernels.message_text import Mask
from deltaforge_dagster.kernels.runtime import Longs
from deltaforge_dagster.processors.exact_json import Json, Number, as_json, loads

_OPS = {"create": "c", "update": "u", "delete": "d", "read": "r", "truncate": "t"}

Test = Callable[[Json, Json], bool]
"""A condition: takes `after` and `before`, None for a missing image."""


class Filter:
    """One `filter` processor.

    Attributes:
        counts: `filter_dropped`: the number of events that did not pass.
    """

    def __init__(self, config: FilterProcessor) -> None:
        self.counts: Counter[str] = Counter()
        self._ops = {_OPS[op] for op in config.ops}
        self._include, self._exclude = Globs(config.tables.include), Globs(config.tables.exclude)
        self._tests = [_test(predicate) for predicate in config.fields]
        self._any_or_all = any if config.match == "any" else all

    def process(self, frame: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows of a batch of the change frame that pass."""
        passing = _chosen(frame, self._include, self._exclude)
        if self._ops:
            passing &= _is_op(frame.column("op"), self._ops)
        if self._tests:
            self._apply_field_conditions(frame, passing)
        dropped = frame.num_rows - int(passing.sum())
        if not dropped:
            return frame
        self.counts["filter_dropped"] += dropped
        return frame.filter(pa.array(passing))

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def _apply_field_conditions(self, frame: pa.RecordBatch, passing: Mask) -> None:
        """Clear `passing` for rows whose images fail the field conditions."""
        rows = np.flatnonzero(passing)
        after, before = (
            cast(
                "list[str | None]", frame.column(image).take(pa.array(rows, pa.int64())).to_pylist()
            )
            for image in ("after", "before")
        )
        for row, new, old in zip(rows.tolist(), after, before, strict=True):
            images = (None if new is None else loads(new), None if old is None else loads(old))
            passing[row] = self._any_or_all(test(*images) for test in self._tests)


def _is_op(column: pa.Array[Any], ops: set[str]) -> Mask:
    assert isinstance(column, pa.DictionaryArray)
    matching = np.array([op in ops for op in column.dictionary.to_pylist()], np.bool_)
    return cast("Mask", matching[column.indices.to_numpy()])


def _test(predicate: Predicate) -> Test:
    path = predicate.path.split(".")
    if predicate.op == "changed":
        return partial(_changed, path)
    if predicate.op == "exists":
        return lambda after, _: _at(after, path) is not None
    if predicate.op == "not_exists":
        return lambda after, _: _at(after, path) is None
    if predicate.op == "regex":
        pattern = re.compile(predicate.value)
        return lambda after, _: _is_match(pattern, _at(after, path))
    wanted = as_json(predicate.value)
    compare = _COMPARISONS[predicate.op]
    if predicate.op == "not_in":
        return lambda after, _: (value := _at(after, path)) is None or compare(value, wanted)
    return lambda after, _: (value := _at(after, path)) is not None and compare(value, wanted)


def _at(image: Json, path: list[str]) -> Json:
    """Return the value at a path; None if any part of it is missing, null or not an object."""
    for name in path:
        if not isinstance(image, dict):
            return None
        image = image.get(name)
    return image


def _changed(path: list[str], after: Json, before: Json) -> bool:
    if after is None or before is None:
        return True
    return _at(after, path) != _at(before, path)


def _is_match(pattern: re.Pattern[str], value: Json) -> bool:
    return isinstance(value, str) and pattern.search(value) is not None


def _ordered(compare: Callable[[Any, Any], bool], value: Json, wanted: Json) -> bool:
    if isinstance(value, Number) and isinstance(wanted, Number):
        return compare(value.value, wanted.value)
    return isinstance(value, str) and isinstance(wanted, str) and compare(value, wanted)


def _contains(value: Json, wanted: Json) -> bool:
    if isinstance(value, str):
        return isinstance(wanted, str) and wanted in value
    return isinstance(value, list) and wanted in value


def _among(value: Json, wanted: Json) -> bool:
    return isinstance(wanted, list) and value in wanted


_COMPARISONS: Mapping[str, Callable[[Json, Json], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": partial(_ordered, operator.gt),
    "gte": partial(_ordered, operator.ge),
    "lt": partial(_ordered, operator.lt),
    "lte": partial(_ordered, operator.le),
    "in": _among,
    "not_in": lambda value, wanted: not _among(value, wanted),
    "contains": _contains,
}


def _tables(frame: pa.RecordBatch) -> tuple[list[tuple[str, ...]], Longs]:
    """Return the names of each table of a batch, and for each row the index of its table.

    A table has the name `db.table` and, if it has a schema, also `schema.table`.
    """
    columns = [frame.column(name) for name in ("db", "schema", "table")]
    code = np.zeros(frame.num_rows, np.int64)
    for column in columns:
        assert isinstance(column, pa.DictionaryArray)
        code = code * (len(column.dictionary) + 1)
        code += column.indices.fill_null(-1).to_numpy(zero_copy_only=False) + 1
    _, firsts, numbers = np.unique(code, return_index=True, return_inverse=True)
    names: list[tuple[str, ...]] = []
    for row in firsts.tolist():
        db, schema, table = (array[row].as_py() for array in columns)
        full = (f"{db}.{table}",) if schema is None else (f"{schema}.{table}", f"{db}.{table}")
        names.append(full)
    return names, numbers


def _chosen(frame: pa.RecordBatch, include: Globs, exclude: Globs) -> Mask:
    """Return a mask of the rows whose tables are included and not excluded.

    Without patterns in `include`, all tables are included. Patterns are those of `config.globs`:
    `shop.*`, `*.orders`, `order_%`.
    """
    names, numbers = _tables(frame)
    matching = [
        (not include or include.match(aliases)) and not exclude.match(aliases) for aliases in names
    ]
    return np.array(matching, np.bool_)[numbers]
