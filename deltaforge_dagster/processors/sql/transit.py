"""The form in which rows pass through Spark's own engine, from one stage of a chain to the next.

Between Python workers, rows pass through the JVM, which converts every column of them. So only the
columns that SQL reads are passed as columns. Everything else is packed: the first row of each batch
holds the whole batch as an Arrow stream, and the other rows hold null. The packed batches come back
unchanged, together with the values computed for each row.

The rows of a segment are enclosed by two *notes*, rows that hold only JSON text: the first
identifies the segment, the last reports the outcome.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import pyarrow as pa
import pyarrow.compute as pc

from deltaforge_dagster.frame import FRAME
from deltaforge_dagster.processors.exact_json import Json, Number, dumps, loads

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
    return _held_by_variant(column) if name in JSON_COLUMNS else column


def _held_by_variant(column: pa.Array[Any]) -> pa.Array[Any]:
    """Turn numbers that VARIANT would round into strings, so that SQL sees all of their digits."""
    suspects: Any = pc.match_substring_regex(column, _MAY_BE_LONG).fill_null(fill_value=False)
    if not suspects.true_count:
        return column
    texts = cast("list[str]", column.filter(suspects).to_pylist())
    held = pa.array([dumps(_held(loads(text))) for text in texts], pa.string())
    return cast("pa.Array[Any]", pc.replace_with_mask(column, suspects, held))


def _held(value: Json) -> Json:
    if isinstance(value, dict):
        return {name: _held(member) for name, member in value.items()}
    if isinstance(value, list):
        return [_held(element) for element in value]
    return value.text if isinstance(value, Number) and _is_long(value.text) else value


def _is_long(text: str) -> bool:
    digits, exponent, power = text.lower().partition("e")
    count = sum(map(str.isdigit, digits.lstrip("-0.")))
    if not exponent:
        return sum(map(str.isdigit, digits.lstrip("-"))) > _DIGITS
    return count > _EXACT_DIGITS or abs(int(power)) > 290
