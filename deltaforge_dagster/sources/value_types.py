"""The types of values in row images: what a source's type means to a typed destination.

Row images are JSON text. The kind of source decides how the values of a column are written in it,
and describes that with a `ValueType` for each column (`SourceType.value_type`). `typed_rows` makes
Arrow columns of the images. Users declare types by name (`parse_value_type`):

=============================================  =====================================================
name                                           values
=============================================  =====================================================
`boolean`                                      true and false
`int8`, `int16`, `int32`, `int64`              signed integers of that many bits
`uint8`, `uint16`, `uint32`, `uint64`          unsigned integers of that many bits
`float32`, `float64`                           numbers of IEEE 754
`decimal(P,S)`                                 at most P digits, S of them decimals; P is at most 38
`text`                                         any value: the characters of a string, or else its
                                               JSON text
`json`                                         any value, as its JSON text
`binary`, `geometry`                           bytes; geometries in WKB
`uuid`                                         UUIDs
`date`, `time`, `timestamp`, `timestamptz`     dates and times; `timestamptz` is a moment in UTC
`list<T>`                                      arrays of T
=============================================  =====================================================
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

MAX_DIGITS = 38
"""Digits of the largest decimals that destinations have."""

Kind = Literal[
    "boolean", "integer", "float", "decimal", "text", "json", "binary", "geometry", "uuid",
    "date", "time", "timestamp", "list",
]  # fmt: skip

Form = Literal["plain", "text", "micros", "srid", "hex", "finite"]


@dataclass(frozen=True, slots=True)
class ValueType:
    """The values of a column, and how they are written in JSON text.

    Attributes:
        kind: What values are.
        bits: Width of integers and floats.
        signed: Whether integers have a sign.
        precision, scale: Digits of a decimal, and how many of them are decimals.
        zone: Whether a timestamp is a moment, in UTC.
        element: The type of a list's elements.
        form: Another form than the usual one, which stays allowed, except for geometries. `text`: a
            string is the bytes of its UTF-8. `micros`: a number above 0 is a moment in microseconds
            since 1970. `srid`: Base64 of 4 bytes SRID, little-endian, and WKB. `hex`: WKB in
            hexadecimal digits, as PostGIS writes it. `finite`: NaN and infinities do not fit.
    """

    kind: Kind
    bits: int = 0
    signed: bool = True
    precision: int = 0
    scale: int = 0
    zone: bool = False
    element: ValueType | None = None
    form: Form = "plain"

    @property
    def name(self) -> str:
        """The name that `parse_value_type` reads."""
        match self.kind:
            case "integer":
                return f"{'' if self.signed else 'u'}int{self.bits}"
            case "float":
                return f"float{self.bits}"
            case "decimal":
                return f"decimal({self.precision},{self.scale})"
            case "timestamp":
                return "timestamptz" if self.zone else "timestamp"
            case "list":
                assert self.element is not None
                return f"list<{self.element.name}>"
            case _:
                return self.kind


BOOLEAN, TEXT, JSON = ValueType("boolean"), ValueType("text"), ValueType("json")
BINARY, UUID = ValueType("binary"), ValueType("uuid")
DATE, TIME = ValueType("date"), ValueType("time")
TIMESTAMP, TIMESTAMPTZ = ValueType("timestamp"), ValueType("timestamp", zone=True)
FLOAT32, FLOAT64 = ValueType("float", 32), ValueType("float", 64)
INT8, INT16, INT32, INT64 = (ValueType("integer", bits) for bits in (8, 16, 32, 64))
UINT8, UINT16, UINT32, UINT64 = (
    ValueType("integer", bits, signed=False) for bits in (8, 16, 32, 64)
)
GEOMETRY = ValueType("geometry", form="hex")

_NAMED = {
    value_type.name: value_type
    for value_type in (
        BOOLEAN, TEXT, JSON, BINARY, UUID, DATE, TIME, TIMESTAMP, TIMESTAMPTZ,
        FLOAT32, FLOAT64, GEOMETRY,
        INT8, INT16, INT32, INT64, UINT8, UINT16, UINT32, UINT64,
    )
}  # fmt: skip
_DECIMAL = re.compile(r"decimal\((\d{1,2})(?:,(\d{1,2}))?\)")


def decimal(precision: int, scale: int) -> ValueType:
    """Return the type of decimals of this size; text if no destination has decimals that large.

    A scale may be negative, or above the precision, as PostgreSQL's may be.
    """
    digits = max(precision - min(scale, 0), scale)
    return (
        TEXT if digits > MAX_DIGITS else ValueType("decimal", precision=digits, scale=max(scale, 0))
    )


def list_of(element: ValueType) -> ValueType:
    """Return the type of arrays with such elements."""
    return ValueType("list", element=element)


def parse_value_type(name: str) -> ValueType:
    """Return the type of that name; spaces do not count.

    Raises:
        ValueError: No type has that name.
    """
    compact = "".join(name.lower().split())
    if compact in _NAMED:
        return _NAMED[compact]
    if compact.startswith("list<") and compact.endswith(">"):
        return list_of(parse_value_type(compact[5:-1]))
    digits = _DECIMAL.fullmatch(compact)
    if digits is not None:
        precision, scale = int(digits[1]), int(digits[2] or 0)
        if 1 <= precision <= MAX_DIGITS and scale <= precision:
            return decimal(precision, scale)
    raise ValueError(
        f"there is no type {name!r}; known are {', '.join(_NAMED)}, decimal(P,S) and list<T>"
    )
