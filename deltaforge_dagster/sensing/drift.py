"""Drift: differences between rows and the declared columns of their table. It is only counted.

========================  ===========================================================
`unexpected_null`         null in a column that is declared not null
`type_mismatch`           a value of a type that the column cannot have
`undeclared_column`       a field that is not a column of the table
`missing_column`          a column that none of at least `warmup_events` rows has
`json_structure_change`   a document with a structure that its column's schema does not have
`value_out_of_range`      a text that is longer, or a number that is larger, than declared
========================  ===========================================================

The JSON values that a column may have are derived from the type that its table declares
(`declared`). Types are named as in the registered table versions: by PostgreSQL's `format_type`, or
from the binary log. Types that are not listed here are not compared, because enumerations, dates or
geometries can have several forms.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from deltaforge_dagster.kernels.runtime import MINUS, Longs
from deltaforge_dagster.sensing.groups import KIND_BITS, Flags, Groups
from deltaforge_dagster.sensing.scan import (
    ARRAY,
    BOOLEAN,
    INTEGER,
    NULL,
    NUMBER,
    OBJECT,
    ROOT,
    STRING,
    TYPES,
    Cells,
    child,
)

Problem = Literal[
    "unexpected_null",
    "type_mismatch",
    "undeclared_column",
    "missing_column",
    "json_structure_change",
    "value_out_of_range",
]

EXAMPLES, EXAMPLE_LENGTH = 5, 100
"""How many examples are kept for a column, and how many characters of each."""
MOST_COLUMNS = 500
"""How many columns are reported separately; drift of further columns counts only for the table."""
_DIGITS = 40
"""Integers with more digits are out of every range; Python refuses to parse very long ones."""
_STAND_INS = ('{"_base64":', '{"_base64_json":', '{"_unchanged":')
"""The beginnings of objects that represent bytes, or a value that the log does not have."""


@dataclass(slots=True)
class ColumnDrift:
    """The drift of one column.

    Attributes:
        expected: The declared type; empty for a field that is not a column.
        observed: The names of the JSON types of the drifting values.
        counts: Number of values by problem.
        last_us: Event time of the latest value by problem.
        examples: Some of the values.
    """

    expected: str
    observed: list[str] = field(default_factory=list)
    counts: dict[Problem, int] = field(default_factory=dict)
    last_us: dict[Problem, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Drift:
    """The drift of one table.

    Attributes:
        analyzed: How many rows were compared.
        drifted: How many of them differed.
        version: Fingerprint of the table version of the latest rows.
        compared: How many rows were compared with that version.
        declared: The types of that version's columns, by name.
        present: How many of those rows had each column.
        columns: The drift of each column that has any.
    """

    analyzed: int = 0
    drifted: int = 0
    version: str = ""
    compared: int = 0
    declared: dict[str, str] = field(default_factory=dict)
    present: dict[str, int] = field(default_factory=dict)
    columns: dict[str, ColumnDrift] = field(default_factory=dict)

    def compare(
        self, cells: Cells, columns: Sequence[Declared], version: str, times_us: Longs
    ) -> Flags:
        """Compare rows with a table version; return a mask of the rows that differ.

        Args:
            cells: The rows' images, one level deep.
            columns: The columns of the version.
            version: Its fingerprint.
            times_us: The event time of each row.
        """
        if version != self.version:
            self._begin(columns, version)
        self.compared += cells.documents
        by_path = {child(ROOT, "." + expected.name): expected for expected in columns}
        differing = np.zeros(cells.documents, np.bool_)
        groups = Groups(cells)
        for index, pair in enumerate(groups.pairs.tolist()):
            path, kind = pair >> KIND_BITS, pair & ((1 << KIND_BITS) - 1)
            if path == ROOT:
                continue
            column = by_path.get(path)
            if column is not None:
                self.present[column.name] = self.present.get(column.name, 0) + int(
                    groups.counts[index]
                )
            finding = _problem(column, kind, cells, groups, index)
            if finding is None:
                continue
            problem, wrong = finding
            name = cells.step(int(wrong[0]))[1:] if column is None else column.name
            rows = cells.document[wrong]
            differing[rows] = True
            self.note(
                name,
                problem,
                observed=TYPES[kind],
                count=len(wrong),
                last_us=int(times_us[rows].max()),
                values=lambda wrong=wrong: (  # type: ignore[misc]
                    cells.text(int(cell)) for cell in wrong
                ),
            )
        return differing

    def note(
        self,
        name: str,
        problem: Problem,
        *,
        observed: str,
        count: int,
        last_us: int,
        values: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        """Record a problem of a column; `values` returns JSON texts to choose examples from."""
        if name not in self.columns:
            if len(self.columns) >= MOST_COLUMNS:
                return
            self.columns[name] = ColumnDrift(self.declared.get(name, ""))
        column = self.columns[name]
        column.counts[problem] = column.counts.get(problem, 0) + count
        column.last_us[problem] = max(column.last_us.get(problem, 0), last_us)
        if observed not in column.observed:
            column.observed.append(observed)
        if observed != "null" and len(column.examples) < EXAMPLES:
            for text in values():
                value = json.loads(text) if text[0] == '"' else text
                short = value[:EXAMPLE_LENGTH]
                if short not in column.examples:
                    column.examples.append(short)
                if len(column.examples) == EXAMPLES:
                    break

    def missing(self, enough: int) -> list[str]:
        """Return the columns that no row had, if at least `enough` rows were compared."""
        if self.compared < max(enough, 1):
            return []
        return [name for name in self.declared if name not in self.present]

    def _begin(self, columns: Sequence[Declared], version: str) -> None:
        """Continue with another table version; discard the drift of columns whose type differs."""
        self.version, self.compared, self.present = version, 0, {}
        self.declared = {column.name: column.data_type for column in columns}
        self.columns = {
            name: drift
            for name, drift in self.columns.items()
            if drift.expected == self.declared.get(name, "")
        }

    def state(self) -> dict[str, Any]:
        """Return the state for `restored`, as JSON values."""
        return asdict(self)

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Drift:
        """Return the drift with a state that `state` returned."""
        columns = {name: ColumnDrift(**drift) for name, drift in state["columns"].items()}
        return cls(**{**state, "columns": columns})


ANYTHING = frozenset({BOOLEAN, INTEGER, NUMBER, STRING, ARRAY, OBJECT})

DOCUMENTS = frozenset(
    {
        "json", "jsonb", "variant", "object", "map", "text", "tinytext", "mediumtext", "longtext",
        "clob", "nclob",
    }
)  # fmt: skip
"""Types of columns that may contain JSON documents, as documents or as text."""

_BOOLEANS = frozenset({"bool", "boolean", "bit", "bit varying"})
_RANGES: Mapping[str, int] = {
    "tinyint": 8,
    "smallint": 16,
    "mediumint": 24,
    "int": 32,
    "integer": 32,
    "bigint": 64,
}
"""Integer types, and their size in bits."""
_NUMBERS = frozenset(
    {"numeric", "decimal", "float", "double", "real", "double precision", "year", "oid", "money"}
)
_TEXTS = frozenset(
    {
        "text",
        "tinytext",
        "mediumtext",
        "longtext",
        "varchar",
        "char",
        "character",
        "character varying",
        "uuid",
    }
)
_TYPE = re.compile(
    r"(?P<name>[a-z][a-z ]*?)(?:\((?P<size>\d+)(?:,(?P<scale>-?\d+))?\))?(?P<unsigned> unsigned)?"
)
_WITH_LENGTH = frozenset({"varchar", "char", "character", "character varying"})


@dataclass(frozen=True, slots=True)
class Declared:
    """The values that a column may have.

    Attributes:
        name: The column's name.
        data_type: Its declared type.
        nullable: Whether it may be null.
        kinds: The types of JSON values that it may have, apart from null.
        document: Whether it may contain JSON documents.
        length: Maximum number of characters of a string; None if unlimited.
        least: Smallest integer; None if unlimited.
        greatest: Largest integer; None if unlimited.
        digits: Maximum number of digits before the decimal point; None if unlimited.
    """

    name: str
    data_type: str
    nullable: bool
    kinds: frozenset[int]
    document: bool = False
    length: int | None = None
    least: int | None = None
    greatest: int | None = None
    digits: int | None = None


@lru_cache(maxsize=10_000)
def declared(name: str, data_type: str, *, nullable: bool) -> Declared:
    """Return the values that a column of the given type may have."""
    column = Declared(name, data_type, nullable, ANYTHING)
    match = _TYPE.fullmatch(data_type.lower())
    if match is None:
        return column
    kind, size = match["name"], match["size"]
    column = replace(column, document=kind in DOCUMENTS)
    if kind in _TEXTS:
        length = int(size) if size and kind in _WITH_LENGTH else None
        column = replace(column, kinds=frozenset({STRING}), length=length)
    elif kind in _BOOLEANS:
        column = replace(column, kinds=frozenset({BOOLEAN, INTEGER, STRING}))
    elif kind in _RANGES:
        bits = _RANGES[kind]
        least, greatest = -(1 << bits - 1), (1 << bits - 1) - 1
        if match["unsigned"]:
            least, greatest = 0, (1 << bits) - 1
        kinds = frozenset({INTEGER, STRING} | ({BOOLEAN} if kind == "tinyint" else set()))
        column = replace(column, kinds=kinds, least=least, greatest=greatest)
    elif kind in _NUMBERS:
        exact = kind in {"numeric", "decimal"} and size
        digits = int(size) - int(match["scale"] or 0) if exact else None
        column = replace(column, kinds=frozenset({INTEGER, NUMBER, STRING}), digits=digits)
    return column


def _problem(
    column: Declared | None, kind: int, cells: Cells, groups: Groups, index: int
) -> tuple[Problem, Longs] | None:
    """Return the problem of a column's values of one type, and the cells that have it, or None."""
    if column is None:
        return "undeclared_column", groups.cells(index)
    if kind == NULL:
        return None if column.nullable else ("unexpected_null", groups.cells(index))
    if kind not in column.kinds:
        wrong = groups.cells(index)
        if kind == OBJECT:
            real = [not cells.text(int(cell)).startswith(_STAND_INS) for cell in wrong]
            wrong = wrong[np.array(real, np.bool_)]
        return ("type_mismatch", wrong) if len(wrong) else None
    wrong = _out_of_range(column, kind, cells, groups, index)
    return ("value_out_of_range", wrong) if len(wrong) else None


