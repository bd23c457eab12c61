from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.errors import CorruptLog
from deltaforge_dagster.sources.mysql.json_binary import json_text

DOCUMENT = bytes.fromhex(
    "00 01 00 29 00 0b 00 01 00 02 0c 00 61 05 00 1d 00 05 01 00 0b 13 00 04 00 00 04 01 00 0c 1b 00"
    "00 00 00 00 00 00 04 40 01 78"
)
"""What MySQL 8.0 wrote for `{"a": [1, 2.5, null, true, "x"]}`."""


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (DOCUMENT, '{"a":[1,2.5,null,true,"x"]}'),
        (b"", "null"),
        (b"\4\2", "false"),
        (b"\5\xff\xff", "-1"),
        (b"\x0a" + b"\xff" * 8, "18446744073709551615"),
        (b"\x0c\x03\xc3\xbc\x22", '"ü\\""'),
        (b"\x0f\xf6\x04\x03\x01\x80\x05", "0.5"),
        (b"\x0f\xf6\x04\x03\x01\x7f\xfa", "-0.5"),
        (b"\x0f\x10\x01\x05", '"base64:type16:BQ=="'),
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
    with pytest.raises(CorruptLog):
        json_text(content)


@given(st.integers(0, len(DOCUMENT) - 1), st.integers(0, 255), st.integers(0, len(DOCUMENT)))
def test_damage_is_noticed_or_is_another_document(at: int, byte: int, size: int) -> None:
    """Damaged bytes raise an error of the tree or are JSON: nothing else comes out."""
    content = bytearray(DOCUMENT[:size])
    if at < size:
        content[at] = byte
    try:
        text = json_text(bytes(content))
    except CorruptLog:
        return
    json.loads(text)


@given(st.binary(max_size=60))
def test_any_bytes(content: bytes) -> None:
    """Bytes that are no document raise an error of the tree."""
    try:
        json.loads(json_text(content))
    except CorruptLog:
        return
