"""Scan JSON documents into arrays with one cell per value, without parsing them.

A cell has the document, path and type of a value, and the location of its text. Sensing then only
needs to sort and count arrays. The text is assumed to be valid JSON.

A path is a number that consists of two 30-bit hashes of the steps from the document's root; the
kernels compute the same numbers from the text as `path_number`. A step is a name, any element of an
array, or any name of a map. A map is an object whose names are values: below it, documents with
different names have the same paths.
"""

# ruff: noqa: C901, PLR0912, PLR0915, PLR0917, PLR1714, SIM109 - kernels are flat loops over bytes,
# see `kernels.runtime`

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from deltaforge_dagster.kernels.json_fields import blank, string_end, value_end
from deltaforge_dagster.kernels.message_text import layout, slices
from deltaforge_dagster.kernels.runtime import (
    BACKSLASH,
    CLOSE_BRACE,
    CLOSE_BRACKET,
    COLON,
    COMMA,
    DOT,
    LOWER_E,
    LOWER_F,
    LOWER_N,
    LOWER_T,
    OPEN_BRACE,
    OPEN_BRACKET,
    QUOTE,
    UPPER_E,
    Bytes,
    Longs,
    kernel,
)

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


TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
NULL, BOOLEAN, INTEGER, NUMBER, STRING, ARRAY, OBJECT = range(len(TYPES))

_Flags: TypeAlias = npt.NDArray[np.bool_]
_Kinds: TypeAlias = npt.NDArray[np.uint8]

_DIGITS = 4_000
"""Longer integers are truncated: by default Python parses at most 4,300 digits."""
NO_KEY = -1
"""The `key_start` of cells without a name: roots and elements of arrays."""


@dataclass(frozen=True, slots=True)
class Cells:
    """The values of documents in document order; arrays of equal length, one entry per cell.

    Attributes:
        documents: The number of documents.
        data: The text to which the offsets below refer.
        document: The index of the cell's document.
        path: The number of its path.
        parent: The path of the enclosing object or array; for a root, its own path.
        type: The index of its type in `TYPES`.
        start: The start of its text.
        stop: The end of its text.
        key_start: The start of its name, without quotes.
        key_stop: The end of its name.
    """

    documents: int
    data: Bytes
    document: Longs
    path: Longs
    parent: Longs
    type: _Kinds
    start: Longs
    stop: Longs
    key_start: Longs
    key_stop: Longs

    def text(self, cell: int) -> str:
        """Return the JSON text of a cell."""
        return self.data[self.start[cell] : self.stop[cell]].tobytes().decode()

    def texts(self, cells: Longs, *, inside: int = 0) -> pa.StringArray:
        """Return the JSON texts of cells, without `inside` bytes at both ends (1 strips quotes)."""
        return slices(self.data, self.start[cells] + inside, self.stop[cells] - inside)

    def names(self, cells: Longs) -> pa.StringArray:
        """Return the names of cells, which must have one, as written in the text."""
        return slices(self.data, self.key_start[cells], self.key_stop[cells])

    def step(self, cell: int) -> Step:
        """Return the last step of the path of a cell that is not a root."""
        parent, path = int(self.parent[cell]), int(self.path[cell])
        if self.key_start[cell] == NO_KEY:
            return ELEMENT
        if path == child(parent, ANY):
            return ANY
        name = self.data[self.key_start[cell] : self.key_stop[cell]].tobytes().decode()
        return "." + unescaped(name)


def unescaped(text: str) -> str:
    """Return the value of a JSON string without its quotes; unchanged if it has lone surrogates."""
    if "\\" not in text:
        return text
    value = cast("str", json.loads(f'"{text}"', strict=False))
    return value if _is_text(value) else text


def _is_text(value: str) -> bool:
    """Return whether a string has no lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def scan(
    documents: pa.StringArray,
    depth: int,
    maps: Collection[int] = (),
    stable: Collection[int] = (),
) -> Cells:
    """Return the values of documents down to a depth.

    Args:
        documents: JSON texts, not null.
        depth: Values at this depth are not inspected further; 1 returns the fields of an object.
        maps: Paths of maps, whose names are values.
        stable: Paths directly below maps that are fields nevertheless.
    """
    cells, escaped = _scanned(documents, depth, maps, stable)
    rows = np.flatnonzero(escaped)
    if not len(rows):
        return cells
    # Names with escapes can be spelled in several ways, so they are normalized.
    texts = cast("list[str]", documents.to_pylist())
    for row in rows.tolist():
        texts[row] = _rewritten(texts[row])
    return _scanned(pa.array(texts, pa.string()), depth, maps, stable)[0]


def warm() -> None:
    """Compile the kernels."""
    cells = scan(pa.array(['{"a":[1]}'], pa.string()), 2)
    cells.texts(np.zeros(1, np.int64))


def _rewritten(document: str) -> str:
    """Return a document with its names in the spelling that `child` uses."""
    try:
        value = json.loads(document, parse_int=_number, parse_float=_number)
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except (ValueError, RecursionError):  # not JSON, or nested too deeply
        return document
    return text if _is_text(text) else document


def _number(text: str) -> int | float:
    """Return a number of the text's type; its value may differ if the text is very long."""
    if not any(mark in text for mark in ".eE"):
        return int(text[:_DIGITS])
    value = float(text)
    return value if math.isfinite(value) else 0.5


