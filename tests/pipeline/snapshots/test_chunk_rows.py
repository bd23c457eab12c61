"""Which rows of a chunk are left, for any history of the table."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltaforge_dagster.frame import CAPTURED
from deltaforge_dagster.pipeline.snapshots.chunk_rows import COLUMNS, deduplicated
from tests.chance import examples
from tests.journal.changes import batch, change

NAMES = ["id", "v", "big"]
UNCHANGED = {"_unchanged": True}

Image = dict[str, Any]


def text(image: Image | None) -> str | None:
    """Return an image as captured."""
    return None if image is None else json.dumps(image, separators=(",", ":"))


def chunk(*images: Image) -> pa.RecordBatch:
    """Return rows as a snapshot reads them."""
    return batch(
        [
            change(n, op="r", before=None, after=text(one), key=text({"id": one["id"]}))
            for n, one in enumerate(images)
        ]
    )


def captured(
    op: str, after: Image | None = None, *, key: int | None = None, before: Image | None = None
) -> dict[str, object]:
    """Return a change; its key is that of its newer image unless it is given."""
    number = after["id"] if after is not None else key
    return change(
        1,
        op=op,
        before=text(before),
        after=text(after),
        key=text({"id": number}) if number else None,
    )


def left(rows: pa.RecordBatch, *changes: dict[str, object], cut: int | None = None) -> list[Image]:
    """Return the rows that are left after changes, which come in two batches."""
    batches = [batch(list(some)).select(COLUMNS) for some in (changes[:cut], changes[cut or 0 :])]
    found = deduplicated(rows, NAMES, batches if cut is not None else batches[1:])
    assert found.schema.equals(CAPTURED)
    images = [json.loads(str(one)) for one in found.column("after").to_pylist()]
    assert [json.loads(str(one)) for one in found.column("key").to_pylist()] == [
        {"id": one["id"]} for one in images
    ]
    return images


ROW, OTHER = {"id": 1, "v": 1, "big": "x"}, {"id": 2, "v": 1, "big": "y"}


@pytest.mark.parametrize(
    "changes",
    [
        [captured("u", {"id": 1, "v": 2, "big": "x"})],
        [captured("d", key=1)],
        [captured("d", key=1), captured("c", ROW)],
        [captured("u", {"id": 9, "v": 2, "big": "x"}, before={"id": 1})],
    ],
    ids=["updated", "deleted", "recreated", "moved"],
)
def test_what_changed_since_is_left_out(changes: list[dict[str, object]]) -> None:
    """The stream has the row as it became; other rows stay."""
    assert left(chunk(ROW, OTHER), *changes) == [OTHER]


def test_a_truncate_leaves_nothing() -> None:
    """Of any row."""
    assert left(chunk(ROW, OTHER), captured("t")) == []


def test_rows_that_were_not_there_matter_not() -> None:
    """Inserts and deletes of keys that the chunk has not."""
    assert left(chunk(ROW), captured("c", OTHER), captured("d", key=7)) == [ROW]


def test_nobody_else_has_what_an_update_leaves_out() -> None:
    """Then the row stays, with what is newer; unless it is deleted after all."""
    update = captured("u", {"id": 1, "v": 2, "big": UNCHANGED})
    again = captured("u", {"id": 1, "v": 3})

    assert left(chunk(ROW, OTHER), update) == [{"id": 1, "v": 2, "big": "x"}, OTHER]
    assert left(chunk(ROW), update, again, cut=1) == [{"id": 1, "v": 3, "big": "x"}]
    assert left(chunk(ROW), update, captured("d", key=1)) == []


def test_a_key_that_a_row_has_left_is_anothers() -> None:
    """What is made under it later says nothing of the row that has moved."""
    moved = captured("u", {"id": 9, "v": 2, "big": UNCHANGED}, before={"id": 1})
    back = captured("u", {"id": 1, "v": 3, "big": UNCHANGED}, before={"id": 9})
    there = {"id": 9, "v": 2, "big": "x"}

    assert left(chunk(ROW), moved, captured("c", ROW)) == [there]
    assert left(chunk(ROW), moved, captured("c", ROW), captured("d", key=1)) == [there]
    assert left(chunk(ROW), moved, captured("d", key=9)) == []
    assert left(chunk(ROW), moved, back) == [{"id": 1, "v": 3, "big": "x"}]
    assert left(chunk(ROW), moved, back, captured("d", key=1)) == []


@dataclass
class Table:
    """A table whose updates now and then leave out what did not change."""

    rows: dict[int, Image]
    sink: dict[int, Image] = field(default_factory=dict)
    """What somebody has who applies every change, without ever having seen the table."""
    changes: list[dict[str, object]] = field(default_factory=list)

    def update(self, old: int, new: int, version: int, *, partial: bool) -> None:
        """Change a row, and perhaps its key."""
        if old not in self.rows or (new != old and new in self.rows):
            return
        row = self.rows.pop(old) | {"id": new, "v": version}
        self.rows[new] = row
        after = row | ({"big": UNCHANGED} if partial else {})
        before = {"id": old} if new != old else None
        self.changes.append(captured("u", after, before=before))
        had = self.sink.pop(old, {})
        self.sink[new] = {**had, **{k: v for k, v in after.items() if v != UNCHANGED}}

    def insert(self, key: int, version: int) -> None:
        """Add a row."""
        if key not in self.rows:
            self.rows[key] = self.sink[key] = {"id": key, "v": version, "big": f"b{version}"}
            self.changes.append(captured("c", self.rows[key]))

    def delete(self, key: int) -> None:
        """Remove a row."""
        if self.rows.pop(key, None) is not None:
            self.sink.pop(key, None)
            self.changes.append(captured("d", key=key))


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["insert", "delete", "update", "partial"]),
        st.integers(1, 5),
        st.integers(1, 5),
    ),
    max_size=25,
)


@settings(max_examples=examples(300))
@given(st.sets(st.integers(1, 5)), STEPS, st.integers(0, 25))
def test_in_the_end_the_sink_has_the_table(
    there: set[int], steps: list[tuple[str, int, int]], cut: int
) -> None:
    """For any history: all changes that were not seen, then the rows that are left, make the table."""
    first = {key: {"id": key, "v": 0, "big": f"b{key}"} for key in there}
    table = Table(dict(first))
    for version, (what, key, other) in enumerate(steps, 1):
        if what == "insert":
            table.insert(key, version)
        elif what == "delete":
            table.delete(key)
        else:
            table.update(key, other, version, partial=what == "partial")

    rows = left(chunk(*first.values()), *table.changes, cut=min(cut, len(table.changes)))

    assert table.sink | {row["id"]: row for row in rows} == table.rows
