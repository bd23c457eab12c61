from __future__ import annotations

import base64
import json
from datetime import UTC, datetime

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deltaforge_dagster.kernels import json_text
from deltaforge_dagster.kernels.json_text import INVALID, JSON, MAX_DEPTH, OVERHEAD, TOO_DEEP
from tests.chance import examples

GUARD = 0xEE
"""Fills the buffer, to show that nothing beyond the promised bound is touched."""


def write(kind: int, text: bytes) -> str | int:
    """Write a scalar with exactly the room it may ask for; return its text or the code."""
    bound = len(text) * json_text.STRING_GROWTH + OVERHEAD
    out = np.full(bound + 16, GUARD, np.uint8)
    source = np.frombuffer(b"<" + text + b">", np.uint8)
    stack = np.empty(MAX_DEPTH, np.uint8)
    end = json_text.write_scalar(kind, source, 1, 1 + len(text), out, 0, stack)
    assert set(out[bound:].tolist()) == {GUARD}
    return end if end < 0 else out[:end].tobytes().decode()


@given(st.text())
@example("".join(map(chr, range(256))))
def test_strings_are_escaped_as_json_does(text: str) -> None:
    """A string comes out as Python's own JSON writer has it, and its size is known beforehand."""
    raw = text.encode("utf-8", "surrogatepass")
    out = np.zeros(len(raw) * 6 + 2, np.uint8)
    source = np.frombuffer(raw, np.uint8)
    end = json_text.write_string(source, 0, len(raw), out, 0)

    written = out[:end].tobytes().decode("utf-8", "surrogatepass")
    assert written == json.dumps(text, ensure_ascii=False)
    assert json_text.string_size(source, 0, len(raw)) == end


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        (b"0", True),
        (b"-7", True),
        (b"9223372036854775808", True),
        (b"", False),
        (b"-", False),
        (b"01", False),
        (b"+1", False),
        (b"1.0", False),
        (b"1 ", False),
    ],
)
def test_integers(text: bytes, valid: bool) -> None:
    """An integer of any length stands as it is; anything else is refused."""
    assert write(json_text.INTEGER, text) == (text.decode() if valid else INVALID)


@pytest.mark.parametrize("text", ["0", "-0", "1e+20", "1.5e-07", "-12.25", "1E5"])
def test_floats_stand_as_they_are(text: str) -> None:
    """A float keeps its digits: no conversion, no loss."""
    assert write(json_text.FLOAT, text.encode()) == text


def test_special_floats_are_strings() -> None:
    """JSON has no NaN and no infinity: they are strings; other words are refused."""
    assert write(json_text.FLOAT, b"NaN") == '"NaN"'
    assert write(json_text.FLOAT, b"-Infinity") == '"-Infinity"'
    for text in (b"", b"-NaN", b"nan", b"Infinit", b".5", b"5.", b"1e", b"--1", b"0x1"):
        assert write(json_text.FLOAT, text) == INVALID


def test_booleans() -> None:
    """PostgreSQL's `t` and `f`, and nothing else."""
    assert [write(json_text.BOOLEAN, b) for b in (b"t", b"f", b"", b"true")] == [
        "true",
        "false",
        INVALID,
        INVALID,
    ]


@pytest.mark.parametrize("size", range(7))
def test_hex_becomes_base64(size: int) -> None:
    """Bytes of every length come out as base64 with its padding."""
    content = bytes(range(250, 250 + size)) if size < 6 else bytes(range(6))
    written = write(json_text.BYTEA, b"\\x" + content.hex().encode())

    assert isinstance(written, str)
    assert json.loads(written) == {"_base64": base64.b64encode(content).decode()}


@given(st.binary(max_size=20))
def test_escaped_bytes_become_base64(content: bytes) -> None:
    """The escape format, as the server writes it, gives the same bytes as the hex format."""
    escaped = "".join(
        "\\\\" if b == 92 else chr(b) if 32 <= b <= 126 else f"\\{b:03o}" for b in content
    )
    written = write(json_text.BYTEA, escaped.encode())

    assert isinstance(written, str)
    assert json.loads(written) == {"_base64": base64.b64encode(content).decode()}


def test_bad_bytea_is_refused() -> None:
    """Half bytes, other characters and other notations are refused."""
    for text in (
        b"\\",
        b"\\x0",
        b"\\x0g",
        b"a\nb",
        b"\xc3\xbc",
        b"\\X00",
        b"\\08",
        b"\\400",
        b"\\18x",
    ):
        assert write(json_text.BYTEA, text) == INVALID