def _scanned(
    documents: pa.StringArray, depth: int, maps: Collection[int], stable: Collection[int]
) -> tuple[Cells, _Flags]:
    count = len(documents)
    ends, data = layout(documents)
    bounds = ends.astype(np.int64)
    inner = data[bounds[0] : bounds[-1]]
    openings = np.count_nonzero(inner == OPEN_BRACE) + np.count_nonzero(inner == OPEN_BRACKET)
    room = count + int(openings) + int(np.count_nonzero(inner == COMMA))
    document, path, parent = (np.empty(room, np.int64) for _ in range(3))
    start, stop, key_start, key_stop = (np.empty(room, np.int64) for _ in range(4))
    kinds = np.empty(room, np.uint8)
    escaped = np.zeros(count, np.bool_)
    cell_count = _scan(
        data, bounds, depth, _longs(maps), _longs(stable),
        document, path, parent, kinds, start, stop, key_start, key_stop, escaped,
        np.empty(depth + 1, np.int64), np.empty(depth + 1, np.int64),
    )  # fmt: skip
    cells = Cells(
        count, data,
        document[:cell_count], path[:cell_count], parent[:cell_count], kinds[:cell_count],
        start[:cell_count], stop[:cell_count], key_start[:cell_count], key_stop[:cell_count],
    )  # fmt: skip
    return cells, escaped


def _longs(numbers: Collection[int] | Sequence[int]) -> Longs:
    return np.array(sorted(numbers), np.int64)


@kernel
def _blanks(source: Bytes, at: int, end: int) -> int:
    """Return the start of the next token."""
    while at < end and blank(source[at]):
        at += 1
    return at


@kernel
def _kind(source: Bytes, at: int) -> int:
    """Return the type of the value that starts at `at`; INTEGER for every number."""
    byte = source[at]
    if byte == QUOTE:
        return STRING
    if byte == OPEN_BRACE:
        return OBJECT
    if byte == OPEN_BRACKET:
        return ARRAY
    if byte == LOWER_N:
        return NULL
    if byte == LOWER_T or byte == LOWER_F:
        return BOOLEAN
    return INTEGER


@kernel
def _fraction(source: Bytes, at: int, stop: int) -> bool:
    """Return whether a number is written with a fraction or an exponent."""
    for index in range(at, stop):
        byte = source[index]
        if byte == DOT or byte == LOWER_E or byte == UPPER_E:
            return True
    return False


@kernel
def _hashed(path: int, symbol: int) -> int:
    """Return a path's number with one more symbol added."""
    first = ((path >> BITS) * FIRST_BASE + symbol) & MASK
    second = ((path & MASK) * SECOND_BASE + symbol) & MASK
    return first << BITS | second


@kernel
def _among(numbers: Longs, wanted: int) -> bool:
    """Return whether `numbers`, which are sorted, contain a number."""
    low, high = 0, len(numbers)
    while low < high:
        middle = (low + high) >> 1
        if numbers[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low < len(numbers) and numbers[low] == wanted


@kernel
def _scan(
    source: Bytes,
    bounds: Longs,
    depth_limit: int,
    maps: Longs,
    stable: Longs,
    document: Longs,
    path: Longs,
    parent: Longs,
    kinds: Bytes,
    start: Longs,
    stop: Longs,
    key_start: Longs,
    key_stop: Longs,
    escaped: _Flags,
    open_paths: Longs,
    open_cells: Longs,
) -> int:
    """Write the cells of all documents; return their number."""
    count = 0
    room = len(document)
    for row in range(len(bounds) - 1):
        at, end = int(bounds[row]), int(bounds[row + 1])
        depth = 0
        current, enclosing = ROOT, ROOT
        name_start, name_stop = NO_KEY, NO_KEY
        while True:
            at = _blanks(source, at, end)
            if at >= end or count >= room:
                break
            kind = _kind(source, at)
            cell = count
            count += 1
            document[cell], path[cell], parent[cell] = row, current, enclosing
            start[cell], key_start[cell], key_stop[cell] = at, name_start, name_stop
            if (kind == OBJECT or kind == ARRAY) and depth < depth_limit:
                open_paths[depth], open_cells[depth] = current, cell
                depth += 1
                at += 1
                stop[cell] = end
            else:
                after = value_end(source, at, end)
                if kind == INTEGER and _fraction(source, at, after):
                    kind = NUMBER
                stop[cell] = after
                at = after
            kinds[cell] = kind
            while depth > 0:  # skip a comma, and close the values that end here
                at = _blanks(source, at, end)
                if at >= end:
                    depth = 0
                elif source[at] == CLOSE_BRACE or source[at] == CLOSE_BRACKET:
                    at += 1
                    depth -= 1
                    stop[open_cells[depth]] = at
                elif source[at] == COMMA:
                    at += 1
                else:
                    break
            if depth == 0:
                break
            enclosing = int(open_paths[depth - 1])
            if kinds[open_cells[depth - 1]] == ARRAY:
                current = _hashed(enclosing, ELEMENT_SYMBOL)
                name_start, name_stop = NO_KEY, NO_KEY
                continue
            after = string_end(source, at, end)
            name_start, name_stop = at + 1, after - 1
            current = _hashed(enclosing, KEY_SYMBOL)
            for index in range(name_start, name_stop):
                if source[index] == BACKSLASH:
                    escaped[row] = True
                current = _hashed(current, int(source[index]))
            if _among(maps, enclosing) and not _among(stable, current):
                current = _hashed(enclosing, ANY_SYMBOL)
            at = _blanks(source, after, end)
            if at < end and source[at] == COLON:
                at += 1
    return count
