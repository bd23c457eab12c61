"""The Python side of the `sql` processor: it writes the values that Spark computed into the rows.

Spark computes the expressions between two stages of the chain (`transit`, and
`pipeline.process.expressions`). Each row arrives with an additional column for each expression,
numbered in the order of `SqlProcessor.computed`: a boolean for `where`; for `set` a value of any
type that has a JSON form, or the JSON text of a VARIANT; and text for `route`.

All expressions see the original row. Only the fields that the block names are written; every other
byte of the images stays unchanged.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.config.processors import SqlProcessor
from deltaforge_dagster.errors import ProcessorFailed
from deltaforge_dagster.processors.sql.json_values import json_texts
from deltaforge_dagster.processors.sql.spliced_fields import with_field, without_field
from deltaforge_dagster.processors.sql.transit import READABLE, frame_of


def value_column(config: SqlProcessor, expression: str) -> str:
    """Return the name of the column with the values of an expression."""
    return f"value_{list(config.computed).index(expression)}"


def json_column(config: SqlProcessor, expression: str) -> str:
    """Return the name of the column with the values of an expression as JSON text."""
    return f"json_{list(config.computed).index(expression)}"


def columns_read(config: SqlProcessor | None) -> tuple[str, ...]:
    """Return the columns of the frame that the expressions may read; none without a processor."""
    if config is None:
        return ()
    named = set().union(*map(expression_words, config.computed.values()))
    return tuple(column for column in READABLE if column in named)


class Sql:
    """One `sql` processor.

    Attributes:
        counts: `sql_dropped`: the number of events that did not pass.
    """

    def __init__(self, config: SqlProcessor) -> None:
        self.counts: Counter[str] = Counter()
        self._config = config

    def process(self, frame: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows that pass, with the computed values written into them.

        Raises:
            ProcessorFailed: A value has no JSON form.
        """
        if self._config.where is not None:
            passing: Any = frame.column(value_column(self._config, "where")).fill_null(
                fill_value=False
            )
            self.counts["sql_dropped"] += frame.num_rows - passing.true_count
            frame = frame.filter(passing)
        rows, computed = frame_of(frame)
        for image in ("before", "after"):
            column = cast("pa.StringArray", rows.column(image))
            for target in self._config.set:
                where, _, name = target.partition(".")
                if where == image:
                    column = with_field(column, name, self._texts(computed, target))
            for name in self._config.drop:
                column = without_field(column, name)
            rows = _with_column(rows, image, column)
        return self._routed(rows, computed)

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def _texts(self, computed: pa.RecordBatch, target: str) -> pa.StringArray:
        expression = f"set.{target}"
        texts = json_column(self._config, expression)
        if texts in computed.schema.names:
            return cast("pa.StringArray", computed.column(texts).fill_null("null"))
        try:
            return json_texts(computed.column(value_column(self._config, expression)))
        except ProcessorFailed as error:
            raise ProcessorFailed(f"processor {self._config.id}: set {target}: {error}") from None

    def _routed(self, rows: pa.RecordBatch, computed: pa.RecordBatch) -> pa.RecordBatch:
        route = self._config.route
        for part, column in (("topic", "topic"), ("key", "route_key")):
            if getattr(route, part) is not None:
                new = computed.column(value_column(self._config, f"route.{part}"))
                rows = _with_column(rows, column, pc.coalesce(new, rows.column(column)))
        if route.headers:
            headers = {
                name: computed.column(
                    value_column(self._config, f"route.headers.{name}")
                ).to_pylist()
                for name in route.headers
            }
            old = cast("list[str | None]", rows.column("headers").to_pylist())
            texts = [
                _headers(own, dict(zip(headers, values, strict=True)))
                for own, values in zip(old, zip(*headers.values(), strict=True), strict=True)
            ]
            rows = _with_column(rows, "headers", pa.array(texts, pa.string()))
        return rows


def _headers(old: str | None, new: dict[str, str | None]) -> str | None:
    """Return headers with the new ones that are not null added."""
    added = {name: value for name, value in new.items() if value is not None}
    if not added:
        return old
    return orjson.dumps({**(orjson.loads(old) if old else {}), **added}).decode()


def _with_column(rows: pa.RecordBatch, name: str, column: pa.Array[Any]) -> pa.RecordBatch:
    index = rows.schema.get_field_index(name)
    return rows.set_column(index, rows.schema.field(index), column)
