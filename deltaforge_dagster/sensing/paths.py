"""Paths in documents as numbers, and as steps.

A path is a hash of the steps from the document's root inwards, two of 30 bits each side by side. A
step is a name, any element of an array, or any name of a map, an object whose names are values: below it
documents with different names have the same paths. Kernels (`scan`) make the same numbers of bytes.
"""

from __future__ import annotations

import json
from typing import TypeAlias

Step: TypeAlias = str
"""`.name`, or one of the two steps below."""
ELEMENT: Step = "[]"
ANY: Step = "<*>"
Path: TypeAlias = tuple[Step, ...]

# Odd and below 2**30: a product with 30 bits fits 64 bits, so that it never overflows.
FIRST_BASE, SECOND_BASE = 692_137_411, 415_983_283
BITS = 30
MASK = (1 << BITS) - 1
KEY_SYMBOL, ELEMENT_SYMBOL, ANY_SYMBOL = 257, 258, 259
"""Symbols between steps, which no byte of a name is."""


def child(parent: int, step: Step) -> int:
    """Return the path of a value inside the value at `parent`."""
    if step in {ELEMENT, ANY}:
        symbols = [ELEMENT_SYMBOL if step == ELEMENT else ANY_SYMBOL]
    else:
        symbols = [KEY_SYMBOL, *json.dumps(step[1:], ensure_ascii=False)[1:-1].encode()]
    first, second = parent >> BITS, parent & MASK
    for symbol in symbols:
        first = (first * FIRST_BASE + symbol) & MASK
        second = (second * SECOND_BASE + symbol) & MASK
    return first << BITS | second


ROOT = (1 << BITS) | 1
"""The path of a document itself."""


def path_number(path: Path) -> int:
    """Return the number of a path given by its steps."""
    number = ROOT
    for step in path:
        number = child(number, step)
    return number
