"""Merge incomplete row images into earlier complete ones.

An update's image may lack values: PostgreSQL does not log unchanged TOAST values, which leaves
`{"_unchanged":true}` or no member, and MySQL leaves out columns with minimal row images. A missing
value is the one of the image before. Values are handled as pieces of JSON text; they are neither
parsed nor rewritten.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Sequence

UNCHANGED = '{"_unchanged":true}'
"""Stands for a value that the log does not contain because the update did not change it."""

_SPACE = " \r\n"
"""White space without the tab, which is part of a value (`json_text.write_null_document`)."""
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]')


def is_partial(image: str, columns: Sequence[str]) -> bool:
    """Return whether an image lacks the value of any column.

    Args:
        image: A JSON object as text.
        columns: Names of the table's columns.
    """
    values = members(image)
    return UNCHANGED in values.values() or any(_quoted(name) not in values for name in columns)


def overlay(image: str, newer: Iterable[str]) -> str:
    """Apply later images of the same row, in order, to an earlier image, and return the result.

    Columns that only a later image has are appended.
    """
    row = members(image)
    for update in newer:
        row |= {name: value for name, value in members(update).items() if value != UNCHANGED}
    return "{" + ",".join(f"{name}:{value}" for name, value in row.items()) + "}"


def members(image: str) -> dict[str, str]:
    """Return the values of a JSON object as text, by their names, which keep their quotes."""
    values: dict[str, str] = {}
    name, start, depth = "", 0, 0
    for token in _TOKEN.finditer(image):
        match token[0]:
            case "{" | "[":
                depth += 1
                start = token.end() if depth == 1 else start
            case "}" | "]":
                depth -= 1
                if depth == 0 and name:
                    values[name] = image[start : token.start()].strip(_SPACE)
            case "," if depth == 1:
                values[name] = image[start : token.start()].strip(_SPACE)
                start = token.end()
            case ":" if depth == 1:
                name = image[start : token.start()].strip()
                start = token.end()
    return values


@functools.cache
def _quoted(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)