def _out_of_range(column: Declared, kind: int, cells: Cells, groups: Groups, index: int) -> Longs:
    """Return the values that exceed their column's length or range.

    Only negative values, and values whose text is longer than any text that surely fits, need to be
    checked.
    """
    limit = _longest_that_fits(column, kind)
    if limit is None:
        return np.zeros(0, np.int64)
    values = groups.cells(index)
    negative = cells.data[cells.start[values]] == MINUS
    suspects = values[(cells.stop[values] - cells.start[values] > limit) | negative]
    wrong = [cell for cell in suspects.tolist() if not _fits(column, cells.text(cell))]
    return np.array(wrong, np.int64)


def _longest_that_fits(column: Declared, kind: int) -> int | None:
    """Return the length of JSON text up to which non-negative values surely fit; None if all do."""
    if column.length is not None:
        return column.length + 2 if kind == STRING else None
    if column.greatest is not None:
        return len(str(column.greatest)) - 1 if kind in {INTEGER, STRING} else None
    return column.digits


def _fits(column: Declared, text: str) -> bool:
    """Return whether a value, given as JSON text, is within its column's length or range."""
    if column.length is not None:
        return len(json.loads(text, strict=False)) <= column.length
    text = text.strip('"')
    if column.greatest is not None and column.least is not None:
        return _in_range(text, column.least, column.greatest)
    return _whole_digits(text) <= (column.digits or 0)


def _in_range(text: str, least: int, greatest: int) -> bool:
    """Return whether an integer is in range; true for text that is not an integer."""
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()):
        return True
    return len(digits) <= _DIGITS and least <= int(text) <= greatest


def _whole_digits(text: str) -> int:
    """Return the number of digits before the decimal point; 0 for text that is no plain number."""
    whole = text.removeprefix("-").partition(".")[0]
    return len(whole.lstrip("0")) if whole.isascii() and whole.isdigit() else 0
