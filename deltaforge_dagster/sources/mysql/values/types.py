r"""The JSON format of each MySQL type, and the format of its values in the binary log.

=====================================  ==================================================

type                                   JSON
=====================================  ==================================================

`TINYINT` ... `BIGINT`, `BOOL`         number; unsigned columns up to 2^64 - 1
`DECIMAL`                              string with the column's whole scale: `"99.90"`
`FLOAT`, `DOUBLE`                      number, the shortest that reads back as the same value
`BIT`                                  number, unsigned
`YEAR`                                 number, 0 for the year `0000`
`DATE`                                 `"2026-03-01"`
`DATETIME`                             `"2026-03-01 12:00:00.000000"`, always six digits
`TIMESTAMP`                            `"2026-03-01T12:00:00.000000Z"`, UTC, always six digits
`TIME`                                 `"-838:59:59.000000"`, always six digits
`ENUM`                                 the label; `""` for MySQL's error value 0
`SET`                                  the labels, separated by commas as MySQL prints them
`CHAR`, `VARCHAR`, `TEXT`              string
`BINARY`, `VARBINARY`                  `{"_base64":"..."}`; `BINARY(n)` has all its n bytes
`BLOB`                                 `{"_base64":"..."}`
`GEOMETRY`                             as a BLOB: 4 bytes SRID (little-endian), then WKB
`VECTOR`                               array of numbers
`UUID`, `INET4`, `INET6` (MariaDB)     string
`JSON`                                 the document itself
=====================================  ==================================================


Text that is not valid in its character set becomes `{"_base64":"..."}`; no bytes are ever replaced.
The zero values are those that MySQL prints: `"0000-00-00"`, `"0000-00-00 00:00:00.000000"`,
`"0000-00-00T00:00:00.000000Z"`.

The log describes a column by a type byte and up to two metadata bytes (MySQL internals
documentation, "TABLE_MAP_EVENT"; `Table_map_event` in the server's `rows_event.h`). Sizes and
formats of values::

    TINY 1, SHORT 2, INT24 9, LONG 3, LONGLONG 8   1, 2, 3, 4, 8 bytes, little-endian
    FLOAT 4, DOUBLE 5         4, 8 bytes, IEEE 754, little-endian
    YEAR 13                   1 byte: 0, or the year - 1900
    DATE 10                   3 bytes, little-endian: 15 bits year, 4 bits month, 5 bits day
    TIME2 19                  3 bytes, big-endian, + 0x800000: sign, 10 bits h, 6 min, 6 s; fraction
    DATETIME2 18              5 bytes, big-endian, + 0x8000000000: 17 bits year * 13 + month, 5 day,
                              5 h, 6 min, 6 s; fraction
    TIMESTAMP2 17             4 bytes, big-endian: seconds since 1970; fraction
      fraction                0, 1, 2 or 3 bytes for 0, 2, 4 or 6 digits, big-endian; that of a
                              negative TIME2 is part of the same number
    NEWDECIMAL 246            see `scalars.write_number`
    BIT 16                    (bits + 7) / 8 bytes, big-endian
    ENUM 247, SET 248         (as STRING 254) 1 to 8 bytes, little-endian: number; bits
    VARCHAR 15, STRING 254    1 or 2 bytes size, as the longest value needs; value, of a CHAR
                              without trailing spaces, of a BINARY without trailing zero bytes
    BLOB 252, JSON 245, GEOMETRY 255, VECTOR 242    1 to 4 bytes size; value

MariaDB's UUID and INET6 are BINARY(16) in the log, and INET4 is BINARY(4) (`scalars`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from deltaforge_dagster.errors import CorruptLog, UnsupportedEvent
from deltaforge_dagster.sources.mysql.values.charsets import CHARSETS, Charset, Form, single_line
from deltaforge_dagster.sources.mysql.values.json_binary import DOCUMENT_ROOM
from deltaforge_dagster.sources.mysql.values.numbers import FLOAT_ROOM
from deltaforge_dagster.sources.mysql.values.scalars import (
    INET4_ROOM,
    INET6_ROOM,
    UUID_ROOM,
    decimal_size,
)

(
    SIGNED,
    UNSIGNED,
    YEAR,
    DECIMAL,
    DATE,
    DATETIME,
    TIMESTAMP,
    TIME,
    MICROS,
    BIT,
    ENUM,
    SET,
    FLOAT,
    UTF_8_TEXT,
    SINGLE_TEXT,
    MULTI_TEXT,
    UTF_16_TEXT,
    UTF_32_TEXT,
    BYTES,
    PADDED_BYTES,
    BLOB,
    JSON,
    VECTOR,
    UUID,
    INET4,
    INET6,
) = range(26)
"""Kinds of values: they decide which kernel writes a value."""

_TINY, _SHORT, _LONG, _FLOAT, _DOUBLE, _LONGLONG, _INT24 = 1, 2, 3, 4, 5, 8, 9
_DATE, _YEAR, _VARCHAR, _BIT, _VECTOR = 10, 13, 15, 16, 242
_TIMESTAMP2, _DATETIME2, _TIME2 = 17, 18, 19
_BLOB_COMPRESSED, _VARCHAR_COMPRESSED = 140, 141
_JSON, _NEWDECIMAL, _ENUM, _SET, _BLOB, _VAR_STRING, _STRING, _GEOMETRY = (
    245, 246, 247, 248, 252, 253, 254, 255,
)  # fmt: skip

GEOMETRIES = frozenset({
    "geometry", "point", "linestring", "polygon", "multipoint", "multilinestring",
    "multipolygon", "geometrycollection", "geomcollection",
})  # fmt: skip
"""Names of the spatial types; the log has one type code for all of them."""

_INTEGERS = {
    _TINY: ("tinyint", 1),
    _SHORT: ("smallint", 2),
    _INT24: ("mediumint", 3),
    _LONG: ("int", 4),
    _LONGLONG: ("bigint", 8),
}
_TIMES = {
    _TIMESTAMP2: ("timestamp", TIMESTAMP, 4),
    _DATETIME2: ("datetime", DATETIME, 5),
    _TIME2: ("time", TIME, 3),
}
_FIXED = {
    "uuid": (16, UUID, UUID_ROOM),
    "inet6": (16, INET6, INET6_ROOM),
    "inet4": (4, INET4, INET4_ROOM),
}
"""MariaDB's types that are BINARY in the log: size, kind, and `MysqlValueType.room`."""
_BEFORE_5_6 = {7: "TIMESTAMP", 11: "TIME", 12: "DATETIME"}
_BLOBS = {1: "tiny", 2: "", 3: "medium", 4: "long"}
_METADATA = {
    _FLOAT: 1, _DOUBLE: 1, _VARCHAR: 2, _BIT: 2, _TIMESTAMP2: 1, _DATETIME2: 1, _TIME2: 1,
    _JSON: 1, _NEWDECIMAL: 2, _ENUM: 2, _SET: 2, _BLOB: 1, _VAR_STRING: 2, _STRING: 2,
    _GEOMETRY: 1, _VECTOR: 1, _BLOB_COMPRESSED: 1, _VARCHAR_COMPRESSED: 2,
}  # fmt: skip
_COMPRESSED = {_BLOB_COMPRESSED: "BLOB or TEXT", _VARCHAR_COMPRESSED: "VARBINARY or VARCHAR"}


