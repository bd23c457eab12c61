"""Rows in COPY's binary format, compared with what psycopg makes of the same values."""

from __future__ import annotations

import datetime as dt
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pytest
from psycopg.adapt import PyFormat
from psycopg.types.numeric import Int2, Int4, Int8

from deltaforge_dagster.sinks.postgres.copy_rows import copy_rows, has_nul, wire

NAN = float("nan")
COLUMNS: list[tuple[pa.DataType, list[Any], Any]] = [
    (pa.bool_(), [True, None, False], None),
    (pa.int8(), [-1, 127, None], Int2),
    (pa.int16(), [None, -(2**15), 1], Int2),
    (pa.int32(), [2**31 - 1, -1, None], Int4),
    (pa.int64(), [-(2**63), None, 0], Int8),
    (pa.float64(), [NAN, -0.0, 1e300], None),
    (pa.string(), ["", None, "ä\\N\t"], None),
    (pa.binary(), [b"\x00\xff", b"", None], None),
    (pa.date32(), [dt.date.min, dt.date(2000, 1, 1), dt.date.max], None),
    (pa.time64("us"), [dt.time.max, None, dt.time.min], None),
]


def field(value: Any, wrapper: Any) -> bytes:
    """Return the field that psycopg sends for a value."""
    if value is None:
        return b"\xff\xff\xff\xff"
    sent = psycopg.adapters.get_dumper(type(wrapper(value) if wrapper else value), PyFormat.BINARY)
    data = sent(type(value)).dump(wrapper(value) if wrapper else value)
    assert data is not None
    return len(data).to_bytes(4, "big") + bytes(data)


@pytest.mark.parametrize("start", [0, 1])
def test_fields_are_those_of_psycopg(start: int) -> None:
    """Of every type, with nulls, from arrays that begin anywhere."""
    arrays = [pa.array(values, type_)[start:] for type_, values, _ in COLUMNS]
    expected = b"".join(
        len(COLUMNS).to_bytes(2, "big")
        + b"".join(field(values[row], wrapper) for _, values, wrapper in COLUMNS)
        for row in range(start, 3)
    )
    assert bytes(copy_rows(arrays)) == expected
    assert bytes(copy_rows([one[:0] for one in arrays])) == b""


def test_moments_are_microseconds_since_2000() -> None:
    """With and without a time zone."""
    made = bytes(copy_rows([pa.array([-1, None], pa.timestamp("us", "UTC"))]))
    since = (-1 - 946_684_800_000_000).to_bytes(8, "big", signed=True)
    assert made == b"\x00\x01\x00\x00\x00\x08" + since + b"\x00\x01\xff\xff\xff\xff"


def test_arrays_and_decimals_are_text() -> None:
    """Elements are quoted; an array in an array is not."""
    lists = pa.array([["a", None, 'b"\\'], None, []], pa.list_(pa.string()))
    assert wire(lists).to_pylist() == ['{"a",NULL,"b\\"\\\\"}', None, "{}"]
    nested = pa.array([[[1], [None]]], pa.list_(pa.list_(pa.int32())))
    assert wire(nested).to_pylist() == ['{{"1"},{NULL}}']
    assert wire(pa.array([[b"\x00"]], pa.list_(pa.binary()))).to_pylist() == ['{"\\\\x00"}']
    assert wire(lists[1:]).to_pylist() == [None, "{}"]


def test_nul_is_found_where_it_counts() -> None:
    """In texts that are not null, and not in bytes."""
    assert has_nul(pa.array(["a", "b\0"]))
    assert not has_nul(pa.array(["a", "b\0"])[:1])
    assert not has_nul(pa.array([b"\0"]))
    data = pa.py_buffer(b"a\0")
    offsets, valid = pa.py_buffer(np.array([0, 1, 2], np.int32).tobytes()), pa.py_buffer(b"\x01")
    assert not has_nul(pa.StringArray.from_buffers(2, offsets, data, valid))
