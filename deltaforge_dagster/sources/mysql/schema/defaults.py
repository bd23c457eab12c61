"""Column defaults: the values of columns that an insert in the log leaves out.

With `binlog_row_image` MINIMAL or NOBLOB, the image of an inserted row lacks the columns to which
the statement gave no value, unless the server computed one. All servers log the values of
AUTO_INCREMENT, CURRENT_TIMESTAMP, expressions, triggers and stored generated columns; MySQL also
those of virtual columns. So a column that is left out has a constant default, NULL, or the value
that the server puts into a NOT NULL column without a default if the SQL mode is not strict (manual:
"Data Type Default Values"). On MariaDB it may also be a virtual column, whose value is nowhere in
the log.

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

from deltaforge_dagster.kernels.json_text import INVALID
from deltaforge_dagster.kernels.runtime import read_only
from deltaforge_dagster.sources.mysql.events.table_map import ColumnDefault
from deltaforge_dagster.sources.mysql.values.floats import FLOAT_ROOM, write_float
from deltaforge_dagster.sources.mysql.values.types import (
    BIT,
    DATE,
    DATETIME,
    DECIMAL,
    FLOAT,
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
    MysqlValueType,
)

NULL = ColumnDefault(None)
"""The default NULL, written in the definition or implied by a nullable column without a default."""

_MOST_DIGITS = Context(prec=65)
"""A DECIMAL has at most 65 digits; Python's default context has 28."""

_QUOTED = re.compile(r"'((?:[^'\\]|''|\\.)*)'", re.DOTALL)
_ESCAPED = re.compile(r"''|\\(.)", re.DOTALL)
_ESCAPES = {"0": "\0", "n": "\n", "r": "\r"}
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?", re.IGNORECASE)
_BITS = re.compile(r"b'([01]+)'")
_INTEGER = re.compile(r"-?\d+")
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_MOMENT = re.compile(r"(\d{4}-\d\d-\d\d) (\d\d:\d\d:\d\d)(?:\.(\d{1,6}))?")
_TIME = re.compile(r"(-?\d{2,3}:\d\d:\d\d)(?:\.(\d{1,6}))?")
_ZERO_DATE = "0000-00-00"
_NUMBERS = {"tinyint", "smallint", "mediumint", "int", "bigint", "decimal", "float", "double"}
_TEXTS = {"char", "varchar", "tinytext", "text", "mediumtext", "longtext", "set"}
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
        return ColumnDefault(_ESCAPED.sub(_unescaped, quoted[1]))
    return ColumnDefault(value) if _NUMBER.fullmatch(value) or _BITS.fullmatch(value) else None


def _unescaped(match: re.Match[str]) -> str:
    return "'" if match[1] is None else _ESCAPES.get(match[1], match[1])


def implicit_default(type_: str) -> ColumnDefault | None:
    """Return what the server puts into a NOT NULL column without default; None if uncertain.

    Args:
        type_: `COLUMN_TYPE`.
    """
    name = re.split(r"[ (]", type_.lower(), maxsplit=1)[0]
    if name in _NUMBERS:
        return ColumnDefault("0")
    if name in _TEXTS:
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
