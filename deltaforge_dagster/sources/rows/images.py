"""Row images, member by member: what a later image that is not whole makes of an earlier one.

An update's image may lack values: PostgreSQL does not log large ones that the update did not touch,
which leaves `{"_unchanged":true}` or no member, and MySQL leaves columns out with minimal row images. What
stands there is the value before. Values are pieces of text: none is read, and none rewritten.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Sequence

UNCHANGED = '{"_unchanged":true}'
"""In place of a value that the log does not have."""

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]')


def is_partial(image: str, columns: Sequence[str]) -> bool:
    """Say whether an image lacks the value of a column.

    Args:
        image: A JSON object as text.
        columns: Names of the columns that rows of the table have.
    """
    found = members(image)
    return UNCHANGED in found.values() or any(_label(name) not in found for name in columns)


def overlay(image: str, newer: Iterable[str]) -> str:
    """Return what later images of a row make of an earlier one, in their order.

    Columns that only a later image has stand behind the others.
    """
    row = members(image)
    for one in newer:
        row |= {name: value for name, value in members(one).items() if value != UNCHANGED}
    return "{" + ",".join(f"{name}:{value}" for name, value in row.items()) + "}"


def members(image: str) -> dict[str, str]:
    """Return the members of a JSON object as pieces of its text, by their names in quotes."""
    found: dict[str, str] = {}
    name, start, depth = "", 0, 0
    for token in _TOKEN.finditer(image):
        match token[0]:
            case "{" | "[":
                depth += 1
                start = token.end() if depth == 1 else start
            case "}" | "]":
                depth -= 1
                if depth == 0 and name:
                    found[name] = image[start : token.start()].strip()
            case "," if depth == 1:
                found[name] = image[start : token.start()].strip()
                start = token.end()
            case ":" if depth == 1:
                name = image[start : token.start()].strip()
                start = token.end()
    return found


@functools.cache
def _label(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)
