"""Find the values of fields in row images, without parsing the rest of the JSON text.

The kernels `blank`, `string_end` and `value_end` split JSON text wherever a kernel reads it.

The text was written by a source or a processor, so it is assumed to be valid JSON. Of several
fields with the same name, the first counts. Names are compared byte for byte. Python's `json`
handles objects in which the wanted name, or one before it, has an escape, and string values with
escapes.
"""

# ruff: noqa: C901, PLR1714, SIM109 - kernels are flat loops over bytes, see `kernels.runtime`

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from deltaforge_dagster.kernels.message_text import layout, slices
from deltaforge_dagster.kernels.runtime import (
    BACKSLASH,
    CLOSE_BRACE,
    CLOSE_BRACKET,
    COLON,
    COMMA,
    LOWER_N,
    OPEN_BRACE,
    OPEN_BRACKET,
    QUOTE,
    Bytes,
    kernel,
    read_only,
)

_Ints: TypeAlias = npt.NDArray[np.int32]

_MISSING, _FOUND, _ESCAPED = range(3)
_DECODER = json.JSONDecoder(parse_int=str, parse_float=str)
"""Used only to find where values end.

It does not convert numbers, which may have more digits than `int` accepts.
"""


def field_texts(documents: pa.StringArray, path: Sequence[str]) -> pa.StringArray:
    """Return the text of one field of each document; null where the field is null or missing.

    A string is returned without quotes and escapes, any other value as its JSON text.

    Args:
        documents: JSON objects as text; null has no fields.
        path: The names from the outermost to the innermost object, at least one.
    """
    if documents.null_count:
        documents = cast("pa.StringArray", documents.fill_null("null"))
    ends, source = layout(documents)
    starts, stops = ends[:-1].copy(), ends[1:].copy()
    kinds = np.full(len(documents), _FOUND, np.uint8)
    for name in path:
        _find(source, read_only(name.encode()), starts, stops, kinds)
    _unwrap(source, starts, stops, kinds)
    texts = slices(source, starts, stops, kinds == _FOUND)
    escaped = np.flatnonzero(kinds == _ESCAPED)
    if not len(escaped):
        return texts
    values = texts.to_pylist()
    for row in escaped.tolist():
        values[row] = _field_text(documents[row].as_py(), path)
    return pa.array(values, pa.string())


def _field_text(document: str, path: Sequence[str]) -> str | None:
    """Return a field's text, found with Python's JSON scanner, which handles escapes."""
    start, stop = 0, len(document)
    for name in path:
        fields = members(document, start) if document[start] == "{" else iter(())
        wanted = next((field for field in fields if field[0] == name), None)
        if wanted is None:
            return None
        _, _, start, stop = wanted
    if document[start] == '"':
        return cast("str", json.loads(document[start:stop]))
    return None if document.startswith("null", start) else document[start:stop]


def members(document: str, start: int = 0) -> Iterator[tuple[str, int, int, int]]:
    """Yield each member of the object at `start`: name, start, and its value's start and end."""
    at = _token(document, start + 1)
    while document[at] != "}":
        name, end = _DECODER.raw_decode(document, at)
        value = _token(document, _token(document, end) + 1)
        _, end = _DECODER.raw_decode(document, value)
        yield name, at, value, end
        at = _token(document, end)
        if document[at] == ",":
            at = _token(document, at + 1)


def _token(document: str, at: int) -> int:
    """Return where the next token begins."""
    while document[at].isspace():
        at += 1
    return at


@kernel
def blank(byte: int) -> bool:
    """Return whether a byte is JSON white space."""
    return byte == 32 or byte == 10 or byte == 13 or byte == 9


@kernel
def string_end(source: Bytes, at: int, end: int) -> int:
    """Return the position after the string that opens at `at`; `end` if it is not closed."""
    at += 1
    # Advancing by `2 if byte == BACKSLASH else 1` would take three times as long.
    while at < end:
        byte = source[at]
        if byte == BACKSLASH:
            at += 1
        elif byte == QUOTE:
            return at + 1
        at += 1
    return end


@kernel
def value_end(source: Bytes, at: int, end: int) -> int:
    """Return the position after the value at `at`, including all values inside it."""
    depth = 0
    while at < end:
        byte = source[at]
        if byte == QUOTE:
            at = string_end(source, at, end)
            if depth == 0:
                return at
            continue
        if byte == OPEN_BRACE or byte == OPEN_BRACKET:
            depth += 1
        elif byte == CLOSE_BRACE or byte == CLOSE_BRACKET:
            if depth == 0:
                return at
            depth -= 1
            if depth == 0:
                return at + 1
        elif depth == 0 and (byte == COMMA or blank(byte)):
            return at
        at += 1
    return end


@kernel
def _find(source: Bytes, name: Bytes, starts: _Ints, stops: _Ints, kinds: Bytes) -> None:
    """Narrow the bounds of each found object to the value of its field `name`."""
    for row in range(len(starts)):
        if kinds[row] != _FOUND:
            continue
        at, stop = int(starts[row]), int(stops[row])
        kinds[row] = _MISSING
        if at == stop or source[at] != OPEN_BRACE:
            continue
        at += 1
        while at < stop:
            while at < stop and (blank(source[at]) or source[at] == COMMA):
                at += 1
            if at == stop or source[at] != QUOTE:
                break
            end = string_end(source, at, stop)
            same = end - at - 2 == name.size
            for position in range(at + 1, end - 1):
                if source[position] == BACKSLASH:
                    kinds[row] = _ESCAPED
                if same and source[position] != name[position - at - 1]:
                    same = False
            if kinds[row] == _ESCAPED:
                break
            at = end
            while blank(source[at]) or source[at] == COLON:
                at += 1
            end = value_end(source, at, stop)
            if same:
                starts[row], stops[row] = at, end
                kinds[row] = _FOUND
                break
            at = end


@kernel
def _unwrap(source: Bytes, starts: _Ints, stops: _Ints, kinds: Bytes) -> None:
    """Strip the quotes of strings, and mark `null` as missing."""
    for row in range(len(starts)):
        if kinds[row] != _FOUND:
            continue
        if source[starts[row]] == LOWER_N:
            kinds[row] = _MISSING
        elif source[starts[row]] == QUOTE:
            starts[row] += 1
            stops[row] -= 1
            for position in range(starts[row], stops[row]):
                if source[position] == BACKSLASH:
                    kinds[row] = _ESCAPED
                    break
