"""Records of SQLite's format: every value comes out as it went in, and bad bytes are named."""

from __future__ import annotations

import sqlite3
import struct
from contextlib import closing

import pytest
import turso
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.errors import CorruptLog
from deltaforge_dagster.sources.turso.connection import Value
from deltaforge_dagster.sources.turso.values import decode_record

_I64 = st.integers(-(1 << 63), (1 << 63) - 1)
VALUES = st.one_of(
    st.none(),
    _I64,
    st.sampled_from(
        [0, 1, -1, 127, 128, -129, 32767, -32769, 8388607, 1 << 31, 1 << 47, -(1 << 47) - 1]
    ),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=300),
    st.binary(max_size=300),
)


def varint(number: int) -> bytes:
    """Write a number as SQLite does."""
    if number >> 56:
        high = number >> 8
        return bytes(high >> shift & 0x7F | 0x80 for shift in range(49, -1, -7)) + bytes(
            [number & 0xFF]
        )
    digits = [number & 0x7F]
    while number := number >> 7:
        digits.append(number & 0x7F | 0x80)
    return bytes(reversed(digits))


def reference(values: list[Value]) -> bytes:
    """Write a record by the letter of the format, integers as short as they can be."""
    pairs = [_pair(value) for value in values]
    types = b"".join(varint(serial) for serial, _ in pairs)
    size = len(types) + 1
    while len(types) + len(varint(size)) != size:
        size = len(types) + len(varint(size))
    return varint(size) + types + b"".join(body for _, body in pairs)


def _pair(value: Value) -> tuple[int, bytes]:
    """Return the serial type and the bytes of a value."""
    match value:
        case None:
            return 0, b""
        case int():
            if value in {0, 1}:
                return 8 + value, b""
            sizes = ((1, 1), (2, 2), (3, 3), (4, 4), (5, 6), (6, 8))
            serial, size = next(
                one for one in sizes if -(1 << 8 * one[1] - 1) <= value < 1 << 8 * one[1] - 1
            )
            return serial, value.to_bytes(size, "big", signed=True)
        case float():
            return 7, struct.pack(">d", value)
        case str():
            return 13 + 2 * len(value.encode()), value.encode()
        case bytes():
            return 12 + 2 * len(value), value


@given(st.lists(VALUES, max_size=200))
def test_every_value_comes_out_as_it_went_in(values: list[Value]) -> None:
    """Integers of every size, doubles to the bit, text, blobs, and headers longer than 127 bytes."""
    decoded = decode_record(reference(values))

    assert list(map(repr, decoded)) == list(map(repr, values))


def test_records_that_the_engine_writes() -> None:
    """What Turso itself writes into its change table is decoded as what was inserted."""
    rows: list[tuple[Value, ...]] = [
        (1, None, 0.1, 'é\0 "', b"\x00\xff", -(1 << 63)),
        (2, 1, -1.5e300, "", b"", (1 << 63) - 1),
        (3, -32769, 1e-310, "x" * 5000, bytes(range(256)) * 40, 0),
    ]
    with closing(turso.connect(":memory:", isolation_level=None)) as connection:
        connection.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, a, b REAL, c TEXT, d BLOB, e)")
        connection.execute("PRAGMA unstable_capture_data_changes_conn('full')").fetchall()
        for row in rows:
            connection.execute("INSERT INTO t VALUES (?, ?, ?, ?, ?, ?)", row)
        records = connection.execute(
            "SELECT after FROM turso_cdc WHERE change_type = 1 ORDER BY change_id"
        ).fetchall()

    assert [tuple(decode_record(record)) for (record,) in records] == rows


@given(st.binary(max_size=60))
def test_bad_bytes_have_one_error(record: bytes) -> None:
    """Whatever the bytes are: values, or `CorruptLog`; and what follows the record is not ignored."""
    try:
        decode_record(record)
    except CorruptLog:
        return
    with pytest.raises(CorruptLog):
        decode_record(record + b"\0")


@pytest.mark.parametrize("serial", [10, 11])
def test_reserved_types_are_refused(serial: int) -> None:
    """A value of a kind that no SQLite writes is not guessed."""
    with pytest.raises(CorruptLog, match=f"serial type {serial}"):
        decode_record(bytes([2, serial]))


def test_text_that_is_not_utf_8_stays_bytes() -> None:
    """SQLite checks no text, so that any bytes may come."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.text_factory = bytes
        ((data,),) = connection.execute("SELECT CAST(x'ff41' AS TEXT)")

    assert decode_record(bytes([2, 13 + 2 * 2]) + data) == [b"\xffA"]
