"""What typed rows should be, in plain Python: which values fit a type, and how a value stands in JSON.

Written from docs/typed-rows.md and docs/types.md, with `json`, `decimal` and `datetime`; shares nothing with the kernels.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
import uuid
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa

from deltaforge_dagster.sources.rows.images import UNCHANGED, members
from deltaforge_dagster.sources.value_types import ValueType
from deltaforge_dagster.typed_rows.tables import TypedRows

NULL_DOCUMENT = "null\t"
"""The JSON document `null`, which is a value."""
_NULLS = {"null", NULL_DOCUMENT}
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_CLOCK = r"[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]+)?"
_DAY = r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
_TIME = re.compile(_CLOCK)
_DATE = re.compile(_DAY)
_TIMESTAMP = re.compile(rf"({_DAY})[ T]({_CLOCK})")
_ZONED = re.compile(rf"({_DAY})[ T]({_CLOCK})(Z|[+-][0-9]{{2}}(:[0-9]{{2}}){{0,2}})")

_FLOAT_RANGES = {
    32: (Fraction(2**128 - 2**103), Fraction(1, 2**150)),
    64: (Fraction(2**1024 - 2**970), Fraction(1, 2**1075)),
}
"""By bits: from where numbers are nearest to infinity, and up to where they are nearest to 0."""


def json_texts(text: str) -> list[str]:
    """Return the elements of a JSON array as they stand."""
    parts, depth, start, at, quoted = [], 0, 1, 1, False
    while at < len(text) - 1:
        character = text[at]
        if quoted:
            at += character == "\\"
            quoted = character != '"'
        elif character == '"':
            quoted = True
        elif character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:at])
            start = at + 1
        at += 1
    return [*parts, text[start:-1]] if text[1:-1] else []


def fits(text: str, type_: ValueType) -> bool:  # noqa: C901, PLR0911, PLR0912 - one case per type
    """Say whether the value of a JSON text is one of the type, exactly."""
    value = json.loads(text, parse_float=str, parse_int=str, parse_constant=_refuse)
    is_string = text.startswith('"')
    is_number = text[0] in "-0123456789"
    match type_.kind:
        case "json":
            return True
        case "text":
            return not is_string or _is_unicode(value)
        case "boolean":
            return text in {"true", "false"}
        case "integer":
            bits = type_.bits - type_.signed
            least = -(1 << bits) if type_.signed else 0
            number = _number(value) if is_number or is_string else None
            return (
                number is not None
                and number == number.to_integral_value()
                and least <= number < 1 << bits
            )
        case "decimal":
            number = _number(value) if is_number or is_string else None
            return number is not None and _is_exact(number, type_)
        case "float":
            if is_string and value in {"NaN", "Infinity", "-Infinity"}:
                return type_.form != "finite"
            number = _number(value) if is_number or is_string else None
            if number is None:
                return False
            most, least_one = _FLOAT_RANGES[type_.bits]
            return number == 0 or least_one < abs(Fraction(number)) < most
        case "uuid":
            return is_string and bool(
                re.fullmatch(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", value)
            )
        case "date":
            return is_string and bool(_DATE.fullmatch(value)) and _is_one(date, value)
        case "time":
            return is_string and bool(_TIME.fullmatch(value)) and _is_one(time, value)
        case "timestamp" if is_number:
            return type_.form == "micros" and 0 < int(value) < 253_402_300_800_000_000
        case "timestamp":
            form = _ZONED if type_.zone else _TIMESTAMP
            return is_string and bool(form.fullmatch(value)) and _is_one(datetime, value)
        case "binary":
            if is_string:
                return type_.form == "text" and _is_unicode(value)
            return text.startswith('{"_base64":"')
        case "geometry" if type_.form == "srid":
            wkb = base64.b64decode(value["_base64"])[4:]
            return len(wkb) > 4 and wkb[0] < 2
        case "geometry":
            return is_string and bool(re.fullmatch("([0-9A-Fa-f]{2}){5,}", value))
        case "list":
            assert type_.element is not None
            return text.startswith("[") and all(
                one in _NULLS or fits(one, type_.element) for one in json_texts(text)
            )
        case _:
            raise AssertionError(type_)


def _refuse(text: str) -> None:
    raise AssertionError(text)


def _is_unicode(text: str) -> bool:
    return not any(0xD800 <= ord(character) < 0xE000 for character in text)


def _number(text: str) -> Decimal | None:
    return Decimal(text) if _NUMBER.fullmatch(text) else None


def _is_exact(number: Decimal, type_: ValueType) -> bool:
    with localcontext(prec=20_000):
        units = number.scaleb(type_.scale)
        return units == units.to_integral_value() and abs(units) < Decimal(10) ** type_.precision


def _is_one(kind: Any, text: str) -> bool:
    """Say whether Python reads the text; digits that it would drop must be zeros."""
    clock = re.search(r"\.([0-9]+)", text)
    if clock is not None and clock[1][6:].strip("0"):
        return False
    if re.search(r"[ T]24:|^24:", text):
        return False
    try:
        found = kind.fromisoformat(text)
        if isinstance(found, datetime):
            found.replace(tzinfo=found.tzinfo or UTC).astimezone(UTC)
    except (ValueError, OverflowError):
        return False
    return True


def same(value: Any, text: str, type_: ValueType) -> bool:  # noqa: C901, PLR0911, PLR0912 - one case per type
    """Say whether what stands in an Arrow column is the value of a JSON text that fits."""
    if text == "null" or (text == NULL_DOCUMENT and type_.kind != "json"):
        return value is None
    match type_.kind:
        case "json":
            return bool(value == ("null" if text == NULL_DOCUMENT else text))
        case "text":
            return bool(value == (json.loads(text) if text.startswith('"') else text))
        case "boolean":
            return value is (text == "true")
        case "integer":
            return isinstance(value, int) and Decimal(value) == Decimal(text.strip('"'))
        case "decimal":
            exact = Decimal(text.strip('"'))
            return bool(value == exact) and -value.as_tuple().exponent == type_.scale
        case "float":
            return _bits(value, type_) == _bits(_nearest(text.strip('"'), type_), type_)
        case "uuid":
            return bool(value == uuid.UUID(json.loads(text)))
        case "date":
            return bool(value == date.fromisoformat(json.loads(text)))
        case "time":
            return bool(value == time.fromisoformat(json.loads(text)))
        case "timestamp" if not text.startswith('"'):
            micros = timedelta(microseconds=int(text))
            return bool(value == datetime(1970, 1, 1, tzinfo=UTC) + micros)
        case "timestamp":
            return bool(value == datetime.fromisoformat(json.loads(text)))
        case "binary":
            read = json.loads(text)
            return bool(
                value
                == (read.encode() if isinstance(read, str) else base64.b64decode(read["_base64"]))
            )
        case "geometry" if type_.form == "srid":
            return with_srid(value) == base64.b64decode(json.loads(text)["_base64"])
        case "geometry":
            return bool(value.hex() == json.loads(text).lower())
        case "list":
            assert type_.element is not None
            texts = json_texts(text)
            return len(value) == len(texts) and all(
                same(one, element, type_.element) for one, element in zip(value, texts, strict=True)
            )
        case _:
            raise AssertionError(type_)


def with_srid(wkb: bytes) -> bytes:
    """Return a geometry as MySQL has it: the SRID, taken out of the WKB, then the WKB."""
    order: Any = "little" if wkb[0] else "big"
    kind = int.from_bytes(wkb[1:5], order)
    if not kind & 1 << 29:
        return bytes(4) + wkb
    srid = int.from_bytes(wkb[5:9], order).to_bytes(4, "little")
    return srid + wkb[:1] + (kind & ~(1 << 29)).to_bytes(4, order) + wkb[9:]


def _nearest(text: str, type_: ValueType) -> float:
    """Return the nearest number: of 64 bits Python's, of 32 bits the nearest in exact arithmetic, the even one of two."""
    value = float(text)
    if type_.bits == 64 or not math.isfinite(value):
        return value
    with np.errstate(over="ignore"):
        middle = np.float32(value)
    around = [np.nextafter(middle, np.float32(side)) for side in (-math.inf, math.inf)]
    exact = Fraction(text)
    return float(
        min(
            (one for one in (middle, *around) if np.isfinite(one)),
            key=lambda one: (abs(Fraction(float(one)) - exact), int(one.view(np.int32)) & 1),
        )
    )


