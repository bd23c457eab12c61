"""Drift: where rows differ from what their table declares. It is counted, and changes nothing.

========================  ===========================================================
`unexpected_null`         null in a column that must not be null
`type_mismatch`           a value of a type that the column cannot have
`undeclared_column`       a field that is no column
`missing_column`          a column that no row has, of as many as the warm-up
`json_structure_change`   a document unlike those that its column's schema was learned from
`value_out_of_range`      a text longer, or a number larger than declared
========================  ===========================================================
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from deltaforge_dagster.sensing.declared import Declared
from deltaforge_dagster.sensing.groups import KIND_BITS, Flags, Groups
from deltaforge_dagster.sensing.paths import ROOT, child
from deltaforge_dagster.sensing.scan import INTEGER, NULL, OBJECT, STRING, TYPES, Cells
from deltaforge_dagster.sources.characters import MINUS
from deltaforge_dagster.sources.kernel import Longs

Problem = Literal[
    "unexpected_null",
    "type_mismatch",
    "undeclared_column",
    "missing_column",
    "json_structure_change",
    "value_out_of_range",
]

EXAMPLES, EXAMPLE_LENGTH = 5, 100
"""Of a column so many values are kept, and so many characters of each."""

MOST_COLUMNS = 500
"""Drift of so many columns is told apart; that of more counts for the table."""

_DIGITS = 40
"""Whole numbers of more digits are in no range; Python refuses to read very long ones."""

_STAND_INS = ('{"_base64":', '{"_base64_json":', '{"_unchanged":')
"""How objects begin that stand for bytes, or for a value that the log does not have."""


@dataclass(slots=True)
class ColumnDrift:
    """What was wrong with the values of a column.

    Attributes:
        expected: Its type, as declared; empty for what is no column.
        observed: The types that the values had, by name.
        counts: How many there were of each problem.
        last_us: Event time of the latest one of each problem.
        examples: Some of the values.
    """

    expected: str
    observed: list[str] = field(default_factory=list)
    counts: dict[Problem, int] = field(default_factory=dict)
    last_us: dict[Problem, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Drift:
    """What was compared of a table, and what differed.

    Attributes:
        analyzed: How many rows were compared.
        drifted: How many of them differed.
        version: Fingerprint of the table version that rows came with last.
        compared: How many rows were compared with it.
        declared: Its columns and their types.
        present: How many of those rows had each column.
        columns: What differed, by column.
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
        """Compare rows with a table version; say which differ.

        Args:
            cells: The rows' images, one level deep.
            columns: The columns of the version.
            version: Its fingerprint.
            times_us: The event time of each row.
        """
        if version != self.version:
            self._begin(columns, version)
        self.compared += cells.documents
        by_path = {child(ROOT, "." + one.name): one for one in columns}
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
            found = _problem(column, kind, cells, groups, index)
            if found is None:
                continue
            problem, wrong = found
            name = cells.step(int(wrong[0]))[1:] if column is None else column.name
            rows = cells.document[wrong]
            differing[rows] = True
            self.note(
                name,
                problem,
                observed=TYPES[kind],
                count=len(wrong),
                last_us=int(times_us[rows].max()),
                values=lambda wrong=wrong: (cells.text(int(one)) for one in wrong),  # type: ignore[misc]
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
        """Count a problem of a column; `values` yields JSON texts to choose examples from."""
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
        """Return the columns that no row had, once at least so many rows were compared."""
        if self.compared < max(enough, 1):
            return []
        return [name for name in self.declared if name not in self.present]

    def _begin(self, columns: Sequence[Declared], version: str) -> None:
        """Go on with another table version; what was wrong with a column of another type is past."""
        self.version, self.compared, self.present = version, 0, {}
        self.declared = {one.name: one.data_type for one in columns}
        self.columns = {
            name: one
            for name, one in self.columns.items()
            if one.expected == self.declared.get(name, "")
        }

    def state(self) -> dict[str, Any]:
        """Return what `restored` reads, as JSON values."""
        return asdict(self)

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Drift:
        """Return the drift that `state` is of."""
        columns = {name: ColumnDrift(**one) for name, one in state["columns"].items()}
        return cls(**{**state, "columns": columns})


def _problem(
    column: Declared | None, kind: int, cells: Cells, groups: Groups, index: int
) -> tuple[Problem, Longs] | None:
    """Return what is wrong with values of one type of one column, and which of them are."""
    if column is None:
        return "undeclared_column", groups.cells(index)
    if kind == NULL:
        return None if column.nullable else ("unexpected_null", groups.cells(index))
    if kind not in column.kinds:
        wrong = groups.cells(index)
        if kind == OBJECT:
            real = [not cells.text(int(one)).startswith(_STAND_INS) for one in wrong]
            wrong = wrong[np.array(real, np.bool_)]
        return ("type_mismatch", wrong) if len(wrong) else None
    wrong = _out_of_range(column, kind, cells, groups, index)
    return ("value_out_of_range", wrong) if len(wrong) else None


def _out_of_range(column: Declared, kind: int, cells: Cells, groups: Groups, index: int) -> Longs:
    """Return the values that are beyond their column's length or precision.

    Only those that are written longer than what fits can be, and negative ones, need to be looked at.
    """
    limit = _longest_that_fits(column, kind)
    if limit is None:
        return np.zeros(0, np.int64)
    values = groups.cells(index)
    negative = cells.data[cells.start[values]] == MINUS
    suspects = values[(cells.stop[values] - cells.start[values] > limit) | negative]
    wrong = [one for one in suspects.tolist() if not _fits(column, cells.text(one))]
    return np.array(wrong, np.int64)


def _longest_that_fits(column: Declared, kind: int) -> int | None:
    """Return up to how many bytes of JSON values surely fit, unless negative; None when all do."""
    if column.length is not None:
        return column.length + 2 if kind == STRING else None
    if column.greatest is not None:
        return len(str(column.greatest)) - 1 if kind in {INTEGER, STRING} else None
    return column.digits


def _fits(column: Declared, text: str) -> bool:
    """Say whether a value, given as JSON text, is within its column's length or precision."""
    if column.length is not None:
        return len(json.loads(text, strict=False)) <= column.length
    text = text.strip('"')
    if column.greatest is not None and column.least is not None:
        return _in_range(text, column.least, column.greatest)
    return _whole_digits(text) <= (column.digits or 0)


def _in_range(text: str, least: int, greatest: int) -> bool:
    """Say whether a whole number is in range; a text that is none is taken as it is."""
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()):
        return True
    return len(digits) <= _DIGITS and least <= int(text) <= greatest


def _whole_digits(text: str) -> int:
    """Return how many digits a number has before its point; none for what is no plain number."""
    whole = text.removeprefix("-").partition(".")[0]
    return len(whole.lstrip("0")) if whole.isascii() and whole.isdigit() else 0