@dataclass(frozen=True, slots=True)
class LogType:
    """A column's type, as a TABLE_MAP event gives it.

    Attributes:
        code: The type byte; for an ENUM or SET its own code, not STRING's.
        first, second: The metadata bytes; for VARCHAR and STRING, `first` is the size in bytes.
    """

    code: int
    first: int = 0
    second: int = 0

    @property
    def is_number(self) -> bool:
        """Whether it is a numeric type, which may be unsigned."""
        return self.code in _INTEGERS or self.code in (_NEWDECIMAL, _FLOAT, _DOUBLE)

    @property
    def is_year(self) -> bool:
        """Whether it is a YEAR."""
        return self.code == _YEAR

    @property
    def is_integer(self) -> bool:
        """Whether it is an integer type."""
        return self.code in _INTEGERS

    @property
    def is_text(self) -> bool:
        """Whether its values have a character set, which may be `binary`."""
        return self.code in (_VARCHAR, _VAR_STRING, _STRING, _BLOB)

    @property
    def has_collation(self) -> bool:
        """Whether the column is among those for which a TABLE_MAP event lists collations."""
        return self.is_text or self.code == _VECTOR or self.code in _COMPRESSED

    @property
    def is_geometry(self) -> bool:
        """Whether it is of one of the spatial types."""
        return self.code == _GEOMETRY

    @property
    def has_labels(self) -> bool:
        """Whether it is an ENUM or a SET."""
        return self.is_enum or self.is_set

    @property
    def is_enum(self) -> bool:
        """Whether it is an ENUM."""
        return self.code == _ENUM

    @property
    def is_set(self) -> bool:
        """Whether it is a SET."""
        return self.code == _SET


def is_type_code(code: int) -> bool:
    """Return whether a type byte of a TABLE_MAP event is one whose metadata are known."""
    return code in _METADATA or code in _INTEGERS or code in {_DATE, _YEAR, *_BEFORE_5_6}


def metadata_size(code: int) -> int:
    """Return how many metadata bytes a TABLE_MAP event has for a type code."""
    return _METADATA.get(code, 0)


