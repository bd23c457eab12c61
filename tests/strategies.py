"""Hypothesis strategies: PostgreSQL values as the server prints them, and whole log streams."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from deltaforge_dagster.sources.postgres.decode.pgoutput import xlog
from deltaforge_lab.synthetic import postgres_messages as samples
from deltaforge_lab.synthetic.postgres_messages import UNCHANGED, Cell

ENUM, ENUM_ARRAY, DOMAIN, DOMAIN_ARRAY = range(90_001, 90_005)
"""Types that are not built in, as `tests.sources.postgres.reference` knows them."""

_texts = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0")
    | st.sampled_from('"\\{},\n\x01'),
    max_size=20,
)


def _float_text(value: float) -> str:
    """Return a number as PostgreSQL prints it: no trailing `.0`, `Infinity`, `NaN`."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return repr(value).removesuffix(".0")


_documents = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | _texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_texts, inner, max_size=4),
    max_leaves=10,
)
_json_texts = st.builds(
    lambda value, indent, ascii_: json.dumps(value, indent=indent, ensure_ascii=ascii_),
    _documents,
    st.sampled_from([None, 0, 2, "\t", "\r\n"]),
    st.booleans(),
)
_hex_texts = st.binary(max_size=20).map(lambda value: "\\x" + value.hex())
_escaped_texts = st.binary(max_size=20).map(
    lambda value: "".join(
        "\\\\" if byte == 92 else chr(byte) if 32 <= byte <= 126 else f"\\{byte:03o}"
        for byte in value
    )
)
_byteas = _hex_texts | _escaped_texts
_booleans = st.sampled_from("tf")
_integers = st.integers(-(2**63), 2**63 - 1).map(str)
_moments = st.datetimes().map(str) | st.sampled_from(
    ["infinity", "-infinity", "0044-03-15 12:00:00 BC", "294276-12-31 23:59:59.999999"]
)
_zoned = st.datetimes().map("{}+00".format) | st.sampled_from(
    [
        "infinity",
        "-infinity",
        "0044-03-15 12:00:00.5+00 BC",
        "1900-01-01 00:00:00+05:45",
        "1850-01-01 00:00:00-00:01:15",
    ]
)
_numerics = st.decimals(allow_nan=False, allow_infinity=False).map(lambda d: f"{d:f}")

SCALARS = {
    16: _booleans,
    17: _byteas,
    20: _integers,
    21: st.integers(-(2**15), 2**15 - 1).map(str),
    25: _texts,
    26: st.integers(0, 2**32 - 1).map(str),
    114: _json_texts,
    701: st.floats().map(_float_text),
    1114: _moments,
    1184: _zoned,
    1700: _numerics,
    2950: st.uuids().map(str),
    3802: _json_texts,
    ENUM: st.sampled_from(["sad", "happy, somehow", '"quoted"']),
    DOMAIN: _integers,
}
ARRAYS = {
    1000: _booleans,
    1001: _byteas,
    1016: _integers,
    1009: _texts,
    1022: SCALARS[701],
    1115: _moments,
    1185: _zoned,
    1231: _numerics,
    199: _json_texts,
    3807: _json_texts,
    ENUM_ARRAY: SCALARS[ENUM],
    DOMAIN_ARRAY: _integers,
}


