"""Paths in documents, as numbers and as steps.

A path's number consists of two 30-bit hashes of the steps from the document's root. A step is a
name, any element of an array, or any name of a map. A map is an object whose names are values:
below it, documents with different names have the same paths. Kernels (`scan`) compute the same
numbers from the text.
"""

from __future__ import annotations

import json
from typing import TypeAlias

Step: TypeAlias = str
"""`.name`, or one of the two steps below."""
ELEMENT: Step = "[]"
ANY: Step = "<*>"
Path: TypeAlias = tuple[Step, ...]

# Odd and below 2**30: the product with a 30-bit number fits into 64 bits and never overflows.
FIRST_BASE, SECOND_BASE = 692_137_411, 415_983_283
BITS = 30
MASK = (1 << BITS) - 1
KEY_SYMBOL, ELEMENT_SYMBOL, ANY_SYMBOL = 257, 258, 259
"""Symbols that mark steps; they are outside the range of bytes in names."""


def child(parent: int, step: Step) -> int:
    """Return the number of the path that is one step below `parent`."""
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
"""The number of the path of a document itself."""


def path_number(path: Path) -> int:
    """Return the number of a path given by its steps."""
    number = ROOT
    for step in path:
        number = child(number, step)
    return number
