"""Values in one form, whoever says them: a source's client, a reader of a table, a message.

Two values are equal if and only if their forms are: no number is rounded, and no text is trimmed. What may differ
by documentation is not decided here, but in `tests.oracle.known`.
"""

from __future__ import annotations

import base64
import datetime as dt
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal, cast

import numpy as np

Name = Literal[
    "integer", "decimal", "float32", "float64", "boolean", "text", "json", "binary", "geometry", "uuid", "date",
    "time", "timestamp", "timestamptz", "list",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Kind:
    """What the values of a column are, by docs/typed-rows.md.

    Attributes:
        name: The kind.
        element: That of a list's elements.
    """

    name: Name
    element: Kind | None = None


class Mark:
    """A place where an image says that it does not have the value."""

    def __repr__(self) -> str:
        return "<absent>"


ABSENT = Mark()

Value = Any
"""None, ABSENT, or a number, text, bytes or tuple in the form of this module."""

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[^\s"]+')
_RAW = json.JSONDecoder()
UNCHANGED = '{"_unchanged":true}'
"""What an image has in place of a value that the log does not have, and of a document that is the same."""


def compact(text: str) -> str:
    """Return a JSON text without white space between its tokens."""
    return "".join(_TOKEN.findall(text))


def _lenient(form: Callable[[Kind, Any], Value]) -> Callable[[Kind, Any], Value]:
    """Have a value that is none of its kind differ from all others, whatever stands there."""

    @functools.wraps(form)
    def formed(kind: Kind, value: Any) -> Value:
        try:
            return form(kind, value)
        except (ValueError, KeyError, TypeError, ArithmeticError):
            return ("no value of this kind", repr(value))

    return formed


@_lenient
def from_text(kind: Kind, value: Any) -> Value:
    """Return the form of what a database prints, which is a list of texts for a list."""
    if value is None:
        return None
    if isinstance(value, list):
        element = kind.element or kind
        return tuple(from_text(kind if isinstance(one, list) else element, one) for one in value)
    if kind.name == "list":
        return str(value)
    return _OF_TEXT[kind.name](str(value))


@_lenient
def from_arrow(kind: Kind, value: Any) -> Value:
    """Return the form of a Python value that Arrow makes of a column."""
    if isinstance(value, list):
        return tuple(from_arrow(kind.element or kind, one) for one in value)
    if isinstance(value, str) and kind.name != "text":
        return _OF_TEXT[kind.name](value)
    if isinstance(value, Decimal) and kind.name == "integer":
        return int(value)
    if isinstance(value, float):
        return _number(kind, value)
    return _OF_TIME.get(type(value), lambda other: other)(value)


@_lenient
def from_json(kind: Kind, raw: Any) -> Value:
    """Return the form of a member of an image, given as its JSON text (docs/types.md)."""
    if raw in {None, "null"}:
        return None
    if raw is ABSENT:
        return ABSENT
    if kind.name == "json":
        return raw
    if kind.name == "list":
        assert kind.element is not None
        return tuple(from_json(_inner(kind, one), one) for one in elements(raw))
    if kind.name in {"binary", "geometry"}:
        content = base64.b64decode(json.loads(raw)["_base64"])
        return content[4:] if kind.name == "geometry" else content
    text = cast("str", json.loads(raw)) if raw.startswith('"') else raw
    return _OF_TEXT[kind.name](text)


def members(raw: str) -> Mapping[str, str]:
    """Return the JSON text of each member of an object."""
    return {cast("str", json.loads(name)): value for name, value in _parts(raw)}


def elements(raw: str) -> Sequence[str]:
    """Return the JSON text of each element of an array."""
    return [value for _, value in _parts(raw)]


def _inner(kind: Kind, raw: str) -> Kind:
    assert kind.element is not None
    return kind if raw.startswith("[") and kind.element.name != "json" else kind.element


def _parts(raw: str) -> list[tuple[str, str]]:
    """Return name and value of each part of an object; the names of an array's are empty."""
    found = []
    raw = compact(raw)
    named, place = raw.startswith("{"), 1
    while raw[place] not in "}]":
        name = ""
        if named:
            end = _RAW.raw_decode(raw, place)[1]
            name, place = raw[place:end], end + 1
        end = _RAW.raw_decode(raw, place)[1]
        found.append((name, raw[place:end]))
        place = end + (raw[end] == ",")
    return found


def _number(kind: Kind, value: float) -> Value:
    """Return a float so that NaN equals itself and -0 is not 0."""
    return ("float", (float(np.float32(value)) if kind.name == "float32" else value).hex())


def in_key(value: Value) -> Value:
    """Return a value as keys have it: for databases -0 is the key 0."""
    return ("float", (0.0).hex()) if value == ("float", (-0.0).hex()) else value


def _fraction(text: str) -> str:
    """Return a time or timestamp of UTC with six digits of its fraction and a blank in its middle."""
    text = re.sub(r"(\+00(:?00)?|Z)$", "", text.replace("T", " "))
    whole, _, fraction = text.partition(".")
    return f"{whole}.{fraction:0<6}"


def _moment(value: dt.datetime) -> str:
    local = value if value.tzinfo is None else value.astimezone(dt.UTC).replace(tzinfo=None)
    return local.isoformat(" ", "microseconds")


_OF_TIME: Mapping[type, Callable[[Any], Value]] = {
    dt.datetime: _moment,
    dt.date: dt.date.isoformat,
    dt.time: lambda value: value.isoformat("microseconds"),
}


def _bytes(text: str) -> bytes:
    return bytes.fromhex(text.removeprefix("\\x"))


def _truth(text: str) -> bool:
    return {"t": True, "f": False, "true": True, "false": False, "1": True, "0": False}[text]


def _float32(text: str) -> Value:
    return _number(Kind("float32"), float(np.float32(text)))


_OF_TEXT: Mapping[str, Callable[[str], Value]] = {
    "integer": int,
    "decimal": Decimal,
    "float32": _float32,
    "float64": lambda text: _number(Kind("float64"), float(text)),
    "boolean": _truth,
    "text": str,
    "json": compact,
    "binary": _bytes,
    "geometry": _bytes,
    "uuid": str.lower,
    "date": str,
    "time": _fraction,
    "timestamp": _fraction,
    "timestamptz": _fraction,
}
