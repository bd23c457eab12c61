r"""The JSON format of each PostgreSQL type.

==============================================  ================================================
type                                            JSON
==============================================  ================================================
`bool`                                          true, false
`int2`, `int4`, `int8`, `oid`                   number
`float4`, `float8`                              number in PostgreSQL's shortest text form;
                                                `NaN`, `Infinity`, `-Infinity` as strings
`json`, `jsonb`                                 the document itself, without white space
`bytea`                                         `{"_base64":"..."}`
array                                           array; elements as above; dimensions nest
domain                                          as its base type
`timestamp`, `timestamptz`                      string, as PostgreSQL prints it, or as its
                                                `to_json` does (`ISO_TIMESTAMPS`)
everything else (`numeric`, `uuid`, dates and   string, as PostgreSQL prints it
times, text, enums, composites, ranges ...)
==============================================  ================================================

`docs/types.md` has every type with examples. Values from the stream and from COPY are written by
the same kernels (`rows`), which are selected by the kinds given here. Built-in types are recognized
by their OID (`pg_type.dat`; these never change); all others are looked up in the catalog.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from deltaforge_dagster.errors import UnsupportedEvent
from deltaforge_dagster.kernels.json_text import (
    BOOLEAN,
    BYTEA,
    FLOAT,
    INTEGER,
    JSON,
    STRING,
    TIMESTAMP,
)
from deltaforge_dagster.sources.postgres.decode.pgoutput import SentType


@dataclass(frozen=True, slots=True)
class CatalogType:
    """A type in `pg_type` that is not built in.

    Attributes:
        name: `format_type(oid, NULL)`.
        kind: `typtype`: b base, c composite, d domain, e enum, p pseudo, r range, m multirange.
        element: `typelem` of a true array (the element's `typarray` is this type), else 0.
        delimiter: `typdelim`; for an array, that of its element.
        base: `typbasetype`: for a domain, its base type (which may be a domain, too), else 0.
    """

    name: str
    kind: str
    element: int
    delimiter: str = ","
    base: int = 0


class TypeCatalog(Protocol):
    """The catalog as the decoder uses it. All methods may block, and are called rarely."""

    def primary_key(self, relation: int) -> tuple[str, ...]:
        """Return the columns of a table's primary key; empty if it has none or does not exist."""
        ...

    def type(self, oid: int) -> CatalogType | None:
        """Return a type from the catalog; None if it no longer exists."""
        ...

    def remade_type(self, schema: str, name: str) -> int | None:
        """Return the OID of the type that now has a dropped type's name; None if it is unusable."""
        ...

    def system_type(self, name: str) -> int | None:
        """Return the OID of the type in `pg_catalog` with this `typname`; None if there is none."""
        ...


@dataclass(frozen=True, slots=True)
class PostgresValueType:
    """How the decoder writes values of a type.

    Attributes:
        name: SQL name without modifiers.
        kind: Kind of a value, or of an array's elements (`kernels.json_text`).
        delimiter: The delimiter between the elements of an array; empty if it is not an array.
    """

    name: str
    kind: int
    delimiter: str = ""


_SCALARS = {
    16: ("boolean", BOOLEAN, 1000),
    17: ("bytea", BYTEA, 1001),
    18: ('"char"', STRING, 1002),
    19: ("name", STRING, 1003),
    20: ("bigint", INTEGER, 1016),
    21: ("smallint", INTEGER, 1005),
    22: ("int2vector", STRING, 1006),
    23: ("integer", INTEGER, 1007),
    24: ("regproc", STRING, 1008),
    25: ("text", STRING, 1009),
    26: ("oid", INTEGER, 1028),
    27: ("tid", STRING, 1010),
    28: ("xid", STRING, 1011),
    29: ("cid", STRING, 1012),
    30: ("oidvector", STRING, 1013),
    114: ("json", JSON, 199),
    142: ("xml", STRING, 143),
    600: ("point", STRING, 1017),
    601: ("lseg", STRING, 1018),
    602: ("path", STRING, 1019),
    603: ("box", STRING, 1020),
    604: ("polygon", STRING, 1027),
    628: ("line", STRING, 629),
    650: ("cidr", STRING, 651),
    700: ("real", FLOAT, 1021),
    701: ("double precision", FLOAT, 1022),
    718: ("circle", STRING, 719),
    774: ("macaddr8", STRING, 775),
    790: ("money", STRING, 791),
    829: ("macaddr", STRING, 1040),
    869: ("inet", STRING, 1041),
    1033: ("aclitem", STRING, 1034),
    1042: ("character", STRING, 1014),
    1043: ("character varying", STRING, 1015),
    1082: ("date", STRING, 1182),
    1083: ("time without time zone", STRING, 1183),
    1114: ("timestamp without time zone", STRING, 1115),
    1184: ("timestamp with time zone", STRING, 1185),
    1186: ("interval", STRING, 1187),
    1266: ("time with time zone", STRING, 1270),
    1560: ("bit", STRING, 1561),
    1562: ("bit varying", STRING, 1563),
    1700: ("numeric", STRING, 1231),
    1790: ("refcursor", STRING, 2201),
    2202: ("regprocedure", STRING, 2207),
    2203: ("regoper", STRING, 2208),
    2204: ("regoperator", STRING, 2209),
    2205: ("regclass", STRING, 2210),
    2206: ("regtype", STRING, 2211),
    2950: ("uuid", STRING, 2951),
    2970: ("txid_snapshot", STRING, 2949),
    3220: ("pg_lsn", STRING, 3221),
    3614: ("tsvector", STRING, 3643),
    3615: ("tsquery", STRING, 3645),
    3734: ("regconfig", STRING, 3735),
    3769: ("regdictionary", STRING, 3770),
    3802: ("jsonb", JSON, 3807),
    3904: ("int4range", STRING, 3905),
    3906: ("numrange", STRING, 3907),
    3908: ("tsrange", STRING, 3909),
    3910: ("tstzrange", STRING, 3911),
    3912: ("daterange", STRING, 3913),
    3926: ("int8range", STRING, 3927),
    4072: ("jsonpath", STRING, 4073),
    4089: ("regnamespace", STRING, 4090),
    4096: ("regrole", STRING, 4097),
    4191: ("regcollation", STRING, 4192),
    4451: ("int4multirange", STRING, 6150),
    4532: ("nummultirange", STRING, 6151),
    4533: ("tsmultirange", STRING, 6152),
    4534: ("tstzmultirange", STRING, 6153),
    4535: ("datemultirange", STRING, 6155),
    4536: ("int8multirange", STRING, 6157),
    5038: ("pg_snapshot", STRING, 5039),
    5069: ("xid8", STRING, 271),
}
"""By OID: name, kind, OID of its array type."""

_BOX = 603  # the only built-in type whose arrays are divided by `;`: its text has commas

BUILT_IN = {oid: PostgresValueType(name, kind) for oid, (name, kind, _) in _SCALARS.items()} | {
    array: PostgresValueType(f"{name}[]", kind, ";" if oid == _BOX else ",")
    for oid, (name, kind, array) in _SCALARS.items()
}
"""The types that have the same OID on every PostgreSQL server."""

ISO_TIMESTAMPS = BUILT_IN | {
    oid: replace(BUILT_IN[oid], kind=TIMESTAMP) for oid in (1114, 1115, 1184, 1185)
}
"""`BUILT_IN` with timestamps in ISO 8601 format: `engine.values.postgres_timestamp: iso`."""


def value_type(
    oid: int,
    catalog: TypeCatalog,
    sent: SentType | None = None,
    built_in: Mapping[int, PostgresValueType] = BUILT_IN,
) -> PostgresValueType:
    """Return how values of a type are written.

    Values of a domain look like those of its base type, as they do for every client of the server.
    Array elements that are arrays themselves (of a domain over an array) are written as strings.

    Args:
        oid: The type.
        catalog: The server's current catalog.
        sent: The type's name in the log, which is used if the type was dropped since.
        built_in: The built-in types, with the formats of their values.

    Raises:
        UnsupportedEvent: The type was dropped, and its name does not suffice to decode values.
    """
    if oid in built_in:
        return built_in[oid]
    catalog_type = catalog.type(oid)
    if catalog_type is None:
        return _gone_type(oid, catalog, sent, built_in)
    if catalog_type.base:
        return replace(
            value_type(catalog_type.base, catalog, built_in=built_in), name=catalog_type.name
        )
    if catalog_type.element:
        element = value_type(catalog_type.element, catalog, built_in=built_in)
        kind = STRING if element.delimiter else element.kind
        return PostgresValueType(catalog_type.name, kind, catalog_type.delimiter)
    return PostgresValueType(catalog_type.name, STRING)


def _gone_type(
    oid: int, catalog: TypeCatalog, sent: SentType | None, built_in: Mapping[int, PostgresValueType]
) -> PostgresValueType:
    """Return how values of a dropped type are written, given its name in the log.

    For a domain, that is the name of its base type, which may be a built-in type. Any other type is
    a string unless it is an array, and every array's name begins with `_`. Such a type is refused,
    since its element type is unknown, unless somebody has created it again (`remade_type`).
    """
    if sent is None:
        raise UnsupportedEvent(f"type {oid} is no longer in the catalog")
    if sent.schema == "pg_catalog":
        built_in_type = built_in.get(catalog.system_type(sent.name) or 0)
        if built_in_type is not None:
            return built_in_type
    name = f"{sent.schema}.{sent.name}"
    if sent.name.startswith("_"):
        remade = catalog.remade_type(sent.schema, sent.name)
        if remade is not None:
            return value_type(remade, catalog, built_in=built_in)
        raise UnsupportedEvent(
            f"type {name} ({oid}) is no longer in the catalog, and may have been an array; make its"
            " element's type again, and release the table with --catalog"
        )
    return PostgresValueType(name, STRING)


# The modifier of bpchar and varchar is the length + 4 (VARHDRSZ); of bit and varbit, the length.
_PLAIN_MODIFIER = {1042: 4, 1043: 4, 1560: 0, 1562: 0}
_TIMES = {1083, 1114, 1184, 1266}  # time, timestamp, timestamptz, timetz


def modified_name(name: str, oid: int, modifier: int) -> str:
    """Return a type's name with its length or precision, as `format_type(oid, modifier)` does.

    Only modifiers of character, bit, numeric and time types are included; -1 means no modifier.
    """
    scalar = next((s for s, (_, _, array) in _SCALARS.items() if array == oid), oid)
    base = name.removesuffix("[]")
    suffix = name[len(base) :]
    if modifier < 0:
        return name
    if scalar in _PLAIN_MODIFIER:
        return f"{base}({modifier - _PLAIN_MODIFIER[scalar]}){suffix}"
    if scalar == 1700:  # precision in the high half; the scale has 11 bits and a sign
        precision = (modifier - 4) >> 16 & 0xFFFF
        scale = (((modifier - 4) & 0x7FF) ^ 1024) - 1024
        return f"{base}({precision},{scale}){suffix}"
    if scalar in _TIMES:
        kind, _, zone = base.partition(" ")
        return f"{kind}({modifier}) {zone}{suffix}"
    return name
