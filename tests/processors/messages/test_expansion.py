"""Expansion of a change frame: which rows follow a change, and which of them a sink gets."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.processors.messages import expansion
from deltaforge_dagster.processors.messages.expansion import (
    CHANGE,
    DELETE_HALF,
    HALF_TOMBSTONE,
    INSERT_HALF,
    SPLIT,
    TOMBSTONE,
    RowSelection,
    copy_id,
    expand,
    identified,
    selected,
)
from tests.processors.rows import Row, batch, dumps, images, row, rows

UPDATE = {"op": "u", "before": '{"id":1,"a":"x"}', "after": '{"id":2,"a":"y"}', "key": '{"id":2}'}


def expanded(
    *given_rows: Row, splits: bool = True, tombstones: bool = True
) -> list[dict[str, Any]]:
    """Return the rows of the expanded frame."""
    found = expand(batch(given_rows), splits=splits, tombstones=tombstones)
    found.validate(full=True)
    return found.to_pylist()


def test_an_update_of_a_key_has_halves() -> None:
    """The delete has the before image and the old key, the insert the after image and the new key."""
    update = row(**UPDATE, ordinal=7, tx_end=True)

    whole, gone, tombstone, come = expanded(update)

    assert whole == {**update, "role": SPLIT}
    old = {"op": "d", "after": None, "key": '{"id":1}', "tx_end": False}
    assert gone == {**update, **old, "role": DELETE_HALF}
    assert tombstone == {**gone, "role": HALF_TOMBSTONE}
    new = {"op": "c", "before": None, "event_id": copy_id(update["event_id"], 3)}
    assert come == {**update, **new, "role": INSERT_HALF}


@pytest.mark.parametrize(
    "changed",
    [
        {"before": '{"id":2,"a":"x"}'},
        {"before": None},
        {"key": None},
        {"before": '{"a":"x"}'},
        {"before": "null"},
        {"op": "c"},
        {"op": "t"},
    ],
)
def test_other_changes_stay_whole(changed: dict[str, Any]) -> None:
    """Other operations are not split, nor are updates whose key is the same or incomplete in the old row."""
    whole = row(**{**UPDATE, **changed})

    assert expanded(whole) == [{**whole, "role": CHANGE}]


def test_a_delete_has_a_tombstone() -> None:
    """A tombstone is a copy of its delete, with the same key; other changes have none."""
    delete = row(op="d", before='{"id":1}', after=None)

    found = expanded(row(), delete, row(op="t", after=None, key=None), row())

    assert [one["role"] for one in found] == [CHANGE, CHANGE, TOMBSTONE, CHANGE, CHANGE]
    assert found[2] == {**found[1], "role": TOMBSTONE}


def test_only_what_is_wanted_is_made() -> None:
    """Halves and tombstones are only made if a sink wants them."""
    delete, update = row(op="d", before='{"id":1}', after=None), row(**UPDATE)

    def roles(**wanted: bool) -> list[int]:
        return [one["role"] for one in expanded(delete, update, **wanted)]

    assert roles(splits=False) == [CHANGE, TOMBSTONE, CHANGE]
    assert roles(tombstones=False) == [CHANGE, SPLIT, DELETE_HALF, INSERT_HALF]
    assert roles(splits=False, tombstones=False) == [CHANGE, CHANGE]


def old_key(given: Row) -> str | None:
    """Return the old key of an update that changes its key, computed in plain Python."""
    if given["op"] != "u" or given["before"] is None or given["key"] is None:
        return None
    before, key = dict(members(given["before"])), members(given["key"])
    if not all(name in before for name, _ in key):
        return None
    if all(before[name] == value for name, value in key):
        return None
    return "{" + ",".join(f"{name}:{before[name]}" for name, _ in key) + "}"


def members(text: str) -> list[tuple[str, str]]:
    """Return the members of an object as compact JSON texts."""
    return [(dumps(name), dumps(value)) for name, value in json.loads(text).items()]


keyed = st.tuples(images, images, rows).map(
    lambda one: {**one[2], "op": "u", "before": dumps({**one[0], **one[1]}), "key": dumps(one[0])}
)
rekeyed = st.tuples(images, images, rows).map(
    lambda one: {**one[2], "op": "u", "before": dumps(one[0]), "key": dumps(one[1] or one[0])}
)


@given(st.lists(st.one_of(rows, keyed, rekeyed), min_size=1, max_size=20), st.data())
def test_any_frame(given_rows: list[Row], data: st.DataObject) -> None:
    """For any names and values of keys, the same updates are split as by a plain Python reference."""
    numbered = [{**one, "ordinal": number} for number, one in enumerate(given_rows)]
    start = data.draw(st.integers(0, len(numbered) - 1))

    found = expand(batch(numbered).slice(start), splits=True, tombstones=True).to_pylist()

    expected: list[tuple[int, int, str | None]] = []
    for one in numbered[start:]:
        old = old_key(one)
        ordinal, key = one["ordinal"], one["key"]
        if old is not None:
            expected += [(ordinal, SPLIT, key), (ordinal, DELETE_HALF, old)]
            expected += [(ordinal, HALF_TOMBSTONE, old), (ordinal, INSERT_HALF, key)]
        else:
            expected.append((ordinal, CHANGE, key))
            expected += [(ordinal, TOMBSTONE, key)] if one["op"] == "d" else []
    assert [(one["ordinal"], one["role"], one["key"]) for one in found] == expected


def test_every_message_has_its_own_id() -> None:
    """Ids are UUIDs with the time of the change's id, always the same, and unique for each message."""
    other = "0192f0c1-0000-7000-8000-000000000002"
    delete = row(op="d", before='{"id":1}', after=None, event_id=other)
    frame = expand(batch([row(**UPDATE), delete, row()]), splits=True, tombstones=True)

    own, changes = identified(frame)

    ids = own.column("event_id").to_pylist()
    first = row()["event_id"]
    assert ids == [
        first, first, copy_id(first, 2), copy_id(first, 3), other, copy_id(other, 2), first,
    ]  # fmt: skip
    assert changes.to_pylist() == [None, None, first, first, None, other, None]
    parsed = uuid.UUID(copy_id(other, 2))
    assert (parsed.version, parsed.variant) == (7, uuid.RFC_4122)
    assert str(parsed) == copy_id(other, 2)
    assert copy_id(other, 2)[:13] == other[:13]
    plain = expand(batch([row()]), splits=True, tombstones=True)
    assert identified(plain)[1].null_count == 1


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (RowSelection(), "c u d t r ddl"),
        (RowSelection(splits=True), "c d+ c+ d t r ddl"),
        (RowSelection(tombstones=True), "c u d d- t r ddl"),
        (RowSelection(splits=True, tombstones=True), "c d+ d- c+ d d- t r ddl"),
        (RowSelection(splits=True, tombstones=True, skipped=("d", "r")), "c c+ t ddl"),
        (RowSelection(splits=True, skipped=("u", "c")), "d+ d t r ddl"),
        (RowSelection(skipped=("t", "u", "c")), "d r ddl"),
    ],
)
def test_what_a_sink_gets(selection: RowSelection, expected: str) -> None:
    """Halves replace an update and tombstones follow deletes; a DDL statement is not a snapshot row."""
    delete = row(op="d", before='{"id":1}', after=None)
    others = [row(op=op, after=None, key=None) for op in ("t", "r", "ddl")]
    frame = expand(batch([row(), row(**UPDATE), delete, *others]), splits=True, tombstones=True)
    mark = {DELETE_HALF: "+", INSERT_HALF: "+", TOMBSTONE: "-", HALF_TOMBSTONE: "-"}

    chosen = frame.filter(selected(selection, frame)).to_pylist()

    assert " ".join(one["op"] + mark.get(one["role"], "") for one in chosen) == expected


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (RowSelection(), [None, "js", "outbox"]),
        (RowSelection(synthetic=False), [None]),
        (RowSelection(captured=False), ["js", "outbox"]),
        (RowSelection(producers=("js", "other")), ["js"]),
        (RowSelection(synthetic=False, captured=False), []),
        (RowSelection(synthetic=False, producers=("js",)), []),
    ],
)
def test_filter_by_who_made_an_event(selection: RowSelection, expected: list[str | None]) -> None:
    """Every condition must hold."""
    frame = batch([row(synthetic=one) for one in (None, "js", "outbox")])

    found = frame.filter(selected(selection, frame)).column("synthetic").to_pylist()

    assert found == expected


def test_values_of_tombstones_are_null() -> None:
    """Only tombstones lose their values."""
    delete = row(op="d", before='{"id":1}', after=None)
    frame = expand(batch([row(), delete]), splits=False, tombstones=True)

    values = expansion.without_tombstones(lambda _: pa.array(["a", "b", "c"]), frame)

    assert values.to_pylist() == ["a", "b", None]