@given(st.datetimes())
def test_timestamps_are_those_of_iso_8601(moment: datetime) -> None:
    """What PostgreSQL prints becomes what Python's own form is, to the microsecond."""
    text = moment.isoformat(" ").rstrip("0") if moment.microsecond else moment.isoformat(" ")
    written = write(json_text.TIMESTAMP, text.encode())
    zoned = write(json_text.TIMESTAMP, f"{text}+00".encode())

    assert written == json.dumps(text.replace(" ", "T"))
    assert datetime.fromisoformat(json.loads(str(written))) == moment
    assert datetime.fromisoformat(json.loads(str(zoned))) == moment.replace(tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("2026-03-01 12:34:56.5+05:45", "2026-03-01T12:34:56.5+05:45"),
        ("1850-01-01 00:00:00-00:01:15", "1850-01-01T00:00:00-00:01:15"),
        ("2026-03-01 12:34:56-11", "2026-03-01T12:34:56-11:00"),
        ("0044-03-15 12:00:00 BC", "0044-03-15T12:00:00 BC"),
        ("4714-11-24 00:00:00.000001+00 BC", "4714-11-24T00:00:00.000001+00:00 BC"),
        ("294276-12-31 23:59:59.999999", "294276-12-31T23:59:59.999999"),
        ("10000-01-01 00:00:00+00", "10000-01-01T00:00:00+00:00"),
        ("infinity", "infinity"),
        ("-infinity", "-infinity"),
    ],
)
def test_timestamps_beyond_iso_8601(text: str, written: str) -> None:
    """Other offsets, years, eras and infinities are as the server's `to_json` writes them."""
    assert write(json_text.TIMESTAMP, text.encode()) == f'"{written}"'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-",
        "now",
        "Infinity",
        "--infinity",
        "2026-03-01",
        "2026-03-01T12:34:56",
        "026-03-01 12:34:56",
        "2026-3-01 12:34:56",
        "2026-03-01 12:34",
        "2026-03-01 12:34:5x",
        "2026-03-01 12:34:56.",
        "2026-03-01 12:34:56+",
        "2026-03-01 12:34:56+1",
        "2026-03-01 12:34:56+123",
        "2026-03-01 12:34:56+01:3",
        "2026-03-01 12:34:56+01x",
        "2026-03-01 12:34:56 AD",
        "2026-03-01 12:34:56 BC ",
        "2026-03-01 12:34:56 BC+00",
    ],
)
def test_what_is_no_timestamp_is_refused(text: str) -> None:
    """What the server cannot have printed stops the stream, wherever it ends."""
    assert write(json_text.TIMESTAMP, text.encode()) == INVALID


documents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(documents, st.sampled_from([None, 0, 3, "\t\r\n "]))
def test_documents_lose_their_white_space(document: object, indent: int | str | None) -> None:
    """A document stays the same but for the white space between its tokens; that of two says that they are documents."""
    if "Infinity" in json.dumps(document):
        return
    written = write(JSON, json.dumps(document, indent=indent).encode())

    marks = {"null": "null\t", '{"_unchanged":true}': '{"_unchanged":true }'}
    compact = json.dumps(document, separators=(",", ":"))
    assert written == marks.get(compact, compact)


@settings(max_examples=examples(500))
@given(st.text('{}[]",:\\u0e-+.19 tfnrualse\n/b\x01', max_size=12))
@example('"\\u00e"')
@example("[1,]")
@example("{,}")
@example('{"a"}')
@example('{"a":1,}')
@example("[}")
@example("tru")
@example("1 2")
@example("")
def test_only_json_is_a_document(text: str) -> None:
    """What Python's JSON parser refuses is refused, and nothing else."""
    try:
        json.loads(text, parse_constant=lambda _: 1 / 0)
        valid = True
    except (ValueError, ZeroDivisionError):
        valid = False

    assert (write(JSON, text.encode()) != INVALID) == valid


def test_depth_is_limited() -> None:
    """A document as deep as the stack is written; one level more is refused, and nothing breaks."""
    deepest = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH

    assert write(JSON, deepest) == deepest.decode()
    assert write(JSON, b"[" + deepest + b"]") == TOO_DEEP
