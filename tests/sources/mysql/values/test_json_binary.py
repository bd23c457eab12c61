from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.kernels.json_text import INVALID, STRING_GROWTH
from deltaforge_dagster.kernels.runtime import read_only
from deltaforge_dagster.sources.mysql.values.json_binary import (
    DOCUMENT_ROOM,
    FRAME_WIDTH,
    MAX_DEPTH,
    write_json,
)

DOCUMENT = bytes.fromhex(
    "00 01 00 29 00 0b 00 01 00 02 0c 00 61 05 00 1d 00 05 01 00 0b 13 00 04 00 00 04 01 00 0c 1b 00"
    "00 00 00 00 00 00 04 40 01 78"
)
"""What MySQL 8.0 wrote for `{"a": [1, 2.5, null, true, "x"]}`."""


def json_text(content: bytes) -> str | None:
    """Return the document as JSON; None for damage. Nothing may be written beyond the room."""
    room = STRING_GROWTH * len(content) + DOCUMENT_ROOM
    out = np.full(room + 64, 0xAA, np.uint8)
    stack = np.empty((MAX_DEPTH, FRAME_WIDTH), np.int64)
    with np.errstate(over="ignore"):
        end = write_json(read_only(b"??" + content), 2, len(content) + 2, out, 0, stack)
    assert end <= room
    assert np.all(out[room:] == 0xAA)
    return None if end == INVALID else out[:end].tobytes().decode()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (DOCUMENT, '{"a":[1,2.5,null,true,"x"]}'),
        (b"", "null\t"),
        (b"\4\0", "null\t"),
        (b"\4\2", "false"),
        (b"\5\xff\xff", "-1"),
        (b"\x0a" + b"\xff" * 8, "18446744073709551615"),
        (b"\x0c\x03\xc3\xbc\x22", '"ü\\""'),
        (b"\x0f\xf6\x04\x03\x01\x80\x05", "0.5"),
        (b"\x0f\xf6\x04\x03\x01\x7f\xfa", "-0.5"),
        (b"\x0f\x10\x01\x05", '"base64:type16:BQ=="'),
        (b"\x0f\xfc\x3a" + bytes(58), f'"base64:type252:{"A" * 76}\\nAA=="'),
        (
            b"\x0f\x0b\x08" + (-(838 << 36)).to_bytes(8, "little", signed=True),
            '"-838:00:00.000000"',
        ),
    ],
)
def test_documents(content: bytes, text: str) -> None:
    """Documents become JSON on one line; column values in them take the form that MySQL prints."""
    assert json_text(content) == text


@pytest.mark.parametrize(
    "content",
    [
        DOCUMENT[:-1],
        b"\4\3",
        b"\x0d",
        b"\x0c\xff\xff\xff\xff\xff\1",
        b"\x0b" + bytes(6) + b"\xf0\x7f",
        b"\x0f\xf6\x05\x03\x01\x80\x05\x00",
    ],
)
def test_no_documents(content: bytes) -> None:
    """What is cut, has an unknown type or a number that JSON does not have is damage."""
    assert json_text(content) is None


@given(st.integers(0, len(DOCUMENT) - 1), st.integers(0, 255), st.integers(0, len(DOCUMENT)))
def test_damage_is_noticed_or_is_another_document(at: int, byte: int, size: int) -> None:
    """Damaged bytes are noticed or are JSON: nothing else comes out."""
    content = bytearray(DOCUMENT[:size])
    if at < size:
        content[at] = byte
    text = json_text(bytes(content))
    assert text is None or json.loads(text) is not ...


@given(st.binary(max_size=60))
def test_any_bytes(content: bytes) -> None:
    """Bytes that are no document are noticed."""
    text = json_text(content)
    assert text is None or json.loads(text) is not ...


def test_a_document_inside_itself() -> None:
    """Containers that contain themselves end at the greatest depth, and do not fill the memory."""
    itself = b"\x02\x01\x00\x07\x00\x02\x00\x00"
    many = b"\x02\x40\x00\xc4\x00" + b"\x02\x00\x00" * 64

    assert json_text(itself) is None
    assert json_text(many) is None
