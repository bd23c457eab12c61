"""The Python side of the `sql` processor: it passes rows to Spark, and writes what Spark computed.

Spark computes the expressions between two stages of the chain (`pipeline.process.expressions`).
Each row arrives with an additional column for each expression, numbered in the order of
`SqlProcessor.computed`: a boolean for `where`; for `set` a value of any type that has a JSON form,
or the JSON text of a VARIANT; and text for `route`.

All expressions see the original row. Only the fields that the block names are written; every other
byte of the images stays unchanged.

Between Python workers, rows pass through the JVM, which converts every column of them. So only the
columns that SQL reads are passed as columns. Everything else is packed: the first row of each batch
holds the whole batch as an Arrow stream, and the other rows hold null. The packed batches come back
unchanged, together with the values computed for each row.

The rows of a segment are enclosed by two *notes*, rows that hold only JSON text: the first
identifies the segment, the last reports the outcome.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.config.processors import SqlProcessor, expression_words
from deltaforge_dagster.errors import ProcessorFailed
from deltaforge_dagster.frame import FRAME
from deltaforge_dagster.processors.exact_json import Json, Number, dumps, loads
from deltaforge_dagster.processors.sql_values import json_texts, with_field, without_field

PACKED, NOTE = "_packed", "_note"

JSON_COLUMNS = ("before", "after", "key", "headers", "tags")
"""The readable columns that hold JSON text; SQL sees them as VARIANT."""
READABLE = (
    *JSON_COLUMNS, "op", "ts_us", "db", "schema", "table", "tx_id", "event_id", "topic",
    "route_key", "synthetic",
)  # fmt: skip
"""Columns of the change frame that SQL may read."""

Item: TypeAlias = "dict[str, Any] | pa.RecordBatch"
"""A note, or a batch of rows."""
_DIGITS = 38
"""The most digits of a decimal in Spark's VARIANT; longer numbers become floating-point numbers."""
_EXACT_DIGITS = 15
"""The digits that a double always preserves; VARIANT stores numbers with an exponent as doubles."""
_MAY_BE_LONG = r"[:,\[] *-?([0-9.]{39}|[0-9.]+[eE])"


def transit_schema(columns: Sequence[str]) -> pa.Schema:
    """Return the schema of the rows passed to Spark when SQL reads these columns."""
    kinds = [(column, pa.int64() if column == "ts_us" else pa.string()) for column in columns]
    return pa.schema([*kinds, (PACKED, pa.binary()), (NOTE, pa.string())])


def note(columns: Sequence[str], content: Mapping[str, Any]) -> pa.RecordBatch:
    """Return a note as a batch of the transit schema."""
    return pa.RecordBatch.from_pylist([{NOTE: json.dumps(content)}], transit_schema(columns))


def packed(columns: Sequence[str], rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch, which has at least one row, in the transit schema."""
    schema = transit_schema(columns)
    arrays = [_readable(rows, column) for column in columns]
    arrays.append(pa.array([_stream(rows), *[None] * (rows.num_rows - 1)], pa.binary()))
    arrays.append(pa.nulls(rows.num_rows, pa.string()))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def unpacked(batches: Iterable[pa.RecordBatch]) -> Iterator[Item]:
    """Yield the notes and the unpacked batches that Spark returns.

    The computed columns follow the batch's own columns. Spark may return the rows in batches of
    other sizes, but in order.
    """
    whole: pa.RecordBatch | None = None
    parts: list[pa.RecordBatch] = []
    missing = 0
    for batch in batches:
        computed = batch.select([name for name in batch.schema.names if name not in {PACKED, NOTE}])
        at = 0
        while at < batch.num_rows:
            if not missing:
                text = batch.column(NOTE)[at].as_py()
                if text is not None:
                    yield json.loads(text)
                    at += 1
                    continue
                whole = _batch(cast("pa.BinaryScalar", batch.column(PACKED)[at]))
                missing = whole.num_rows
            taken = min(missing, batch.num_rows - at)
            parts.append(computed.slice(at, taken))
            at += taken
            missing -= taken
            if not missing:
                assert whole is not None
                yield _with_computed(whole, parts)
                parts = []


def frame_of(rows: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    """Split an unpacked batch into the change frame and the computed columns."""
    names = rows.schema.names
    computed = [name for name in names if name not in FRAME.names]
    return rows.select([name for name in names if name in FRAME.names]), rows.select(computed)


def _with_computed(whole: pa.RecordBatch, parts: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    schema = parts[0].schema
    arrays = [pa.concat_arrays([part.column(name) for part in parts]) for name in schema.names]
    return pa.RecordBatch.from_arrays(
        [*whole.columns, *arrays], schema=pa.schema([*whole.schema, *schema])
    )


def _stream(rows: pa.RecordBatch) -> bytes:
    """Return a batch as an Arrow stream, without long dictionaries of mostly unused names."""
    arrays: list[pa.Array[Any]] = []
    for column in rows.columns:
        long = isinstance(column, pa.DictionaryArray) and len(column.dictionary) > rows.num_rows
        arrays.append(column.cast(pa.string()).dictionary_encode() if long else column)
    slim = pa.RecordBatch.from_arrays(arrays, schema=rows.schema)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, slim.schema) as writer:
        writer.write_batch(slim)
    return sink.getvalue().to_pybytes()


def _batch(stream: pa.BinaryScalar) -> pa.RecordBatch:
    with pa.ipc.open_stream(stream.as_buffer()) as reader:
        return reader.read_next_batch()


def _readable(rows: pa.RecordBatch, name: str) -> pa.Array[Any]:
    column = rows.column(name)
    if isinstance(column, pa.DictionaryArray):
        return column.cast(pa.string())
    return _all_in_variant(column) if name in JSON_COLUMNS else column


def _all_in_variant(column: pa.Array[Any]) -> pa.Array[Any]:
    """Turn numbers that VARIANT would round into strings, so that SQL sees all of their digits."""
    suspects: Any = pc.match_substring_regex(column, _MAY_BE_LONG).fill_null(fill_value=False)
    if not suspects.true_count:
        return column
    texts = cast("list[str]", column.filter(suspects).to_pylist())
    written = pa.array([dumps(_in_variant(loads(text))) for text in texts], pa.string())
    return cast("pa.Array[Any]", pc.replace_with_mask(column, suspects, written))


def _in_variant(value: Json) -> Json:
    if isinstance(value, dict):
        return {name: _in_variant(member) for name, member in value.items()}
    if isinstance(value, list):
        return [_in_variant(element) for element in value]
    return value.text if isinstance(value, Number) and _is_long(value.text) else value


def _is_long(text: str) -> bool:
    digits, exponent, power = text.lower().partition("e")
    count = sum(map(str.isdigit, digits.lstrip("-0.")))
    if not exponent:
        return sum(map(str.isdigit, digits.lstrip("-"))) > _DIGITS
    return count > _EXACT_DIGITS or abs(int(power)) > 290


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