def log_type(code: int, metadata: bytes) -> LogType:
    """Parse a type code and its metadata bytes.

    Raises:
        CorruptLog: No column can have this type; its values would have an impossible size.
    """
    type_ = _log_type(code, metadata)
    if not _is_possible(type_):
        raise CorruptLog(f"a column of type {type_.code} with {type_.first}, {type_.second}")
    return type_


def _is_possible(type_: LogType) -> bool:
    """Return whether a column can have this type; kernels rely on the sizes that follow from it."""
    code, first, second = type_.code, type_.first, type_.second
    if code == _NEWDECIMAL:
        return 1 <= first <= 65 and second <= min(first, 38)  # MariaDB's scales; MySQL's end at 30
    if code == _BIT:
        return first < 8 and 1 <= second * 8 + first <= 64
    if code == _ENUM:
        return first in (1, 2)
    if code == _SET:
        return first in (1, 2, 3, 4, 8)
    if code in (_BLOB, _JSON, _GEOMETRY, _VECTOR, _BLOB_COMPRESSED):
        return 1 <= first <= 4
    return True


def _log_type(code: int, metadata: bytes) -> LogType:
    first, second = (*metadata, 0, 0)[:2]
    if code == _STRING:
        # The highest bits of the size are in bits 4 and 5 of the type byte, inverted.
        if first & 0x30 != 0x30:
            second |= ((first & 0x30) ^ 0x30) << 4
            first |= 0x30
        return LogType(first, second) if first in (_ENUM, _SET) else LogType(_STRING, second)
    if code in (_VARCHAR, _VAR_STRING, _VARCHAR_COMPRESSED):
        return LogType(code, first | second << 8)
    return LogType(code, first, second)


@dataclass(frozen=True, slots=True)
class MysqlValueType:
    """How the decoder reads and writes values of a column.

    Attributes:
        name: SQL name, as in `information_schema.columns.column_type`, without labels.
        kind: Which kernel writes the values.
        size: Size of a value in bytes, if `prefix` is 0.
        prefix: Bytes of the length before each value; 0 if the size is fixed.
        room: The most bytes of a value's JSON. If `prefix` is not 0, a multiple of the value's
            length is added to it, which depends on the kind (`scan_rows`).
        first, second: Parameters of the kernel: digits and scale of a DECIMAL; digits of a
            fraction; size of a BINARY, and whether it may be a string; for texts, the line of
            `charsets.SINGLES` (first), or the bytes of the longest character (second), or for
            UTF-16 whether it is little-endian and whether it has surrogates.
        charset: The character set of a multi-byte text, whose table the kernel needs.
    """

    name: str
    kind: int
    size: int = 0
    prefix: int = 0
    room: int = 32
    first: int = 0
    second: int = 0
    charset: Charset | None = None


def may_be_fixed(type_: LogType) -> bool:
    """Return whether a BINARY in MariaDB's log may be a UUID, INET4 or INET6."""
    return type_.code == _STRING and type_.first in {size for size, _, _ in _FIXED.values()}


def fixed_type(type_: LogType, name: str) -> MysqlValueType | None:
    """Return the type of a column that is UUID, INET4 or INET6 in MariaDB's catalog, else None.

    Args:
        type_: The column's type in the log.
        name: Its type in the catalog.
    """
    size, _, _ = _FIXED.get(name, (0, 0, 0))
    if not size or type_.code != _STRING or type_.first != size:
        return None
    return mariadb_type(name)


def mariadb_type(name: str) -> MysqlValueType | None:
    """Return MariaDB's type UUID, INET4 or INET6 by its name; None for any other name."""
    if name not in _FIXED:
        return None
    _, kind, room = _FIXED[name]
    return MysqlValueType(name, kind, prefix=1, room=room)


@dataclass(frozen=True, slots=True)
class ValueForms:
    """The formats of values where there is a choice (`engine.values` of the pipeline file).

    Attributes:
        enum_index: Write an ENUM as the number of its label, from 1 on; 0 for MySQL's error value.
        set_bits: Write a SET as a number with a bit for each label, the first label in the lowest
            bit.
        timestamp_micros: Write a TIMESTAMP as microseconds since 1970; 0 for the zero value.
        binary_text: Write BINARY and VARBINARY as a string if the bytes are UTF-8.
    """

    enum_index: bool = False
    set_bits: bool = False
    timestamp_micros: bool = False
    binary_text: bool = False


LABEL_FORMS = ValueForms()
"""The default formats."""


