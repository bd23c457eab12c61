"""Values of typed rows, written again as each source writes them in row images (docs/types.md)."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from typing import Any

import numpy as np
import orjson

from deltaforge_dagster.sources.value_types import ValueType
from tests.sources.hidden import base64_of
from tests.sources.mysql.values.test_numbers import written
from tests.typed_rows.forms import NULL_DOCUMENT, json_texts, with_srid


@dataclass(frozen=True)
class JsonForms:
    """How a source writes values.

    Attributes:
        kind: The kind of source.
        iso: PostgreSQL: whether timestamps are in the form of ISO 8601.
    """

    kind: str
    iso: bool = False

    def text(self, value: Any, type_: ValueType, like: str) -> str:  # noqa: C901, PLR0911, PLR0912 - one case per type
        """Return a value as JSON text.

        `like` is the text that the value was read from; it only says what the type does not: whether a text was a string,
        and a number in quotes.
        """
        if value is None:
            return "null"
        is_string = like.startswith('"')
        match type_.kind:
            case "json":
                return like if like == NULL_DOCUMENT else str(value)
            case "text":
                return json.dumps(value, ensure_ascii=False) if is_string else value
            case "boolean":
                return "true" if value else "false"
            case "integer":
                return str(value)
            case "decimal":
                return f'"{value:f}"' if is_string else f"{value:f}"
            case "float":
                return self._float(value, type_.bits)
            case "uuid":
                return f'"{value}"'
            case "date":
                return f'"{value.isoformat()}"'
            case "time":
                return f'"{self._clock(value)}"'
            case "timestamp":
                return self._timestamp(value, zone=type_.zone, is_number=not is_string)
            case "binary":
                return (
                    json.dumps(value.decode(), ensure_ascii=False)
                    if is_string
                    else base64_of(value)
                )
            case "geometry":
                return base64_of(with_srid(value))
            case "list":
                assert type_.element is not None
                element = type_.element
                texts = zip(value, json_texts(like), strict=True)
                return "[" + ",".join(self.text(one, element, text) for one, text in texts) + "]"
        raise AssertionError(type_)

    def _float(self, value: float, bits: int) -> str:
        if not math.isfinite(value):
            return {"nan": '"NaN"', "inf": '"Infinity"', "-inf": '"-Infinity"'}[str(value)]
        if self.kind == "turso":
            return orjson.dumps(value).decode()
        if self.kind == "mysql":
            return written(struct.pack("<f" if bits == 32 else "<d", value)) or ""
        return str(np.float32(value) if bits == 32 else value).removesuffix(".0")

    def _clock(self, value: time | datetime) -> str:
        whole, fraction = f"{value:%H:%M:%S}", f".{value.microsecond:06}"
        return whole + (fraction if self.kind == "mysql" else fraction.rstrip("0").rstrip("."))

    def _timestamp(self, value: datetime, *, zone: bool, is_number: bool) -> str:
        if is_number:
            return str((value - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1))
        if self.kind == "mysql":
            space, offset = ("T", "Z") if zone else (" ", "")
        else:
            space, offset = ("T", "+00:00") if self.iso else (" ", "+00")
        day = value.date().isoformat()
        return f'"{day}{space}{self._clock(value)}{offset if zone else ""}"'
