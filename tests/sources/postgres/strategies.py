"""Hypothesis strategies: columns of every PostgreSQL type, and values for them as input text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from deltaforge_dagster.kernels.json_text import BOOLEAN, BYTEA, FLOAT, INTEGER, JSON, STRING

CUSTOM_TYPES = (
    "CREATE EXTENSION hstore",
    "CREATE EXTENSION citext",
    "CREATE TYPE mood AS ENUM ('sad', 'it''s \"ok\", {so}', 'ü 🦆', 'NULL', '(a,b)')",
    "CREATE DOMAIN small AS int CHECK (value < 1000)",
    "CREATE DOMAIN smaller AS small",
    "CREATE DOMAIN email AS citext",
    "CREATE DOMAIN document AS jsonb",
    "CREATE DOMAIN blob AS bytea",
    "CREATE DOMAIN grid AS int[]",
    "CREATE TYPE pair AS (n int, t text, d date, f float8[])",
    "CREATE TYPE floatrange AS RANGE (subtype = float8)",
    # pgvector's type, which no test server has, is a base type with text of its own, like this one.
    "CREATE TYPE vector",
    "CREATE FUNCTION vector_in(cstring) RETURNS vector LANGUAGE internal IMMUTABLE STRICT AS 'textin'",
    "CREATE FUNCTION vector_out(vector) RETURNS cstring LANGUAGE internal IMMUTABLE STRICT AS 'textout'",
    "CREATE TYPE vector (INPUT = vector_in, OUTPUT = vector_out, LIKE = text)",
)
"""Statements that make the types which are not built in."""


@dataclass(frozen=True)
class Type:
    """A type, how its values are written, and texts of them that the server accepts as input.

    `since` is the first server version that has it; `as_json` says whether the server's own
    `to_json` writes it as we do, numbers in quotes apart.
    """

    name: str
    kind: int
    texts: st.SearchStrategy[str]
    since: int = 12
    as_json: bool = False
    delimiter: str = ","

    def __repr__(self) -> str:
        return self.name


_TEXTS = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0")
    | st.sampled_from("\"'\\{},;() \n\r\t\v\b\f\x01\x7f"),
    max_size=20,
) | st.sampled_from(["NULL", "null", "\\N", "\\.", "42", "true", "[0:1]={1,2}", "{a}", "é" * 300])
_WORDS = st.text("abcdefgh", min_size=1, max_size=8)
_FINITE = st.floats(allow_nan=False, allow_infinity=False).map(repr)
_DOUBLES = _FINITE | st.sampled_from(["NaN", "Infinity", "-Infinity", "-0", "1e-320", "5e-324"])
_REALS = st.floats(width=32, allow_nan=False, allow_infinity=False).map(repr) | st.sampled_from(
    ["NaN", "Infinity", "-Infinity", "-0", "1e-45", "16777217"]
)
_NUMERICS = st.decimals(allow_nan=False, allow_infinity=False).map(lambda d: f"{d:f}") | (
    st.sampled_from(["NaN", "1e500", "-0.00000000000000000000000000000000000001", "9" * 200])
)
_DATES = st.dates().map(str) | st.sampled_from(
    ["infinity", "-infinity", "4713-01-01 BC", "0044-03-15 BC", "5874897-12-31", "2024-02-29"]
)
_CLOCKS = st.times().map(str) | st.sampled_from(["24:00:00", "00:00:00.000001"])
_MOMENTS = st.datetimes().map(str) | st.sampled_from(
    ["infinity", "-infinity", "4713-01-01 00:00:00 BC", "294276-12-31 23:59:59.999999"]
)
_OFFSETS = st.sampled_from(["", "+02", "-11:30", "+05:45", "Z"])


def _zoned(moment: str, offset: str) -> str:
    edge = "inf" in moment or "BC" in moment or moment.startswith("294276")
    return moment if edge else moment + offset


_INTERVALS = st.builds(
    "{} years {} mons {} days {}:{}:{}".format,
    st.integers(-1000, 1000),
    st.integers(-20, 20),
    st.integers(-400, 400),
    st.integers(-30, 900),
    st.integers(0, 59),
    st.sampled_from(["0", "59.999999", "0.1"]),
) | st.sampled_from(["0", "-1 day", "1 year -1 day +00:00:01"])
_JSON_TEXT = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=10
) | st.sampled_from(['"', "\\", "\n", "_base64"])
_DOCUMENTS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(10**30, 10**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | _JSON_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_JSON_TEXT, inner, max_size=3),
    max_leaves=6,
)
_JSON = st.builds(
    lambda value, indent, ascii_: json.dumps(value, indent=indent, ensure_ascii=ascii_),
    _DOCUMENTS,
    st.sampled_from([None, 0, 2, "\t"]),
    st.booleans(),
) | st.sampled_from(
    [
        '{"a":1,"a" : 1.10, "b": 1E400}',
        "-0",
        "1.0e+5",
        '"\\/\\u00e4\\ud83e\\udd86"',
        "[" * 50 + "]" * 50,
    ]
)
_ODD_JSON = st.sampled_from(['"\\u0000"', '"\\ud800"', " [ ] ", '\n{ "x" :\r\n0.10 }\t'])
_BYTES = st.binary(max_size=20).map(lambda value: "\\x" + value.hex())
_BITS = st.text("01", max_size=70)
_XML = st.builds('<a b="{}">{}<c/></a>'.format, _WORDS, _WORDS | st.just("ü &amp; 🦆\n"))
_POINTS = st.builds("({},{})".format, _FINITE, _FINITE)
_SMALL_POINTS = st.builds("({},{})".format, st.integers(-99, 99), st.integers(-99, 99))
_MONEY = st.builds(
    "{}{}.{:02}".format, st.sampled_from(["", "-"]), st.integers(0, 10**14), st.integers(0, 99)
)
_PAIRS = st.builds(
    lambda n, t, d: f'({n},{_quoted(t)},{d},"{{1.5,NULL}}")',
    st.integers(-9, 9) | st.just(""),
    _TEXTS.filter(bool),
    st.sampled_from(["", "2026-03-01", '"0044-03-15 BC"']),
)
_HSTORES = st.dictionaries(_TEXTS, st.none() | _TEXTS, max_size=3).map(
    lambda pairs: ",".join(
        f"{_quoted(key)}=>{'NULL' if value is None else _quoted(value)}"
        for key, value in pairs.items()
    )
)


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _ranges(bounds: st.SearchStrategy[int], shown: str) -> st.SearchStrategy[str]:
    def text(low: int, width: int, brackets: str) -> str:
        ends = (shown.format(low % 28 + 1), shown.format(low % 28 + 1 + width % 2))
        return f"{brackets[0]}{ends[0]},{ends[1]}{brackets[1]}"

    made = st.builds(text, bounds, bounds, st.sampled_from(["[]", "[)", "(]", "()"]))
    return made | st.sampled_from(["empty", "(,)", f"[{shown.format(1)},)"])


def _several(ranges: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.lists(ranges, max_size=3).map(lambda parts: "{" + ",".join(parts) + "}")


_N = st.integers(0, 1000)
_INT_RANGES, _NUM_RANGES = _ranges(_N, "{}"), _ranges(_N, "{}.50")
_DATE_RANGES, _TS_RANGES = _ranges(_N, "2026-01-{:02}"), _ranges(_N, '"2026-01-{:02} 12:00"')
_LABELS = st.sampled_from(["sad", 'it\'s "ok", {so}', "ü 🦆", "NULL", "(a,b)"])
_SMALL = st.integers(-(10**6), 999).map(str)

SCALARS = (
    Type("bool", BOOLEAN, st.sampled_from("tf"), as_json=True),
    Type("int2", INTEGER, st.integers(-(2**15), 2**15 - 1).map(str), as_json=True),
    Type("int4", INTEGER, st.integers(-(2**31), 2**31 - 1).map(str), as_json=True),
    Type("int8", INTEGER, st.integers(-(2**63), 2**63 - 1).map(str), as_json=True),
    Type("oid", INTEGER, st.integers(0, 2**32 - 1).map(str)),
    Type("float4", FLOAT, _REALS, as_json=True),
    Type("float8", FLOAT, _DOUBLES, as_json=True),
    Type("numeric", STRING, _NUMERICS, as_json=True),
    Type("numeric", STRING, st.sampled_from(["Infinity", "-Infinity"]), 14, as_json=True),
    Type("numeric(20,5)", STRING, st.sampled_from(["1.1", "-99999.123456", "0"]), as_json=True),
    Type("money", STRING, _MONEY, as_json=True),
    Type("text", STRING, _TEXTS, as_json=True),
    Type("varchar", STRING, _TEXTS, as_json=True),
    Type("varchar(9)", STRING, _WORDS, as_json=True),
    Type("char(5)", STRING, st.sampled_from(["", "ab", "abcde", "ü"]), as_json=True),
    Type('"char"', STRING, st.sampled_from(["", "x", '"', "\\", "\x01"]), as_json=True),
    Type("name", STRING, _WORDS, as_json=True),
    Type("citext", STRING, _TEXTS, as_json=True),
    Type("bytea", BYTEA, _BYTES),
    Type("uuid", STRING, st.uuids().map(str), as_json=True),
    Type("date", STRING, _DATES),
    Type("time", STRING, _CLOCKS, as_json=True),
    Type("timetz", STRING, st.builds("{}{}".format, _CLOCKS, _OFFSETS), as_json=True),
    Type("timestamp", STRING, _MOMENTS),
    Type("timestamp(3)", STRING, st.datetimes().map(str)),
    Type("timestamptz", STRING, st.builds(_zoned, _MOMENTS, _OFFSETS)),
    Type("interval", STRING, _INTERVALS, as_json=True),
    Type("interval", STRING, st.sampled_from(["infinity", "-infinity"]), 17, as_json=True),
    Type("json", JSON, _JSON | _ODD_JSON),
    Type("jsonb", JSON, _JSON),
    Type("jsonpath", STRING, st.sampled_from(["$", '$."a b"[*] ? (@ > 1)'])),
    Type("xml", STRING, _XML, as_json=True),
    Type("inet", STRING, st.ip_addresses().map(str) | st.just("10.0.0.1/8"), as_json=True),
    Type("cidr", STRING, st.sampled_from(["10.0.0.0/8", "::/0", "192.168.1.1"]), as_json=True),
    Type("macaddr", STRING, st.sampled_from(["08002b010203", "08:00:2b:01:02:03"]), as_json=True),
    Type("macaddr8", STRING, st.just("08:00:2b:01:02:03:04:05"), as_json=True),
    Type("bit(3)", STRING, st.text("01", min_size=3, max_size=3), as_json=True),
    Type("varbit", STRING, _BITS, as_json=True),
    Type("point", STRING, _POINTS, as_json=True),
    Type("line", STRING, st.sampled_from(["{1,2,3}", "{0.1,-1,0}"]), as_json=True),
    Type("lseg", STRING, st.builds("[{},{}]".format, _POINTS, _POINTS), as_json=True),
    Type("box", STRING, st.builds("{},{}".format, _POINTS, _POINTS), as_json=True, delimiter=";"),
    Type("path", STRING, st.lists(_POINTS, min_size=1).map(",".join).map("[{}]".format), as_json=True),
    Type("polygon", STRING, st.lists(_SMALL_POINTS, min_size=1).map(",".join).map("({})".format), as_json=True),
    Type("circle", STRING, st.builds("<{},{}>".format, _POINTS, st.integers(0, 99)), as_json=True),
    Type("tsvector", STRING, st.sampled_from(["a fat 'it''s' \\\\ cat", "'x':1A,2 y:3"]), as_json=True),
    Type("tsquery", STRING, st.sampled_from(["fat & (rat | !cat)", "a <-> b:*"]), as_json=True),
    Type("int4range", STRING, _INT_RANGES, as_json=True),
    Type("int8range", STRING, _INT_RANGES, as_json=True),
    Type("numrange", STRING, _NUM_RANGES, as_json=True),
    Type("daterange", STRING, _DATE_RANGES, as_json=True),
    Type("tsrange", STRING, _TS_RANGES, as_json=True),
    Type("tstzrange", STRING, _TS_RANGES),
    Type("floatrange", STRING, _NUM_RANGES, as_json=True),
    Type("int4multirange", STRING, _several(_INT_RANGES), 14, as_json=True),
    Type("tstzmultirange", STRING, _several(_TS_RANGES), 14),
    Type("datemultirange", STRING, _several(_DATE_RANGES), 14, as_json=True),
    Type("pg_lsn", STRING, st.sampled_from(["0/0", "16/B374D848"]), as_json=True),
    Type("xid", STRING, st.just("4294967295"), as_json=True),
    Type("xid8", STRING, st.just("18446744073709551615"), 13, as_json=True),
    Type("cid", STRING, st.just("7"), as_json=True),
    Type("tid", STRING, st.just("(4,5)"), as_json=True),
    Type("txid_snapshot", STRING, st.just("10:20:10,14,15"), as_json=True),
    Type("pg_snapshot", STRING, st.just("10:20:10,14,15"), 13, as_json=True),
    Type("regclass", STRING, st.sampled_from(["pg_class", "-", "12345678"])),
    Type("regtype", STRING, st.sampled_from(["int4", "public.mood", "text[]"])),
    Type("regproc", STRING, st.sampled_from(["now", "public.vector_in"])),
    Type("regrole", STRING, st.just("postgres")),
    Type("regnamespace", STRING, st.just("public")),
    Type("int2vector", STRING, st.sampled_from(["", "1 2 3"])),
    Type("oidvector", STRING, st.sampled_from(["", "1 2 3"])),
    Type("refcursor", STRING, _TEXTS, as_json=True),
    Type("hstore", STRING, _HSTORES),
    Type("mood", STRING, _LABELS, as_json=True),
    Type("small", INTEGER, _SMALL, as_json=True),
    Type("smaller", INTEGER, _SMALL, as_json=True),
    Type("email", STRING, _TEXTS, as_json=True),
    Type("document", JSON, _JSON),
    Type("blob", BYTEA, _BYTES),
    Type("pair", STRING, _PAIRS),
    Type("vector", STRING, st.lists(st.integers(-9, 9), min_size=1).map(str), as_json=True),
)  # fmt: skip


@dataclass(frozen=True)
class Column:
    """A column's type and values; `dimensions` above 0 is an array."""

    type: Type
    is_array: bool
    values: tuple[str | None, ...]

    @property
    def declared(self) -> str:
        """The type as in CREATE TABLE."""
        return self.type.name + "[]" * self.is_array


