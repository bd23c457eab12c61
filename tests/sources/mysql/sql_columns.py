"""Hypothesis strategies: columns of every type as SQL declares them, and values as SQL literals."""

from __future__ import annotations

import json
from dataclasses import dataclass

from hypothesis import strategies as st

from deltaforge_dagster.sources.mysql.values.charsets import CHARSETS, Charset, Form, gb18030_code

Literals = st.SearchStrategy[str]


@dataclass(frozen=True)
class SqlColumn:
    """A column's declaration, and literals of values that it can have."""

    declaration: str
    literals: Literals


def quoted(text: str) -> str:
    """Return a text as a literal in UTF-8."""
    return f"_utf8mb4 x'{text.encode().hex()}'" if text else "''"


_TEXTS = st.text(
    st.characters(exclude_categories=["Cs"]) | st.sampled_from('"\\{},\n\x01\x7f\U0001f600'),
    max_size=20,
)
_SIZES = {"tinyint": 8, "smallint": 16, "mediumint": 24, "int": 32, "bigint": 64}


@st.composite
def integers(draw: st.DrawFn) -> SqlColumn:
    """Every size, with and without a sign, padded with zeros or not."""
    name = draw(st.sampled_from([*_SIZES]))
    bits = _SIZES[name]
    kind = draw(st.sampled_from(["", " unsigned", " unsigned zerofill"]))
    least, most = (0, 2**bits - 1) if kind else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    numbers = st.integers(least, most) | st.sampled_from([least, most, 0, 1])
    return SqlColumn(name + kind, numbers.map(str))


@st.composite
def decimals(draw: st.DrawFn) -> SqlColumn:
    """Any number of digits, any scale."""
    digits = draw(st.integers(1, 65))
    scale = draw(st.integers(0, min(digits, 30)))
    kind = draw(st.sampled_from(["", " unsigned", " zerofill"]))
    most = 10**digits - 1
    numbers = st.integers(0 if kind else -most, most) | st.sampled_from([0, most])

    def literal(number: int) -> str:
        text = str(abs(number)).zfill(scale + 1)
        whole = len(text) - scale
        return ("-" if number < 0 else "") + text[:whole] + ("." + text[whole:] if scale else "")

    return SqlColumn(f"decimal({digits},{scale}){kind}", numbers.map(literal))


@st.composite
def floats(draw: st.DrawFn) -> SqlColumn:
    """Single and double precision, and those that are rounded to decimals."""
    name = draw(
        st.sampled_from(["float", "double", "float(10,3)", "double(20,6)", "double unsigned"])
    )
    if name == "float":
        numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
    elif "(" in name or name.endswith("unsigned"):
        numbers = st.floats(0, 1_000_000)
    else:
        numbers = st.floats(allow_nan=False, allow_infinity=False)
    special = st.sampled_from([0.0, 1.0, 0.1, 1e6 - 1])
    return SqlColumn(
        name, (numbers | special).map(lambda x: f"{x!r}e0" if "e" not in repr(x) else repr(x))
    )


@st.composite
def bits(draw: st.DrawFn) -> SqlColumn:
    """1 to 64 bits."""
    size = draw(st.integers(1, 64))
    return SqlColumn(f"bit({size})", st.integers(0, 2**size - 1).map(str))


_DAYS = st.builds(
    lambda year, month, day: f"{year:04}-{month:02}-{day:02}",
    st.integers(0, 9999),
    st.integers(0, 12),
    st.integers(0, 28),
) | st.sampled_from(["0000-00-00", "2024-00-00", "2024-02-00", "9999-12-31", "1000-01-01"])
_CLOCKS = st.builds(
    lambda hour, minute, second: f"{hour:02}:{minute:02}:{second:02}",
    st.integers(0, 23),
    st.integers(0, 59),
    st.integers(0, 59),
)
_FRACTIONS = st.integers(0, 999_999).map(lambda n: f".{n:06}")


