"""Reports of compared tables: what they count, what they show, and the exit code."""

from __future__ import annotations

from deltaforge_dagster.pipeline.reconcile.reports import TableReport, exit_code
from deltaforge_dagster.sinks.tables.comparer import MOST_LISTED, ComparedRows, RowDifference

CHANGED = RowDifference(
    "different", {"id": "1"}, ["a", "b"], {"a": "x", "b": None}, {"a": "y", "b": "z"}
)


def report(*differences: RowDifference, problem: str | None = None) -> TableReport:
    """Return the report of a table of two windows, the first of which was compared."""
    made = TableReport("copy", "public.items", ("public", "items"), windows=2, problem=problem)
    made.add(ComparedRows.counted(10, differences))
    return made


def test_what_is_counted() -> None:
    """Rows are counted by kind, different ones also by column; extra rows may be more than are listed."""
    counted = report(CHANGED, CHANGED, RowDifference("missing", {"id": "2"}))
    counted.add_extra(
        ComparedRows(kinds={"extra": 1000}, listed=[RowDifference("extra", {"id": "3"})])
    )
    found = counted.to_json(values=False)

    assert (found["rows"], found["equal"], found["missing"], found["extra"]) == (10, 7, 1, 1000)
    assert (found["different"], found["columns"]) == (2, {"a": 2, "b": 2})
    assert (found["coverage"], found["extra_searched"], counted.whole) == (0.5, True, False)


def test_values_are_shown_on_request_only() -> None:
    """Only then a report has keys and values, those of the first rows that differ."""
    shown = report(*[CHANGED] * (MOST_LISTED + 1))

    assert "shown" not in shown.to_json(values=False)
    rows = shown.to_json(values=True)["shown"]
    assert len(rows) == MOST_LISTED
    assert rows[0] == {
        "kind": "different",
        "key": {"id": "1"},
        "columns": {"a": {"source": "x", "sink": "y"}, "b": {"source": None, "sink": "z"}},
    }


def test_exit_codes() -> None:
    """A difference outweighs a table that could not be compared."""
    assert exit_code([report()]) == 0
    assert exit_code([report(), report(problem="why")]) == 2
    assert exit_code([report(CHANGED), report(problem="why")]) == 1
