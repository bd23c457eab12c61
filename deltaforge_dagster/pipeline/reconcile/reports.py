"""The result of comparing tables of sinks with the source."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deltaforge_dagster.sinks.tables.comparer import MOST_LISTED, ComparedRows, RowDifference


@dataclass(slots=True)
class TableReport:
    """The result of comparing one table of a sink.

    Attributes:
        sink: The sink.
        table: Full name of the source's table.
        destination: Name of the sink's table, outermost part first.
        rows: Number of the source's rows that were compared.
        missing: Rows that only the source has.
        extra: Rows that only the sink has.
        different: Rows of which columns differ.
        duplicate: Keys that the sink has several times.
        columns: For each column that differs, in how many rows.
        position: The position of the source up to which the sink had everything that was compared,
            JSON text; None if nothing was compared.
        windows: How many windows the table was divided into.
        compared: How many of them were compared.
        searched: Whether rows that only the sink has were searched for in the whole table.
        shown: The first rows that differ.
        problem: Why the table could not be compared, or not to its end; None if it was.
    """

    sink: str
    table: str
    destination: Sequence[str]
    rows: int = 0
    missing: int = 0
    extra: int = 0
    different: int = 0
    duplicate: int = 0
    columns: dict[str, int] = field(default_factory=dict)
    position: str | None = None
    windows: int = 0
    compared: int = 0
    searched: bool = False
    shown: list[RowDifference] = field(default_factory=list)
    problem: str | None = None

    @property
    def differs(self) -> bool:
        """Whether any row differs."""
        return bool(self.missing or self.extra or self.different or self.duplicate)

    @property
    def whole(self) -> bool:
        """Whether all of the table was compared."""
        return self.problem is None and self.searched and self.compared == self.windows

    @property
    def coverage(self) -> float:
        """Which part of the table was compared, from 0 to 1."""
        return self.compared / self.windows if self.windows else 0.0

    @property
    def verdict(self) -> str:
        """What people read about what was compared: `equal`, or what differs."""
        if not self.differs:
            return "equal"
        kinds = ("missing", "extra", "different", "duplicate")
        counts = [(kind, getattr(self, kind)) for kind in kinds]
        return "DIFFERS: " + ", ".join(f"{count:,} {kind}" for kind, count in counts if count)

    def add(self, window: ComparedRows) -> None:
        """Add the rows of a window."""
        self.rows += window.rows
        self.compared += 1
        self._count(window)

    def add_extra(self, extra: ComparedRows) -> None:
        """Add the rows that no window had."""
        self.searched = True
        self._count(extra)

    def _count(self, compared: ComparedRows) -> None:
        for kind, rows in compared.kinds.items():
            setattr(self, kind, getattr(self, kind) + rows)
        for column, rows in compared.columns.items():
            self.columns[column] = self.columns.get(column, 0) + rows
        self.shown += compared.listed[: MOST_LISTED - len(self.shown)]

    def to_json(self, *, values: bool) -> dict[str, Any]:
        """Return the report as JSON values; with `values`, also keys and values of rows."""
        equal = self.rows - self.missing - self.different - self.duplicate
        shown = [_shown(difference) for difference in self.shown] if values else None
        return {
            "sink": self.sink,
            "table": self.table,
            "destination": list(self.destination),
            "rows": self.rows,
            "equal": max(0, equal),
            "missing": self.missing,
            "extra": self.extra,
            "different": self.different,
            "duplicate": self.duplicate,
            "columns": self.columns,
            "position": None if self.position is None else json.loads(self.position),
            "coverage": round(self.coverage, 6),
            "extra_searched": self.searched,
            "problem": self.problem,
            **({} if shown is None else {"shown": shown}),
        }


def _shown(difference: RowDifference) -> Mapping[str, Any]:
    columns = {
        name: {"source": difference.source[name], "sink": difference.sink[name]}
        for name in difference.columns
    }
    return {"kind": difference.kind, "key": dict(difference.key), "columns": columns}


def exit_code(reports: Sequence[TableReport]) -> int:
    """Return 1 if anything differs, otherwise 2 if a table could not be compared, otherwise 0."""
    if any(report.differs for report in reports):
        return 1
    return 2 if any(report.problem for report in reports) else 0