@st.composite
def moments(draw: st.DrawFn) -> SqlColumn:
    """Dates and times with any precision, zero dates and parts of dates."""
    digits = draw(st.integers(0, 6))
    name = draw(st.sampled_from(["date", "datetime", "timestamp", "time", "year"]))
    if name == "year":
        return SqlColumn(
            "year", st.sampled_from(["0", "1901", "2155"]) | st.integers(1901, 2155).map(str)
        )
    if name == "date":
        return SqlColumn("date", _DAYS.map("'{}'".format))
    if name == "datetime":
        values = st.builds("'{} {}{}'".format, _DAYS, _CLOCKS, _FRACTIONS)
        return SqlColumn(f"datetime({digits})", values)
    if name == "timestamp":
        days = st.builds(
            lambda y, m, d: f"{y:04}-{m:02}-{d:02}",
            st.integers(1971, 2037),
            st.integers(1, 12),
            st.integers(1, 28),
        )
        values = st.builds("'{} {}{}'".format, days, _CLOCKS, _FRACTIONS)
        edges = st.sampled_from(["'1970-01-01 00:00:01'", "'2038-01-19 03:14:07.4'", "0"])
        return SqlColumn(f"timestamp({digits}) null", values | edges)
    values = st.builds(
        lambda sign, hour, minute, second, rest: f"'{sign}{hour:02}:{minute:02}:{second:02}{rest}'",
        st.sampled_from(["", "-"]),
        st.integers(0, 838),
        st.integers(0, 59),
        st.integers(0, 58),
        _FRACTIONS,
    )
    return SqlColumn(f"time({digits})", values)


_LABELS = (
    st.text(st.sampled_from("abcXYZ äßñ日本'\"\\;()%"), min_size=1, max_size=8)
    .map(str.strip)
    .filter(bool)
)


@st.composite
def labelled(draw: st.DrawFn) -> SqlColumn:
    """ENUM and SET of one to many labels, beyond ASCII, with quotes; with the error value 0."""
    name = draw(st.sampled_from(["enum", "set"]))
    drawn = draw(st.lists(_LABELS, min_size=1, max_size=5, unique_by=str.casefold))
    if name == "enum" and draw(st.booleans()):
        drawn += ["with, comma"]
    drawn += [f"label {i}" for i in range(draw(st.sampled_from([0, 3, 11, 30, 58])))]
    if name == "enum":
        drawn += [f"more {i}" for i in range(draw(st.sampled_from([0, 300])))]
    texts = ",".join("'" + x.replace("\\", "\\\\").replace("'", "''") + "'" for x in drawn)
    most = len(drawn) if name == "enum" else 2 ** len(drawn) - 1
    charset = draw(st.sampled_from(["utf8mb4", "utf8mb4", "utf16", "gb18030", "eucjpms"]))
    if any(character in "äßñ" for label in drawn for character in label):
        charset = "utf8mb4"
    collate = f"character set {charset}" + (" collate utf8mb4_bin" if charset == "utf8mb4" else "")
    # Strict mode is off: a number beyond the labels becomes the error value.
    return SqlColumn(f"{name}({texts}) {collate}", st.integers(0, most).map(str))


def _codes(charset: Charset) -> st.SearchStrategy[bytes]:
    """Return the codes of single characters."""
    if charset.form in (Form.UTF_8, Form.UTF_16, Form.UTF_32):
        most = {"ascii": 0x7F, "ucs2": 0xFFFF, "utf8mb3": 0xFFFF}.get(charset.name, 0x10FFFF)
        characters = st.characters(max_codepoint=most, exclude_categories=["Cs"])
        return characters.map(lambda c: c.encode(charset.codec))
    single = st.integers(0, 255).map(lambda byte: bytes([byte]))
    if charset.width == 1:
        return single
    found = single | st.builds(
        lambda a, b: bytes([a, b]), st.integers(0x81, 254), st.integers(0x30, 254)
    )
    if charset.width == 3:
        found |= st.builds(lambda a, b: bytes([0x8F, a, b]), *[st.integers(0xA1, 254)] * 2)
    if charset.width == 4:
        found |= (st.integers(0, 39419) | st.integers(189_000, 189_000 + 0xFFFFF)).map(gb18030_code)
    return found.filter(lambda code: charset.character(code) is not None)