def _element(text: str | None) -> str:
    """Return an element of an array literal, always in quotes."""
    return "NULL" if text is None else _quoted(text)


def _array(parts: Sequence[object], delimiter: str) -> str:
    return (
        "{"
        + delimiter.join(
            _array(part, delimiter) if isinstance(part, list) else _element(part)  # type: ignore[arg-type]
            for part in parts
        )
        + "}"
    )


@st.composite
def _arrays(draw: st.DrawFn, type_: Type) -> str:
    # A null composite comes out of `unnest` as a row of nulls, so nothing could be compared.
    element = type_.texts if type_.name == "pair" else st.none() | type_.texts
    sizes = draw(st.sampled_from([(0,), (1,), (3,), (2, 2), (1, 2, 2), (2, 1, 1, 2)]))

    def nested(depth: int) -> list[object]:
        if depth == len(sizes) - 1:
            return [draw(element) for _ in range(sizes[depth])]
        return [nested(depth + 1) for _ in range(sizes[depth])]

    bounds = ""
    if sizes != (0,) and draw(st.booleans()):
        lowest = draw(st.sampled_from([0, -3, 1]))
        bounds = "".join(f"[{lowest}:{lowest + size - 1}]" for size in sizes) + "="
    return bounds + _array(nested(0), type_.delimiter)


def types(version: int) -> list[Type]:
    """Return the types that a server of that major version has."""
    return [type_ for type_ in SCALARS if type_.since <= version]


@st.composite
def columns(draw: st.DrawFn, version: int, rows: int, *, every: bool | None = None) -> list[Column]:
    """Draw some columns, each with a value or null for each row.

    Args:
        draw: Given by Hypothesis.
        version: Major version of the server.
        rows: How many rows.
        every: A column of every type instead: arrays, or none.
    """

    def column(type_: Type, is_array: bool) -> Column:
        texts = _arrays(type_) if is_array else type_.texts
        return Column(type_, is_array, tuple(draw(st.none() | texts) for _ in range(rows)))

    if every is not None:
        return [column(type_, every) for type_ in types(version)]
    chosen = st.tuples(st.sampled_from(types(version)), st.booleans())
    return [column(*pair) for pair in draw(st.lists(chosen, min_size=1, max_size=12))]
