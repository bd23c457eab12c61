"""Which commits a table has: by the stamps in its history, or by the copy of the last one."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from deltaforge_dagster.pipeline.lake.recorded_commits import CommitCopy, last_commit
from deltaforge_dagster.sinks.lake.dialect import COMMITTED
from deltaforge_dagster.sinks.tables.writer import TableOwner

OWNER = TableOwner("uid", "shop", "lake")


class Snapshot(NamedTuple):
    """A row about a snapshot."""

    id: int
    parent: int | None
    at: int
    owner: str | None = None
    version: str | None = None


FIRST = Snapshot(1, None, 10, OWNER.name, "4")
OTHER = Snapshot(2, 1, 20, "other/lake", "9")
SECOND = Snapshot(3, 2, 30, OWNER.name, "6")
REWRITTEN = Snapshot(4, 3, 40)
BESIDE = Snapshot(5, 1, 50, OWNER.name, "8")
COPY = CommitCopy(OWNER.name, 6, 4, 40)


@pytest.mark.parametrize(
    ("left", "head", "copy", "known"),
    [
        ([], None, None, None),
        ([FIRST, OTHER, SECOND, REWRITTEN, BESIDE], 4, None, 6),
        ([FIRST, OTHER, SECOND, REWRITTEN, BESIDE], 2, None, 4),
        ([OTHER], 2, None, None),
        ([REWRITTEN], 4, None, None),
        ([REWRITTEN], 4, COPY, 6),
        ([Snapshot(6, 4, 60)], 6, COPY, 6),
        ([Snapshot(6, 4, 60, OWNER.name, "7")], 6, COPY, 7),
        ([REWRITTEN], 4, CommitCopy("other/lake", 6, 4, 40), None),
        # Put back to before the copy was made, and written to again since.
        ([FIRST, OTHER, SECOND, REWRITTEN], 2, COPY, 4),
        ([OTHER, Snapshot(6, 2, 60)], 6, COPY, None),
        ([], None, COPY, None),
    ],
)
def test_last_commit(
    left: list[Any], head: int | None, copy: CommitCopy | None, known: int | None
) -> None:
    """The newest of both counts; a copy only if its snapshot is, or was, in the history."""
    properties = {} if copy is None else {COMMITTED: copy.to_json()}
    assert last_commit(left, head, properties, OWNER.name) == known


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"writer": "w"}'])
def test_what_is_no_copy(text: str) -> None:
    """A property that others have written says nothing."""
    assert CommitCopy.of({COMMITTED: text}) is None
