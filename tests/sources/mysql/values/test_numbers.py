from __future__ import annotations

import struct
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.kernels.json_text import INVALID
from deltaforge_dagster.kernels.runtime import read_only
from deltaforge_dagster.sources.mysql.values.numbers import (
    FLOAT_ROOM,
    VECTOR_GROWTH,
    write_float,
    write_vector,
)


def written(content: bytes) -> str | None:
    """Return the text of a number, None where it is none."""
    out = np.full(FLOAT_ROOM + 16, 0xAA, np.uint8)
    with np.errstate(over="ignore"):
        end = write_float(read_only(content), 0, len(content), out, 0)
    assert np.all(out[FLOAT_ROOM:] == 0xAA)
    return None if end == INVALID else out[:end].tobytes().decode()


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.0, "0.0"),
        (-0.0, "-0.0"),
        (1.0, "1.0"),
        (-0.1, "-0.1"),
        (123456789012345.0, "123456789012345.0"),
        (1234567890123456.0, "1.234567890123456e15"),
        (1e15, "1e15"),
        (1e-15, "0.000000000000001"),
        (1e-16, "1e-16"),
        (1e22, "1e22"),
        (5e-324, "5e-324"),
        (2.2250738585072014e-308, "2.2250738585072014e-308"),
        (1.7976931348623157e308, "1.7976931348623157e308"),
    ],
)
def test_texts(number: float, text: str) -> None:
    """Numbers look as MySQL prints them in documents."""
    assert written(struct.pack("<d", number)) == text


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_doubles(number: float) -> None:
    """The digits are the fewest that read back as the same number: those of Python."""
    text = written(struct.pack("<d", number))

    assert text is not None
    assert Decimal(text) == Decimal(repr(number))
    assert text.startswith("-") == (struct.pack(">d", number)[0] >= 128)


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_floats(number: float) -> None:
    """A FLOAT has the digits of 32 bits, not those of the DOUBLE of the same value."""
    text = written(struct.pack("<f", number))

    assert text is not None
    assert Decimal(text) == Decimal(str(np.float32(number)))


@pytest.mark.parametrize("content", [b"\0\0\x80\x7f", b"\1\0\x80\xff", b"\xff" * 8])
def test_what_json_has_no_number_for(content: bytes) -> None:
    """Infinity and what is not a number, which MySQL cannot store, are damage."""
    assert written(content) is None


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (bytes.fromhex("0000803f00002040cdccccbd"), "[1.0,2.5,-0.1]"),  # what MySQL 9.7 wrote
        (b"", "[]"),
        (b"\0\0\xc0\x7f", '{"_base64":"AADAfw=="}'),
        (b"\0\0\0\0\0", '{"_base64":"AAAAAAA="}'),
    ],
)
def test_vectors(content: bytes, text: str) -> None:
    """A vector is an array of its numbers; bytes that are none stay bytes."""
    room = VECTOR_GROWTH * len(content) + 32
    out = np.full(room + 16, 0xAA, np.uint8)
    with np.errstate(over="ignore"):
        end = write_vector(read_only(content), 0, len(content), out, 0)

    assert out[:end].tobytes().decode() == text
    assert np.all(out[room:] == 0xAA)
