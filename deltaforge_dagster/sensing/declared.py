"""The JSON values that a column may have, derived from the type that its table declares.

Types are named as in the registered table versions: by PostgreSQL's `format_type`, or from the
binary log. Types that are not listed here are not compared, because enumerations, dates or
geometries can have several forms.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from deltaforge_dagster.sensing.scan import ARRAY, BOOLEAN, INTEGER, NUMBER, OBJECT, STRING

ANYTHING = frozenset({BOOLEAN, INTEGER, NUMBER, STRING, ARRAY, OBJECT})

DOCUMENTS = frozenset(
    {
        "json", "jsonb", "variant", "object", "map", "text", "tinytext", "mediumtext", "longtext",
        "clob", "nclob",
    }
)  # fmt: skip
"""Types of columns that may contain JSON documents, as documents or as text."""

_BOOLEANS = frozenset({"bool", "boolean", "bit", "bit varying"})
_RANGES: Mapping[str, int] = {
    "tinyint": 8,
    "smallint": 16,
    "mediumint": 24,
    "int": 32,
    "integer": 32,
    "bigint": 64,
}
"""Integer types, and their size in bits."""
_NUMBERS = frozenset(
    {"numeric", "decimal", "float", "double", "real", "double precision", "year", "oid", "money"}
)
_TEXTS = frozenset(
    {
        "text",
        "tinytext",
        "mediumtext",
        "longtext",
        "varchar",
        "char",
        "character",
        "character varying",
        "uuid",
    }
)
_TYPE = re.compile(
    r"(?P<name>[a-z][a-z ]*?)(?:\((?P<size>\d+)(?:,(?P<scale>-?\d+))?\))?(?P<unsigned> unsigned)?"
)
_WITH_LENGTH = frozenset({"varchar", "char", "character", "character varying"})


@dataclass(frozen=True, slots=True)
class Declared:
    """The values that a column may have.

    Attributes:
        name: The column's name.
        data_type: Its declared type.
        nullable: Whether it may be null.
        kinds: The types of JSON values that it may have, apart from null.
        document: Whether it may contain JSON documents.
        length: Maximum number of characters of a string; None if unlimited.
        least: Smallest integer; None if unlimited.
        greatest: Largest integer; None if unlimited.
        digits: Maximum number of digits before the decimal point; None if unlimited.
    """

    name: str
    data_type: str
    nullable: bool
    kinds: frozenset[int]
    document: bool = False
    length: int | None = None
    least: int | None = None
    greatest: int | None = None
    digits: int | None = None


@lru_cache(maxsize=10_000)
def declared(name: str, data_type: str, *, nullable: bool) -> Declared:
    """Return the values that a column of the given type may have."""
    column = Declared(name, data_type, nullable, ANYTHING)
    match = _TYPE.fullmatch(data_type.lower())
    if match is None:
        return column
    kind, size = match["name"], match["size"]
    column = replace(column, document=kind in DOCUMENTS)
    if kind in _TEXTS:
        length = int(size) if size and kind in _WITH_LENGTH else None
        column = replace(column, kinds=frozenset({STRING}), length=length)
    elif kind in _BOOLEANS:
        column = replace(column, kinds=frozenset({BOOLEAN, INTEGER, STRING}))
    elif kind in _RANGES:
        bits = _RANGES[kind]
        least, greatest = -(1 << bits - 1), (1 << bits - 1) - 1
        if match["unsigned"]:
            least, greatest = 0, (1 << bits) - 1
        kinds = frozenset({INTEGER, STRING} | ({BOOLEAN} if kind == "tinyint" else set()))
        column = replace(column, kinds=kinds, least=least, greatest=greatest)
    elif kind in _NUMBERS:
        exact = kind in {"numeric", "decimal"} and size
        digits = int(size) - int(match["scale"] or 0) if exact else None
        column = replace(column, kinds=frozenset({INTEGER, NUMBER, STRING}), digits=digits)
    return column