def array_element(text: str | None) -> str:
    """Return an element as `array_out` prints it."""
    if text is None:
        return "NULL"
    if text and text.upper() != "NULL" and not any(c in '{},"\\' or c.isspace() for c in text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _array_text(elements: Sequence[object], bounds: str) -> str:
    def written(part: object) -> str:
        if isinstance(part, list):
            return "{" + ",".join(written(p) for p in part) + "}"
        assert part is None or isinstance(part, str)
        return array_element(part)

    return (bounds if elements else "") + written(elements)


def _arrays(element: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    flat = st.lists(st.none() | element, max_size=4)
    nested = st.lists(st.lists(st.none() | element, min_size=2, max_size=2), min_size=1, max_size=3)
    return st.builds(
        _array_text, flat | nested, st.sampled_from(["", "", "[0:3]=", "[-5:1][2:3]="])
    )


VALUES = SCALARS | {oid: _arrays(element) for oid, element in ARRAYS.items()}
"""Type OID -> texts of that type."""


@dataclass(frozen=True)
class Table:
    """A table of a synthetic stream; a column is (name, type OID, modifier, in the identity)."""

    oid: int
    name: str
    identity: str
    columns: tuple[tuple[str, int, int, bool], ...]

    def relation(self) -> bytes:
        """Return its Relation message."""
        return samples.relation(self.oid, "public", self.name, self.columns, self.identity)


_names = st.sampled_from(["id", "näme", 'quo"ted', "back\\slash", "new\nline", "a", "b", "c"])


@st.composite
def tables(draw: st.DrawFn, oid: int) -> Table:
    """Draw a table with up to six columns and any replica identity."""
    names = draw(st.lists(_names, unique=True, max_size=6))
    identity = draw(st.sampled_from("ddifn"))
    columns = []
    for name in names:
        flag = {"f": True, "n": False}.get(identity, draw(st.booleans()))
        columns.append((name, draw(st.sampled_from(sorted(VALUES))), -1, flag))
    return Table(oid, draw(st.sampled_from(["orders", "täble"])), identity, tuple(columns))


def _cells(table: Table, *, new: bool) -> st.SearchStrategy[list[Cell]]:
    def cell(type_oid: int, in_identity: bool) -> st.SearchStrategy[Cell]:
        values: st.SearchStrategy[Cell] = st.none() | VALUES[type_oid].map(str.encode)
        return values | st.just(UNCHANGED) if new and not in_identity else values

    return st.tuples(*(cell(c[1], c[3]) for c in table.columns)).map(list)


@st.composite
def changes(draw: st.DrawFn, table: Table) -> bytes:
    """Draw an Insert, Update or Delete message of the table."""
    full = _cells(table, new=False)
    part = b"O" if table.identity == "f" else b"K"
    match draw(st.sampled_from("iiuUd")):
        case "i":
            return samples.insert(table.oid, draw(full))
        case "u":
            return samples.update(table.oid, draw(_cells(table, new=True)))
        case "U":
            return samples.update(table.oid, draw(_cells(table, new=True)), draw(full), part)
    return samples.delete(table.oid, draw(full), part)


@st.composite
def messages(draw: st.DrawFn, lsn: int, *, transactional: bool) -> bytes:
    """Draw a logical message, whose content may be no JSON."""
    content = draw(_json_texts.map(str.encode) | st.binary(max_size=9))
    prefix = draw(st.sampled_from(["audit", "täble", "orders", "", "deltaforge_heartbeat"]))
    return samples.message(lsn, prefix, content, transactional=transactional)


@st.composite
def events(draw: st.DrawFn, lsn: int, described: dict[int, Table], oid: int) -> bytes:
    """Draw what a transaction may hold: mostly a change of the table, also truncates and messages."""
    match draw(st.integers(0, 9)):
        case 0:
            oids = draw(st.lists(st.sampled_from(sorted(described)), max_size=3))
            return samples.truncate(oids, draw(st.integers(0, 3)))
        case 1:
            return draw(messages(lsn, transactional=True))
    return draw(changes(described[oid]))


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """Draw a valid stream: transactions, empty ones too, keepalives and messages to pass over."""
    parts: list[bytes] = []
    lsn = 1000
    described: dict[int, Table] = {}
    for xid in range(draw(st.integers(0, 5))):
        final_lsn = lsn + 500
        clock = draw(st.integers(0, 10**15))
        parts.append(xlog(lsn, samples.begin(final_lsn, clock, 4_294_967_290 + xid)))
        if draw(st.booleans()):
            parts.append(xlog(0, b"O" + bytes(8) + b"origin\0"))
        for _ in range(draw(st.integers(0, 4))):
            oid = draw(st.sampled_from([16_384, 16_392]))  # these share a line of the hash table
            if oid not in described or draw(st.integers(0, 3)) == 0:
                if oid not in described or draw(st.booleans()):
                    described[oid] = draw(tables(oid))
                parts.append(xlog(0, described[oid].relation()))
            lsn += draw(st.sampled_from([0, 8]))
            parts.append(xlog(lsn, draw(events(lsn, described, oid))))
            if draw(st.integers(0, 4)) == 0:
                parts.append(samples.keepalive(lsn))
        lsn = final_lsn + 8
        parts.append(xlog(lsn, samples.commit(final_lsn, lsn, clock)))
        if draw(st.integers(0, 3)) == 0:
            lsn += 24
            parts.append(samples.keepalive(lsn, reply=draw(st.booleans())))
        if draw(st.integers(0, 3)) == 0:
            lsn += 24
            parts.append(xlog(lsn, draw(messages(lsn, transactional=False))))
        if draw(st.integers(0, 4)) == 0:
            parts.append(b"N" + (4).to_bytes(4, "big"))
    return b"".join(parts)
