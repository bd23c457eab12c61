"""Lossless JSON as Python values: numbers keep their spelling.

For processors that read or rebuild row images, row by row. Objects become dicts in the order of the
text, arrays lists, strings, booleans and null their Python equivalents, and every number a
`Number`, which holds the original text. Compact JSON, such as row images, is byte-identical after
it is read and written again.
"""

from __future__ import annotations

import json
from decimal import Decimal
from json.encoder import encode_basestring, encode_basestring_ascii
from typing import Any, TypeAlias

Json: TypeAlias = "dict[str, Json] | list[Json] | str | bool | Number | None"


class Number:
    """A JSON number as spelled in the text; equal to numbers of the same value."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    @property
    def value(self) -> Decimal:
        """The number, exactly."""
        return Decimal(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Number) and (self.text == other.text or self.value == other.value)

    def __hash__(self) -> int:
        return hash(self.value)

    def __repr__(self) -> str:
        return self.text


def _no_number(text: str) -> Json:
    raise ValueError(f"{text} is not JSON")


_DECODER = json.JSONDecoder(parse_int=Number, parse_float=Number, parse_constant=_no_number)


def _text(text: str) -> str:
    """Return text as a JSON string; escape text with lone surrogates, which UTF-8 cannot encode."""
    if text.isascii():
        return encode_basestring(text)
    try:
        text.encode()
    except UnicodeEncodeError:
        return encode_basestring_ascii(text)
    return encode_basestring(text)


def loads(text: str) -> Json:
    """Parse a JSON text; of duplicate names in an object the last one counts.

    Raises:
        ValueError: The text is not valid JSON.
        RecursionError: The text is nested too deeply for Python.
    """
    value: Json = _DECODER.decode(text)
    return value


def dumps(value: Json) -> str:
    """Return the compact JSON text of a value, without escaping non-ASCII characters."""
    parts: list[str] = []
    _write(value, parts.append)
    return "".join(parts)


def as_json(value: Any) -> Json:
    """Convert a plain value, such as one of a YAML file, to this representation."""
    return loads(json.dumps(value, ensure_ascii=False))


def _write(value: Json, add: Any) -> None:
    if isinstance(value, str):
        add(_text(value))
    elif isinstance(value, Number):
        add(value.text)
    elif value is None:
        add("null")
    elif isinstance(value, bool):
        add("true" if value else "false")
    elif isinstance(value, list):
        before = "["
        for child in value:
            add(before)
            _write(child, add)
            before = ","
        add("]" if value else "[]")
    else:
        before = "{"
        for name, child in value.items():
            add(f"{before}{_text(name)}:")
            _write(child, add)
            before = ","
        add("}" if value else "{}")
