from __future__ import annotations

import json
import struct
from datetime import date
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deltaforge_dagster.sources.value_types import ValueType, parse_value_type
from deltaforge_dagster.typed_rows.schema import TypedColumn, TypedSchema
from deltaforge_dagster.typed_rows.tables import TypedRows, typed_rows
from tests.sources.hidden import base64_of
from tests.typed_rows.forms import agree, fits, same


def typed(type_: ValueType | str, *values: str | None) -> TypedRows:
    """Return rows with one column, whose values are these JSON texts; None for an image without the column."""
    wanted = parse_value_type(type_) if isinstance(type_, str) else type_
    images = ["{}" if value is None else f'{{"c":{value}}}' for value in values]
    return typed_rows(pa.array(images, pa.string()), TypedSchema((TypedColumn("c", wanted),)))


def value(type_: ValueType | str, text: str) -> Any:
    """Return what a column has of a JSON text, or why it does not fit."""
    rows = typed(type_, text)
    return rows.misfits[0].reason if rows.misfits else rows.batch.column(0)[0].as_py()


_digits = st.text("0123456789", min_size=1, max_size=45).map(lambda text: text.lstrip("0") or "0")
_numbers = st.builds(
    lambda sign, whole, decimals, exponent: sign + whole + decimals + exponent,
    st.sampled_from(["", "-"]),
    _digits | st.sampled_from(["0", "127", "128", "255", "256", "65535", "32768", "2147483648"])
    | st.sampled_from([2**32, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**38 - 1, 10**38]).map(str),
    st.just("") | st.text("0123456789", min_size=1, max_size=45).map(".{}".format) | st.sampled_from([".0", ".00", ".10"]),
    st.just("") | st.integers(-400, 400).map("e{}".format) | st.sampled_from(["E+2", "e-1", "E0"]),
)  # fmt: skip
_strings = st.builds(
    lambda text, ascii_: json.dumps(text, ensure_ascii=ascii_),
    st.text(max_size=9) | st.sampled_from(["NaN", "Infinity", "-Infinity", "inf", "1 ", "+1", "007", "1.", ".5", "0x1"]),
    st.booleans(),
).filter(lambda text: text.isascii() or _is_utf_8(text))  # fmt: skip
_moments = st.builds(
    "{}{}{}{}".format,
    st.dates().map(str)
    | st.sampled_from(["2023-02-29", "1900-02-29", "2000-02-29", "2024-13-01", "0000-01-01"]),
    st.sampled_from(["", " ", "T"]),
    st.sampled_from(["", "24:00:00", "00:60:00", "00:00:60", "00:00"])
    | st.times().map(str)
    | st.sampled_from(["12:00:00.1234567", "12:00:00.1234560", "12:00:00.", "12:00:00.12"]),
    st.sampled_from(["", "Z", "+02", "-05:30", "+00:00:30", "+2", "+24", "+01:60", " BC"]),
)
_texts = st.one_of(
    st.just("null"),
    _numbers,
    _numbers.map('"{}"'.format),
    _strings,
    _moments.map('"{}"'.format),
    st.uuids().map(lambda one: json.dumps(str(one))),
    st.binary(max_size=9).map(base64_of),
    st.sampled_from(["true", "false", "{}", "[]", '{"a":[1.10, null]}', '{"_base64":"A"}', '{"_base64":"QQ==","a":1}']),
)  # fmt: skip
_values = _texts | st.lists(_texts, max_size=4).map(lambda texts: "[" + ",".join(texts) + "]")
_TYPES = (
    "boolean", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64",
    "decimal(1,0)", "decimal(10,4)", "decimal(18,18)", "decimal(19,2)", "decimal(38,0)", "decimal(38,10)", "decimal(38,38)",
    "text", "json", "uuid", "date", "time", "timestamp", "timestamptz", "list<int32>", "list<text>", "list<decimal(5,2)>",
    "list<list<float32>>", "list<timestamptz>",
)  # fmt: skip


