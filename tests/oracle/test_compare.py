"""The comparison sees each way in which a sink can differ, and nothing where it does not."""

from __future__ import annotations

import pytest

from tests.oracle.compare import Comparison, Images
from tests.oracle.databases import TableState
from tests.oracle.kinds import ABSENT, Kind, from_arrow
from tests.oracle.known import Excuses
from tests.oracle.sinks import Event, Fields, Readings

INTEGER, JSON, TEXT = Kind("integer"), Kind("json"), Kind("text")
KINDS = {"id": INTEGER, "rev": INTEGER, "name": TEXT}
ROWS = ({"id": 1, "rev": 1, "name": "a"}, {"id": 2, "rev": 2, "name": None})
EXACT = Excuses(whole_images=True, toast=True)


def comparison(*rows: Fields, excuses: Excuses = EXACT, reader: str = "sink") -> Comparison:
    """Return one of a table with these rows."""
    return Comparison(reader, 0, TableState(KINDS, ("id",), rows or ROWS), excuses)


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        ([*ROWS], []),
        ([{**row, "df_position": 7} for row in ROWS], []),
        ([ROWS[0]], ["missing row"]),
        ([*ROWS, {**ROWS[0], "id": 3}], ["further row"]),
        ([*ROWS, ROWS[0]], ["further row"]),
        ([{**ROWS[0], "name": "b"}, ROWS[1]], ["value"]),
        ([{**ROWS[0], "name": None}, ROWS[1]], ["value"]),
        ([ROWS[0], {**ROWS[1], "name": "null"}], ["value"]),
        ([{"id": 1, "rev": 1}, {"id": 2, "rev": 2}], ["value"]),
        ([{**ROWS[0], "rev": 0, "name": "b"}, ROWS[1]], ["stale row"]),
    ],
)
def test_current_rows(rows: list[Fields], what: list[str]) -> None:
    """Each difference is one, and further columns of the sink are none."""
    found = comparison().of_rows(Readings(from_arrow, rows))
    assert [one.what for one in found] == what


def images(*states: list[Fields]) -> Images:
    """Return what is left after transactions that leave these rows."""
    observed = Images()
    for rows in states:
        observed.observe(TableState(KINDS, ("id",), rows))
    return observed


CREATED = Event("c", None, {"id": 1, "rev": 1, "name": "a"})
MOVED = {"id": 2, "rev": 2, "name": "a"}


@pytest.mark.parametrize(
    ("events", "what"),
    [
        ([CREATED, Event("u", {"id": 1}, MOVED)], []),
        ([CREATED, Event("d", {"id": 1}, None), Event("c", None, MOVED)], []),
        ([CREATED, Event("u", {"id": 1}, {**MOVED, "name": ABSENT})], []),
        ([CREATED, Event("u", {"id": 1}, {"id": 2, "rev": 2})], []),
        ([CREATED, Event("t", None, None), Event("c", None, MOVED)], []),
        ([Event("r", None, MOVED)], []),
        ([CREATED, Event("u", None, MOVED)], ["further row"]),
        ([Event("u", {"id": 1}, MOVED), CREATED], ["further row"]),
        ([CREATED], ["missing row", "further row"]),
        ([Event("c", None, {**MOVED, "name": "b"})], ["value"]),
    ],
)
def test_rows_that_changes_leave(events: list[Event], what: list[str]) -> None:
    """An update may change the key, and may lack what it has not changed."""
    readings = Readings(from_arrow, events=events)
    left = images([{"id": 1, "rev": 1, "name": "a"}], [MOVED])
    found = comparison(MOVED).of_changes(readings, left, frozenset())
    assert [one.what for one in found] == what


def test_an_image_is_that_of_the_last_change() -> None:
    """What a definition does to rows later is in no message."""
    observed = images([MOVED])
    observed.observe(TableState({**KINDS, "more": INTEGER}, ("id",), [{**MOVED, "more": 3}]))
    assert observed.images[2,].row == MOVED
    changed = {**MOVED, "rev": 3, "more": 3}
    observed.observe(TableState({**KINDS, "more": INTEGER}, ("id",), [changed]))
    assert observed.images[2,].row == changed


def test_what_documentation_allows() -> None:
    """Only that: null in place of a large value in a changelog, of the document null in messages."""
    partial = Excuses(whole_images=False, toast=False)
    large = "x" * 9000
    assert EXACT.allow("postgres-changelog", TEXT, large, None)
    assert not EXACT.allow("postgres-changelog", TEXT, "x", None)
    assert not EXACT.allow("postgres-current", TEXT, large, None)
    assert partial.allow("postgres-changelog", TEXT, "x", None)
    assert EXACT.allow("messages", JSON, "null", None)
    assert EXACT.allow("messages", Kind("list", JSON), ("null", None), (None, None))
    assert not EXACT.allow("parquet", JSON, "null", None)
    assert not EXACT.allow("messages", TEXT, "null", None)
