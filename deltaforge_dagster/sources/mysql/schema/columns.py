"""Columns as statements and the catalog describe them: their types and their defaults.

A statement may use synonyms and leave out sizes (manual: "Data Types", "Using Data Types from Other
Database Engines"); `column_type` converts its types to the notation of
`information_schema.columns.column_type`. The comparison with the types in the log (`fits`) is
approximate, because the log has no display widths, and lengths of text in bytes. `described_type`
converts a type of the catalog (`COLUMN_TYPE`) and its character set (`CHARACTER_SET_NAME`) to the
same `MysqlValueType` as the decoder gets from a TABLE_MAP event.

A default is the value of a column that an insert in the log leaves out. With `binlog_row_image`
MINIMAL or NOBLOB, the image of an inserted row lacks the columns to which the statement gave no
value, unless the server computed one. All servers log the values of AUTO_INCREMENT,
CURRENT_TIMESTAMP, expressions, triggers and stored generated columns; MySQL also those of virtual
columns. So a column that is left out has a constant default, NULL, or the value that the server
puts into a NOT NULL column without a default if the SQL mode is not strict (manual: "Data Type
Default Values"). On MariaDB it may also be a virtual column, whose value is nowhere in the log.

The constant comes from the catalog, as text (`catalog_default`), or from a statement.
`default_json` converts it to the JSON text that the value would have in the log; a default that is
not certain has none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Context, Decimal

import numpy as np

from deltaforge_dagster.errors import UnsupportedEvent
from deltaforge_dagster.kernels.json_text import INVALID
from deltaforge_dagster.kernels.runtime import read_only
from deltaforge_dagster.sources.mysql.events.sql_text import (
    NO_CHARACTER,
    NotUnderstoodError,
    Token,
    TokenKind,
    TokenReader,
    items,
)
from deltaforge_dagster.sources.mysql.events.table_map import ColumnDefault
from deltaforge_dagster.sources.mysql.values.charsets import CHARSETS, any_collation
from deltaforge_dagster.sources.mysql.values.numbers import FLOAT_ROOM, write_float
from deltaforge_dagster.sources.mysql.values.types import (
    BIT,
    DATE,
    DATETIME,
    DECIMAL,
    FLOAT,
    GEOMETRIES,
    LABEL_FORMS,
    MICROS,
    MULTI_TEXT,
    SIGNED,
    SINGLE_TEXT,
    TIME,
    TIMESTAMP,
    UNSIGNED,
    UTF_8_TEXT,
    UTF_16_TEXT,
    UTF_32_TEXT,
    YEAR,
    LogType,
    MysqlValueType,
    ValueForms,
    mariadb_type,
    value_type,
)

ANY_TEXT = "any text"
"""A text type whose size or character set the server chooses."""
TEXTS = {
    "tinytext", "text", "mediumtext", "longtext", "tinyblob", "blob", "mediumblob", "longblob",
    "varchar", "varbinary",
}  # fmt: skip
"""The types that `ANY_TEXT` may stand for."""

ANY_SIGN = " signed or unsigned"
"""Suffix of an integer type if the log does not say whether it is unsigned."""

_SYNONYMS = {
    "bool": "tinyint", "boolean": "tinyint", "int1": "tinyint", "int2": "smallint",
    "int3": "mediumint", "middleint": "mediumint", "integer": "int", "int4": "int",
    "int8": "bigint", "dec": "decimal", "numeric": "decimal", "fixed": "decimal",
    "float4": "float", "float8": "double", "character": "char", "nchar": "char",
    "nvarchar": "varchar", "varcharacter": "varchar",
}  # fmt: skip
_TYPE_NAMES = {
    "tinyint", "smallint", "mediumint", "int", "bigint", "decimal", "float", "double", "real",
    "bit", "date", "time", "datetime", "timestamp", "year", "char", "binary", "enum", "set", "json",
    "vector", "uuid", "inet4", "inet6",
} | TEXTS | GEOMETRIES  # fmt: skip
_SIZED = {"decimal": "10,0", "bit": "1", "datetime": "0", "timestamp": "0", "time": "0"}
"""Types whose size is in the log, and their default size."""
_INTEGERS = {"tinyint", "smallint", "mediumint", "int", "bigint"}
_FLOAT_DIGITS = 24
"""`FLOAT(p)` with a larger p is a DOUBLE."""

_QUOTED = re.compile(r"'((?:[^'\\]|''|\\.)*)'", re.DOTALL)
_ESCAPED = re.compile(r"''|\\(.)", re.DOTALL)
_ESCAPES = {"0": "\0", "n": "\n", "r": "\r"}


def column_type(reader: TokenReader) -> str:
    """Read a type up to and including its size; UNSIGNED may follow.

    Raises:
        NotUnderstoodError: The type is not known for certain.
    """
    name = _type_name(reader)
    if name in {ANY_TEXT, "bigint unsigned"}:
        return name
    inner = reader.group() if reader.word == "(" else []
    if name in {"enum", "set"}:
        return f"{name}({','.join(_label(tokens) for tokens in items(inner))})"
    size = "".join(token.text for token in inner)
    if name == "float" and size.isdigit() and int(size) > _FLOAT_DIGITS:
        return "double"
    if name in {"text", "blob"} and size:
        return ANY_TEXT
    if name == "decimal" and size.isdigit():
        size += ",0"
    return f"{name}({size or _SIZED[name]})" if name in _SIZED else name


def _type_name(reader: TokenReader) -> str:
    word = reader.next().word.lower()
    if word == "serial":
        return "bigint unsigned"
    if word == "national":
        word = reader.next().word.lower()
    if word == "long":
        reader.skip_any("VARCHAR", "VARBINARY", "CHAR", "CHARACTER", "VARYING")
        return ANY_TEXT
    name = _SYNONYMS.get(word, word)
    if name not in _TYPE_NAMES:
        raise NotUnderstoodError
    if name == "double":
        reader.skip("PRECISION")
    if name == "char" and (reader.skip("VARYING") or reader.skip("VARCHAR")):
        return "varchar"
    return name


def _label(tokens: list[Token]) -> str:
    """Return a label in quotes."""
    if len(tokens) != 1 or tokens[0].kind is not TokenKind.TEXT:
        raise NotUnderstoodError
    text = tokens[0].text
    # The meaning of trailing blanks depends on the character set.
    if text.endswith(" ") or NO_CHARACTER in text:
        raise NotUnderstoodError
    return "'" + text.replace("\\", "\\\\").replace("'", "''") + "'"


def labels(column_type: str) -> tuple[str, ...]:
    """Return the unquoted labels of `enum('a','b')` or `set(...)`; empty for other types."""
    if not column_type.lower().startswith(("enum(", "set(")):
        return ()
    return tuple(_unquoted(label) for label in _QUOTED.findall(column_type))


def _unquoted(text: str) -> str:
    """Return the meaning of a text between quotes."""
    return _ESCAPED.sub(
        lambda match: "'" if match[1] is None else _ESCAPES.get(match[1], match[1]), text
    )


def labels_text(labels: Sequence[str]) -> str:
    """Return labels as `COLUMN_TYPE` shows them after the type's name; "" if there are none."""
    if not labels:
        return ""
    return "(" + ",".join("'" + label.replace("'", "''") + "'" for label in labels) + ")"