def _is_utf_8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@given(st.sampled_from(_TYPES), st.lists(_values, min_size=1, max_size=6))
@example("decimal(10,4)", ["1.00005"])
@example("float64", ["1e400", "-1e400", "1e-400", "0e5", "-0.0", "0.0000"])
@example("float32", ["1.000000059604644776257986738", "16777217", "3.4028236e38", "1e-46"])
@example("int64", ["-9223372036854775808", "9223372036854775808", "1e3", "5.0", '"42"', "5.5"])
@example("decimal(38,0)", [f"-{2**64}", f"{2**64}", f"-{2**65 + 1}", "-0", '"-0.00"'])
@example("uint64", ["18446744073709551615", "18446744073709551616", "-0", "-1"])
def test_any_value_in_any_type(name: str, texts: list[str]) -> None:
    """A column has exactly the value of a JSON text, or reports that it does not fit, as plain Python finds it."""
    agree([f'{{"c":{text}}}' for text in texts], typed(name, *texts))


_RANGE, _FORM, _DECIMALS = (
    "it is outside of the type's range",
    "it is not a value of that type",
    "it has more decimals than the type",
)


@pytest.mark.parametrize(
    ("type_", "text", "reason"),
    [
        ("int8", "128", _RANGE),
        ("int8", "-129", _RANGE),
        ("uint8", "-1", _RANGE),
        ("int64", "1e999999999999", _RANGE),
        ("int64", "1e-999999999999", _DECIMALS),
        ("int64", "5.5", _DECIMALS),
        ("int64", "true", _FORM),
        ("int64", '"abc"', _FORM),
        ("decimal(10,4)", "1.00005", _DECIMALS),
        ("decimal(4,2)", "100", _RANGE),
        ("decimal(4,2)", "1e999999999", _RANGE),
        ("decimal(4,2)", "1e2", _RANGE),
        ("decimal(4,2)", '"NaN"', _FORM),
        ("float64", "1e400", _RANGE),
        ("float64", "1e-400", _RANGE),
        ("float64", '"nan"', _FORM),
        ("float64", "[1]", _FORM),
        (ValueType("float", 32, form="finite"), '"NaN"', _RANGE),
        ("boolean", "1", _FORM),
        ("date", '"infinity"', _FORM),
        ("date", '"0000-00-00"', _FORM),
        ("date", '"0044-03-15 BC"', _FORM),
        ("date", '"2023-02-29"', _FORM),
        ("date", '"1900-02-29"', _FORM),
        ("time", '"24:00:00"', _FORM),
        ("time", '"-838:59:59.000000"', _FORM),
        ("time", '"12:00:00.0000001"', _DECIMALS),
        ("timestamp", '"2026-03-01T12:00:00Z"', _FORM),
        ("timestamp", "1772366400000000", _FORM),
        ("timestamptz", '"2026-03-01 12:00:00"', _FORM),
        ("timestamptz", '"2026-03-01 12:00:00+24"', _FORM),
        ("timestamptz", '"2026-03-01 12:00:00+01:60"', _FORM),
        ("timestamptz", '"0001-01-01 00:00:00+02"', _RANGE),
        (ValueType("timestamp", zone=True, form="micros"), "0", _FORM),
        (ValueType("timestamp", zone=True, form="micros"), "253402300800000000", _RANGE),
        ("uuid", '"{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11}"', _FORM),
        ("uuid", '"a0eebc999-c0b-4ef8-bb6d-6bb9bd380a11"', _FORM),
        ("binary", '"abc"', _FORM),
        ("binary", '{"_base64":"QUI"}', _FORM),
        ("binary", '{"_base64":"Q=I="}', _FORM),
        ("binary", '{"_base64":"QUI=","a":1}', _FORM),
        ("geometry", '"0101"', _FORM),
        ("text", r'"\ud800"', "it has half of a surrogate pair, which is not a character"),
        ("list<int8>", "[1,[2]]", _FORM),
        ("list<int8>", "[1,200,true]", _RANGE),
        ("list<int8>", '"{1,2}"', _FORM),
    ],
)  # fmt: skip
def test_what_does_not_fit(type_: str | ValueType, text: str, reason: str) -> None:
    """A value that a column cannot hold exactly is reported with its reason, and is null."""
    rows = typed(type_, "null", text)

    assert [(one.row, one.column, one.reason) for one in rows.misfits] == [(1, "c", reason)]
    assert rows.batch.column(0).null_count == 2


