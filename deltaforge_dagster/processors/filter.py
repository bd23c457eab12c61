"""The `filter` processor: an event passes if it matches all conditions.

The conditions are `ops`, `tables` and `fields`; one that is absent matches every event. Fields are read from
`after`, by a dotted path through objects; null counts as missing. For an event without the field, or
without `after`:

=====================================  =====================================================
`not_exists`, `not_in`                 passes
`changed`                              passes when one side is missing or the event lacks an image
everything else, even `ne`             does not pass
=====================================  =====================================================

Numbers are compared by value (`42` equals `42.0`), texts by their characters. A number never matches a
text.
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
from deltaforge_dagster.config.processors.processors import FilterProcessor, Predicate
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
        self._ops = {_OPS[one] for one in config.ops}
        self._include, self._exclude = Globs(config.tables.include), Globs(config.tables.exclude)
        self._tests = [_test(one) for one in config.fields]
        self._enough = any if config.match == "any" else all

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
            cast("list[str | None]", frame.column(one).take(pa.array(rows, pa.int64())).to_pylist())
            for one in ("after", "before")
        )
        for row, new, old in zip(rows.tolist(), after, before, strict=True):
            images = (None if new is None else loads(new), None if old is None else loads(old))
            passing[row] = self._enough(test(*images) for test in self._tests)


def _is_op(column: pa.Array[Any], ops: set[str]) -> Mask:
    assert isinstance(column, pa.DictionaryArray)
    good = np.array([one in ops for one in column.dictionary.to_pylist()], np.bool_)
    return cast("Mask", good[column.indices.to_numpy()])


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
        return lambda after, _: (found := _at(after, path)) is None or compare(found, wanted)
    return lambda after, _: (found := _at(after, path)) is not None and compare(found, wanted)


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


def _ordered(compare: Callable[[Any, Any], bool], found: Json, wanted: Json) -> bool:
    if isinstance(found, Number) and isinstance(wanted, Number):
        return compare(found.value, wanted.value)
    return isinstance(found, str) and isinstance(wanted, str) and compare(found, wanted)


def _contains(found: Json, wanted: Json) -> bool:
    if isinstance(found, str):
        return isinstance(wanted, str) and wanted in found
    return isinstance(found, list) and wanted in found


def _among(found: Json, wanted: Json) -> bool:
    return isinstance(wanted, list) and found in wanted


_COMPARISONS: Mapping[str, Callable[[Json, Json], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": partial(_ordered, operator.gt),
    "gte": partial(_ordered, operator.ge),
    "lt": partial(_ordered, operator.lt),
    "lte": partial(_ordered, operator.le),
    "in": _among,
    "not_in": lambda found, wanted: not _among(found, wanted),
    "contains": _contains,
}


def _tables(frame: pa.RecordBatch) -> tuple[list[tuple[str, ...]], Longs]:
    """Return the names of each table of a batch, and for each row the index of its table.

    A table has the name `db.table` and, if it has a schema, also `schema.table`.
    """
    columns = [frame.column(one) for one in ("db", "schema", "table")]
    code = np.zeros(frame.num_rows, np.int64)
    for column in columns:
        assert isinstance(column, pa.DictionaryArray)
        code = code * (len(column.dictionary) + 1)
        code += column.indices.fill_null(-1).to_numpy(zero_copy_only=False) + 1
    _, firsts, numbers = np.unique(code, return_index=True, return_inverse=True)
    found: list[tuple[str, ...]] = []
    for row in firsts.tolist():
        db, schema, table = (one[row].as_py() for one in columns)
        full = (f"{db}.{table}",) if schema is None else (f"{schema}.{table}", f"{db}.{table}")
        found.append(full)
    return found, numbers


def _chosen(frame: pa.RecordBatch, include: Globs, exclude: Globs) -> Mask:
    """Return a mask of the rows whose tables are included, or all without a pattern, and not excluded.

    Patterns are those of `config.globs`: `shop.*`, `*.orders`, `order_%`.
    """
    names, numbers = _tables(frame)
    good = [(not include or include.match(one)) and not exclude.match(one) for one in names]
    return np.array(good, np.bool_)[numbers]