def fits(defined: str, logged: str) -> bool:
    """Return whether a column's defined type is compatible with its type in the log."""
    if logged.endswith(ANY_SIGN):
        return fits(_without_sign(defined), logged.removesuffix(ANY_SIGN))
    expected, actual = _comparable(defined), _comparable(logged)
    if expected == actual:
        return True
    if expected == ANY_TEXT:
        return actual in {_comparable(text) for text in TEXTS}
    if expected == "real":  # depends on the SQL mode
        return actual in {"float", "double"}
    return (expected, actual) in {("json", "longtext"), ("vector", "varchar")}  # MariaDB


def is_text(column_type: str) -> bool:
    """Return whether a type is, or may be, text in a character set."""
    return re.match(r"any text|(?:var)?char|\w*text", column_type.lower()) is not None


def is_binary(column_type: str) -> bool:
    """Return whether a type is BINARY, VARBINARY or a BLOB."""
    return re.match(r"(?:var)?binary|\w*blob", column_type.lower()) is not None


def text_charset(name: str) -> str:
    """Return the name of a character set that texts can have, "" if it is not known.

    Texts of the set `binary` are another type, so that it is not known either.
    """
    return name if name != "binary" and any_collation(name) is not None else ""


def is_unsigned(column_type: str) -> bool:
    """Return whether a numeric type is unsigned."""
    return "unsigned" in column_type.lower().split()