@pytest.mark.parametrize(
    ("type_", "text", "expected"),
    [
        ("int64", '"42"', 42),
        ("int64", "4.20e1", 42),
        ("decimal(4,2)", "9.999e1", Decimal("99.99")),
        ("float64", '"1.5"', 1.5),
        ("date", '"2000-02-29"', date(2000, 2, 29)),
        ("text", "1.10", "1.10"),
        ("text", '{"a" : 1}', '{"a" : 1}'),
        ("text", r'"tab\t\"\u00fc\ud83e\udd86"', 'tab\t"ü🦆'),
        ("json", '"abc"', '"abc"'),
        ("json", '{"a":1.10,"a":1E400}', '{"a":1.10,"a":1E400}'),
        ("binary", '{ "_base64" : "AP8Q" }', b"\x00\xff\x10"),
        (ValueType("binary", form="text"), r'"a\n"', b"a\n"),
        ("list<list<int8>>", "[[1],null,[],[2, null]]", [[1], None, [], [2, None]]),
        ("list<text>", '["a,b]",null,"\\""]', ["a,b]", None, '"']),
        ("list<json>", '[{"a":[1,2]}, "x"]', ['{"a":[1,2]}', '"x"']),
        ("list<binary>", '[{"_base64":"AA=="}]', [b"\0"]),
    ],
)  # fmt: skip
def test_other_forms(type_: str | ValueType, text: str, expected: object) -> None:
    """Forms that sources do not write, but processors may, are read exactly too."""
    assert value(type_, text) == expected


_POINT = struct.pack("<BIdd", 1, 1, 1.0, 2.0)


def test_geometries_are_wkb() -> None:
    """MySQL's SRID goes into the WKB unless it is 0; what PostGIS shows in hexadecimal digits is WKB already."""
    mysql = ValueType("geometry", form="srid")
    with_srid = struct.pack("<BIIdd", 1, 0x20000001, 4326, 1.0, 2.0)

    assert value(mysql, base64_of(bytes(4) + _POINT)) == _POINT
    assert value(mysql, base64_of(struct.pack("<I", 4326) + _POINT)) == with_srid
    assert value("geometry", json.dumps(with_srid.hex().upper())) == with_srid
    assert same(with_srid, base64_of(struct.pack("<I", 4326) + _POINT), mysql)
    big = struct.pack(">BIdd", 0, 1, 1.0, 2.0)
    assert value(mysql, base64_of(struct.pack("<I", 7) + big)) == struct.pack(">BIIdd", 0, 0x20000001, 7, 1.0, 2.0)  # fmt: skip


def test_elements_of_other_rows_stay() -> None:
    """A list with a value that does not fit takes none of its neighbours with it."""
    rows = typed("list<int8>", "[1,2]", "[3,400]", "null", "[]", "[5]", None)

    assert rows.batch.column(0).to_pylist() == [[1, 2], None, None, [], [5], None]
    assert [one.row for one in rows.misfits] == [1]
    rows.batch.validate(full=True)


def test_shortest_doubles_stay() -> None:
    """A number in its shortest form is the same number in the column, bit by bit."""
    random = np.random.default_rng(7)
    doubles = random.integers(0, 2**64, 5_000, dtype=np.uint64).view(np.float64)
    doubles = doubles[np.isfinite(doubles)]
    rows = typed("float64", *(repr(float(one)) for one in doubles))

    assert not rows.misfits
    assert (rows.batch.column(0).to_numpy().view(np.int64) == doubles.view(np.int64)).all()


def test_the_reference_disagrees_with_rounding() -> None:
    """The plain Python that other tests compare with finds values that were rounded."""
    assert not same(0.1, "0.10000000000000001e1", parse_value_type("float64"))
    assert not fits("1.00005", parse_value_type("decimal(10,4)"))