def _bits(value: float, type_: ValueType) -> bytes:
    return b"nan" if math.isnan(value) else struct.pack("<f" if type_.bits == 32 else "<d", value)


def agree(
    images: list[str | None],
    rows: TypedRows,
    written: Callable[[Any, ValueType, str], str] | None = None,
) -> None:
    """Check that typed rows are what row images say, value by value.

    With `written`, which writes a value as the source does, that also gives the image's text again.
    """
    rows.batch.validate(full=True)
    assert rows.batch.schema.equals(rows.schema.arrow, check_metadata=True)
    misfits = {(one.row, one.column) for one in rows.misfits}
    assert len(misfits) == len(rows.misfits)
    assert [one.row for one in rows.misfits] == sorted(one.row for one in rows.misfits)
    for number, column in enumerate(rows.schema.columns):
        values = rows.batch.column(number).to_pylist()
        present = rows.present.get(column.name, pa.array([True] * len(values))).to_pylist()
        for row, image in enumerate(images):
            found = {json.loads(name): text for name, text in members(image or "{}").items()}
            text = found.get(column.name)
            if text == UNCHANGED and rows.schema.marks_unchanged:
                text = None
            assert present[row] is (text is not None)
            if text is None:
                assert values[row] is None
                assert (row, column.name) not in misfits
            elif text in _NULLS or fits(text, column.type):
                assert (row, column.name) not in misfits, (text, column)
                assert same(values[row], text, column.type), (values[row], text, column)
                if written is not None:
                    assert written(values[row], column.type, text) == text
            else:
                assert (row, column.name) in misfits, (text, column)
                assert values[row] is None