def _without_sign(column_type: str) -> str:
    return re.sub(r"(?i)\s+unsigned\b|\s+zerofill\b", "", column_type)


def _comparable(column_type: str) -> str:
    if column_type == ANY_TEXT:
        return ANY_TEXT
    base, _, rest = column_type.lower().partition("(")
    words = base.split()
    name = words[0]
    size, _, after = rest.partition(")")
    if name in _INTEGERS:
        unsigned = "unsigned" in words[1:] or "unsigned" in after.split()
        return f"{name} unsigned" if unsigned else name
    if name in _SIZED:
        return f"{name}({size.replace(' ', '') or 0})"
    if name in GEOMETRIES:
        return "geometry"
    # The log distinguishes text and bytes only by the character set, so they count as equal here.
    return _LOGGED_TYPES.get(name, name.replace("blob", "text"))


_LOGGED_TYPES = {
    "binary": "char", "varbinary": "varchar", "uuid": "char", "inet4": "char", "inet6": "char",
}  # fmt: skip


_TYPE = re.compile(r"\s*([a-z0-9_]+)\s*(?:\(\s*(\d+)\s*(?:,\s*(\d+)\s*)?\))?(.*)", re.DOTALL)
# Type codes of the protocol (`enum_field_types`); 17 to 19 are the types with fractional seconds.
_CODES = {
    "tinyint": 1, "smallint": 2, "mediumint": 9, "int": 3, "bigint": 8, "float": 4, "double": 5,
    "year": 13, "date": 10, "timestamp": 17, "datetime": 18, "time": 19,
}  # fmt: skip
_BLOB_SIZES = {"tiny": 1, "": 2, "medium": 3, "long": 4}
_COLLATIONS = {charset.name: number for number, charset in CHARSETS.items()}
_COLLATIONS["utf8"] = _COLLATIONS["utf8mb3"]


def described_type(
    column_type: str,
    charset: str | None,
    labels: Sequence[str] = (),
    forms: ValueForms = LABEL_FORMS,
) -> MysqlValueType:
    """Return how to decode values of a column that the catalog describes.

    Args:
        column_type: `COLUMN_TYPE`, such as `decimal(10,2) unsigned`.
        charset: `CHARACTER_SET_NAME`; None for types without one.
        labels: The labels of an ENUM or SET.
        forms: The formats of values where there is a choice.

    Raises:
        UnsupportedEvent: The type or its character set is unknown.
    """
    match = _TYPE.fullmatch(column_type.lower())
    assert match
    name, first, second, rest = match[1], int(match[2] or 0), int(match[3] or 0), match[4]
    mariadb = mariadb_type(name)
    if mariadb is not None:
        return mariadb
    collation = 63 if charset is None else _COLLATIONS.get(charset)  # 63 is `binary`
    if collation is None:
        raise UnsupportedEvent(f"text in the unknown character set {charset}")
    log_type = _log_type(name, first, second, CHARSETS[collation].width, len(labels))
    if log_type is None:
        raise UnsupportedEvent(f"type {name}")
    return value_type(log_type, collation, unsigned="unsigned" in rest.split(), forms=forms)