def value_type(  # noqa: C901, PLR0911, PLR0912 - one case per type
    type_: LogType,
    collation: int | None,
    *,
    unsigned: bool,
    forms: ValueForms = LABEL_FORMS,
) -> MysqlValueType:
    """Return how to decode values of a column.

    Args:
        type_: Its type in the log.
        collation: The number of its collation; None if it has none.
        unsigned: Whether it is an unsigned number.
        forms: The formats of values where there is a choice.

    Raises:
        UnsupportedEvent: The type or its character set cannot be decoded; the message names it.
    """
    code = type_.code
    suffix = " unsigned" if unsigned else ""
    if code in _INTEGERS:
        name, size = _INTEGERS[code]
        return MysqlValueType(name + suffix, UNSIGNED if unsigned else SIGNED, size)
    if code == _NEWDECIMAL:
        digits, scale = type_.first, type_.second
        name = f"decimal({digits},{scale}){suffix}"
        return MysqlValueType(
            name, DECIMAL, decimal_size(digits, scale), room=digits + 8, first=digits, second=scale
        )
    if code == _FLOAT:
        return MysqlValueType("float" + suffix, FLOAT, 4, room=FLOAT_ROOM)
    if code == _DOUBLE:
        return MysqlValueType("double" + suffix, FLOAT, 8, room=FLOAT_ROOM)
    if code in _TIMES:
        name, kind, size = _TIMES[code]
        if kind == TIMESTAMP and forms.timestamp_micros:
            kind = MICROS
        digits = type_.first
        if digits > 6:
            raise UnsupportedEvent(f"{name}({digits})")
        shown = f"{name}({digits})" if digits else name
        return MysqlValueType(shown, kind, size + (digits + 1) // 2, room=48, first=digits)
    if code == _DATE:
        return MysqlValueType("date", DATE, 3)
    if code == _YEAR:
        return MysqlValueType("year", YEAR, 1)
    if code == _BIT:
        bits = type_.second * 8 + type_.first
        return MysqlValueType(f"bit({bits})", BIT, (bits + 7) // 8)
    if code == _ENUM:
        return MysqlValueType("enum", UNSIGNED if forms.enum_index else ENUM, type_.first)
    if code == _SET:
        return MysqlValueType("set", UNSIGNED if forms.set_bits else SET, type_.first)
    if code == _JSON:
        return MysqlValueType("json", JSON, prefix=type_.first, room=DOCUMENT_ROOM)
    if code == _GEOMETRY:
        return MysqlValueType("geometry", BLOB, prefix=type_.first)
    if code == _VECTOR:
        return MysqlValueType("vector", VECTOR, prefix=type_.first)
    if type_.is_text and collation is not None:
        return _text_type(type_, collation, binary_text=forms.binary_text)
    if code in _BEFORE_5_6:
        raise UnsupportedEvent(
            f"{_BEFORE_5_6[code]} in its format before MySQL 5.6; run: ALTER TABLE ... FORCE"
        )
    if code in _COMPRESSED:
        raise UnsupportedEvent(f"{_COMPRESSED[code]} with the attribute COMPRESSED")
    raise UnsupportedEvent(f"type {code} of the binary log")


def _text_type(type_: LogType, collation: int, *, binary_text: bool) -> MysqlValueType:
    charset = CHARSETS.get(collation)
    if charset is None:
        raise UnsupportedEvent(f"text with the unknown collation {collation}")
    binary = charset.form is Form.BINARY
    if type_.code == _BLOB:
        name = _BLOBS.get(type_.first, "") + ("blob" if binary else "text")
        base = MysqlValueType(name, BLOB, prefix=type_.first)
    else:
        size = type_.first
        fixed = "" if type_.code == _STRING else "var"
        name = f"{fixed}{'binary' if binary else 'char'}({size // charset.width})"
        base = MysqlValueType(name, BYTES if binary_text else BLOB, prefix=1 if size < 256 else 2)
        if binary and type_.code == _STRING:
            room, text = 6 * size + 32, int(binary_text)
            base = replace(base, kind=PADDED_BYTES, room=room, first=size, second=text)
    match charset.form:
        case Form.BINARY:
            return base
        case Form.UTF_8:
            return replace(base, kind=UTF_8_TEXT)
        case Form.SINGLE:
            return replace(base, kind=SINGLE_TEXT, first=single_line(charset))
        case Form.MULTI:
            return replace(base, kind=MULTI_TEXT, second=charset.width, charset=charset)
        case Form.UTF_16:
            little, pairs = charset.name == "utf16le", charset.name != "ucs2"
            return replace(base, kind=UTF_16_TEXT, first=int(little), second=int(pairs))
        case Form.UTF_32:
            return replace(base, kind=UTF_32_TEXT)


def skipped_type(type_: LogType) -> MysqlValueType:
    """Return how to skip values of a column of a table that is not captured.

    Raises:
        UnsupportedEvent: The size of its values is not known.
    """
    if type_.code in (_BLOB, _BLOB_COMPRESSED):
        return MysqlValueType("", BLOB, prefix=type_.first)
    if type_.is_text or type_.code == _VARCHAR_COMPRESSED:
        return MysqlValueType("", BLOB, prefix=1 if type_.first < 256 else 2)
    return value_type(type_, None, unsigned=False)