_BY_NAME = {charset.name: charset for charset in CHARSETS.values() if charset.name != "binary"}


@st.composite
def texts(draw: st.DrawFn, names: tuple[str, ...] = tuple(sorted(_BY_NAME))) -> SqlColumn:
    """CHAR, VARCHAR and TEXT of any size in any character set."""
    charset = _BY_NAME[draw(st.sampled_from(names))]
    name = draw(
        st.sampled_from(
            ["char(30)", "char(200)", "varchar(30)", "varchar(400)", "tinytext", "text", "longtext"]
        )
    )
    values = st.lists(_codes(charset), max_size=20).map(b"".join)

    def literal(value: bytes) -> str:
        return f"convert(x'{value.hex()}' using {charset.name})" if value else "''"

    return SqlColumn(f"{name} character set {charset.name}", values.map(literal))


@st.composite
def blobs(draw: st.DrawFn) -> SqlColumn:
    """Bytes."""
    name = draw(
        st.sampled_from(["binary(30)", "varbinary(30)", "varbinary(400)", "tinyblob", "longblob"])
    )
    values = st.binary(max_size=30) | _TEXTS.map(lambda text: text.encode()[:30])
    return SqlColumn(name, values.map(lambda v: f"x'{v.hex()}'" if v else "''"))


_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | _TEXTS
)
_DOCUMENTS = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(_TEXTS, inner, max_size=5),
    max_leaves=20,
)


def _document(value: object) -> str:
    return f"cast({quoted(json.dumps(value, ensure_ascii=False))} as json)"


_OPAQUE = st.sampled_from([
    "json_array(cast('2024-02-29 12:34:56.5' as datetime(6)), cast('-12:34:56.25' as time(6)))",
    "json_array(cast('2024-02-29' as date), x'00ff', repeat(x'ff', 200), b'101')",
    "json_object('d', 12345678901234567890.1230, 'z', cast(0 as decimal(5,5)), '', 0.5)",
    "json_array(timestamp'2024-01-02 03:04:05.6', cast('0000-00-00' as date), repeat('x', 70000))",
    "cast(concat('[', repeat('1,', 40000), '70000]') as json)",
    "cast(concat(repeat('[', 90), '1', repeat(']', 90)) as json)",
    "json_array(ST_GeomFromText('POINT(1 2)'))",
])  # fmt: skip


def documents() -> st.SearchStrategy[SqlColumn]:
    """JSON, also with values of column types in it."""
    return st.just(SqlColumn("json", _DOCUMENTS.map(_document) | _OPAQUE))


def geometries() -> st.SearchStrategy[SqlColumn]:
    """Every kind of geometry, with and without a spatial reference system."""
    shapes = st.sampled_from([
        "POINT(1 2)",
        "LINESTRING(0 0,1 1,2 2)",
        "POLYGON((0 0,10 0,10 10,0 10,0 0),(2 2,3 2,3 3,2 3,2 2))",
        "MULTIPOINT(1 1,2 2)",
        "MULTILINESTRING((0 0,1 1),(2 2,3 3))",
        "MULTIPOLYGON(((0 0,1 0,1 1,0 1,0 0)))",
        "GEOMETRYCOLLECTION(POINT(1 2),LINESTRING(0 0,1 1))",
        "GEOMETRYCOLLECTION()",
    ])  # fmt: skip
    systems = st.sampled_from([0, 3857, 4326])
    values = st.builds("ST_GeomFromText('{}', {})".format, shapes, systems)
    return st.just(SqlColumn("geometry", values))


columns: st.SearchStrategy[SqlColumn] = st.one_of(
    integers(), decimals(), floats(), bits(), moments(), labelled(), texts(), blobs(), documents(),
    geometries(),
)  # fmt: skip
"""A column of any type."""