def _log_type(  # noqa: C901, PLR0911, PLR0912 - one case per type
    name: str, first: int, second: int, width: int, labels: int
) -> LogType | None:
    if name in {"timestamp", "datetime", "time"}:
        return LogType(_CODES[name], first)
    if name in _CODES:
        return LogType(_CODES[name])
    if name == "decimal":
        return LogType(246, first, second)
    if name == "bit":
        return LogType(16, first % 8, first // 8)
    if name == "enum":
        return LogType(247, 1 if labels < 256 else 2)
    if name == "set":
        size = (labels + 7) // 8
        return LogType(248, size if size <= 4 else 8)
    if name in {"char", "binary"}:
        return LogType(254, first * width)
    if name in {"varchar", "varbinary"}:
        return LogType(15, first * width)
    if name == "json":
        return LogType(245, 4)
    if name == "vector":
        return LogType(242, 4)
    if name in GEOMETRIES:
        return LogType(255, 4)
    for ending in ("blob", "text"):
        if name.endswith(ending) and name.removesuffix(ending) in _BLOB_SIZES:
            return LogType(252, _BLOB_SIZES[name.removesuffix(ending)])
    return None


NULL = ColumnDefault(None)
"""The default NULL, written in the definition or implied by a nullable column without a default."""

_MOST_DIGITS = Context(prec=65)
"""A DECIMAL has at most 65 digits; Python's default context has 28."""

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?", re.IGNORECASE)
_BITS = re.compile(r"b'([01]+)'")
_INTEGER = re.compile(r"-?\d+")
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_MOMENT = re.compile(r"(\d{4}-\d\d-\d\d) (\d\d:\d\d:\d\d)(?:\.(\d{1,6}))?")
_TIME = re.compile(r"(-?\d{2,3}:\d\d:\d\d)(?:\.(\d{1,6}))?")
_ZERO_DATE = "0000-00-00"
_NUMBERS = {"tinyint", "smallint", "mediumint", "int", "bigint", "decimal", "float", "double"}
_EMPTY_TEXTS = {"char", "varchar", "tinytext", "text", "mediumtext", "longtext", "set"}
_ZEROS = {
    "date": _ZERO_DATE,
    "datetime": f"{_ZERO_DATE} 00:00:00",
    "time": "00:00:00",
    "year": "0000",
    "bit": "b'0'",
}
_TEXT_KINDS = {UTF_8_TEXT, SINGLE_TEXT, MULTI_TEXT, UTF_16_TEXT, UTF_32_TEXT}


def catalog_default(
    value: str | None, *, type_: str, nullable: bool, extra: str, is_mariadb: bool
) -> ColumnDefault | None:
    """Return the default that the catalog shows; None if it is not a constant, or not certain.

    Args:
        value: `COLUMN_DEFAULT`: the constant itself; on MariaDB an expression, which may be `NULL`.
        type_: `COLUMN_TYPE`.
        nullable: `IS_NULLABLE`.
        extra: `EXTRA`.
        is_mariadb: Whether the server is MariaDB.
    """
    if re.search(r"generated|auto_increment", extra, re.IGNORECASE):
        return None
    if value is None:
        return NULL if nullable else implicit_default(type_)
    if not is_mariadb:
        return ColumnDefault(value)
    if value.upper() == "NULL":
        return NULL
    if quoted := _QUOTED.fullmatch(value):
        return ColumnDefault(_unquoted(quoted[1]))
    return ColumnDefault(value) if _NUMBER.fullmatch(value) or _BITS.fullmatch(value) else None


def implicit_default(type_: str) -> ColumnDefault | None:
    """Return what the server puts into a NOT NULL column without default; None if uncertain.

    Args:
        type_: `COLUMN_TYPE`.
    """
    name = re.split(r"[ (]", type_.lower(), maxsplit=1)[0]
    if name in _NUMBERS:
        return ColumnDefault("0")
    if name in _EMPTY_TEXTS:
        return ColumnDefault("")
    if name == "enum":
        label = re.match(r"enum\('((?:[^'\\]|'')*)'", type_, re.IGNORECASE)
        return None if label is None else ColumnDefault(label[1].replace("''", "'"))
    zero = _ZEROS.get(name)
    return None if zero is None else ColumnDefault(zero)


def default_json(  # noqa: PLR0911 - one case per type
    default: ColumnDefault | None, type_: MysqlValueType, labels: Sequence[str]
) -> str | None:
    """Return a default as the JSON text of a value in the log; None if it is not certain.

    Args:
        default: The default; None if it is unknown.
        type_: The column's type.
        labels: Those of an ENUM or SET.
    """
    if default is None:
        return None
    if default.text is None:
        return "null"
    text, kind = default.text, type_.kind
    if type_.name in {"enum", "set"}:
        return _labels_json(text, type_, labels)
    if kind in {SIGNED, UNSIGNED, YEAR}:
        return str(int(text)) if _INTEGER.fullmatch(text) else None
    if kind == BIT:
        bits = _BITS.fullmatch(text)
        return None if bits is None else str(int(bits[1], 2))
    if kind in (DECIMAL, FLOAT):
        return _number_json(text, type_) if _NUMBER.fullmatch(text) else None
    if kind in {DATE, DATETIME, TIME, TIMESTAMP, MICROS}:
        return _moment_json(text, kind)
    if kind in _TEXT_KINDS:
        # The log has no blanks at the end of a CHAR.
        return json.dumps(
            text.rstrip(" ") if type_.name.startswith("char") else text, ensure_ascii=False
        )
    return None


def _labels_json(text: str, type_: MysqlValueType, labels: Sequence[str]) -> str | None:
    """Return labels as text, or as the number that the pipeline file asks for (`ValueForms`)."""
    chosen = [text] if type_.name == "enum" else text.split(",") if text else []
    if not all(label in labels for label in chosen):
        return None
    indexes = sorted(labels.index(label) for label in chosen)
    if type_.kind == UNSIGNED:
        return str(indexes[0] + 1 if type_.name == "enum" else sum(1 << index for index in indexes))
    return json.dumps(",".join(labels[index] for index in indexes), ensure_ascii=False)


def _number_json(text: str, type_: MysqlValueType) -> str | None:
    if type_.kind == DECIMAL:
        digits = Decimal(text).quantize(
            Decimal(1).scaleb(-type_.second), ROUND_HALF_UP, _MOST_DIGITS
        )
        return f'"{digits:f}"'
    bits = np.array([float(text)], "<f4" if type_.size == 4 else "<f8").view(np.uint8)
    out = np.empty(FLOAT_ROOM, np.uint8)
    end = write_float(read_only(bits), 0, type_.size, out, 0)
    return None if end == INVALID else out[:end].tobytes().decode()


def _moment_json(text: str, kind: int) -> str | None:
    if kind == DATE:
        return f'"{text}"' if _DATE.fullmatch(text) else None
    if kind == TIME:
        time = _TIME.fullmatch(text)
        return None if time is None else f'"{time[1]}.{(time[2] or ""):0<6}"'
    moment = _MOMENT.fullmatch(text)
    if moment is None:
        return None
    date, time_of_day, fraction = moment[1], moment[2], f"{moment[3] or '':0<6}"
    if kind == DATETIME:
        return f'"{date} {time_of_day}.{fraction}"'
    if date != _ZERO_DATE:
        return None  # the constant is in the time zone of the session that set it
    return "0" if kind == MICROS else f'"{date}T{time_of_day}.{fraction}Z"'
