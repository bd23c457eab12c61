"""Which changes wait behind dead letters, and which of these may be delivered."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.frame import FRAME
from deltaforge_dagster.pipeline.blocked_keys import (
    COLUMNS,
    BlockedKeys,
    Keys,
    due_entries,
    keys_of,
    waiting,
)
from deltaforge_dagster.state.records import DeadLetterRow, DeadLetterState

Change = tuple[str, str, int | None, int | None]
"""Operation, table, key, and the key before an update that changed it."""


def frame(*changes: Change) -> pa.RecordBatch:
    """Return changes with ordinals from 0 on."""
    rows: list[dict[str, Any]] = []
    for ordinal, (op, table, key, old) in enumerate(changes):
        row: dict[str, Any] = dict.fromkeys(COLUMNS)
        row |= {"ordinal": ordinal, "op": op, "db": "shop", "schema": "public", "table": table}
        row["key"] = None if key is None else f'{{"id":{key}}}'
        if op == "u":
            row["before"] = f'{{"id":{key if old is None else old},"v":"x"}}'
        rows.append(row)
    return pa.RecordBatch.from_pylist(rows, pa.schema([FRAME.field(name) for name in COLUMNS]))


def entry(
    ordinal: int,
    state: DeadLetterState,
    key: int | None = 1,
    *,
    old: int | None = None,
    holds: bool = True,
    segment: int = 1,
) -> DeadLetterRow:
    """Return an entry of the table `orders`."""
    texts = [None if one is None else f'{{"id":{one}}}' for one in (key, old)]
    return DeadLetterRow(
        event_id=f"{segment}-{ordinal}",
        segment=segment,
        ordinal=ordinal,
        state=state,
        error_kind="routing",
        error_message="",
        table_name="public.orders",
        row_key=texts[0],
        old_key=texts[1],
        holds=holds,
        source_cursor="{}",
        event="",
        payload_truncated=False,
        path="",
        checksum="",
        place=0,
        seq=100 - ordinal,
        sink="sink",
        attempts=1,
        token=None,
        created_at=0.0,
    )


def test_what_a_change_is_one_of() -> None:
    """Its row; both of its rows when it changes the key; all of them for a TRUNCATE; else nothing."""
    rows = frame(
        ("c", "orders", 1, None),
        ("u", "orders", 1, None),
        ("u", "orders", 2, 1),
        ("t", "orders", None, None),
        ("d", "logs", None, None),
    )
    one, two = '{"id":1}', '{"id":2}'

    found = keys_of(rows, range(5))
    assert found == [
        Keys("public.orders", one, None, whole=False),
        Keys("public.orders", one, None, whole=False),
        Keys("public.orders", two, one, whole=False),
        Keys("public.orders", None, None, whole=True),
        Keys("public.logs", None, None, whole=False),
    ]
    assert [keys.some for keys in found] == [True, True, True, True, False]


def test_only_the_same_row_waits() -> None:
    """Not another row, nor the same key of another table, nor what comes before."""
    held = BlockedKeys([entry(2, "dead", segment=3)])
    rows = frame(
        ("u", "orders", 1, None),  # before it, since the sink was set back
        ("c", "orders", 2, None),
        ("d", "items", 1, None),
        ("u", "orders", 1, None),
    )

    assert waiting(held, 3, rows) == [3]
    assert waiting(held, 2, rows) == []
    assert waiting(BlockedKeys([entry(2, "dead", holds=False)]), 4, rows) == []


def test_a_changed_key_is_held_too() -> None:
    """What follows under the new key waits, since the change to it does."""
    rows = frame(
        ("u", "orders", 5, None),
        ("u", "orders", 5, 1),
        ("u", "orders", 5, None),
        ("u", "orders", 6, 5),
        ("d", "orders", 6, None),
        ("d", "orders", 7, None),
    )

    assert waiting(BlockedKeys([entry(0, "dead", segment=1)]), 2, rows) == [1, 2, 3, 4]


def test_a_truncate_waits_for_every_row_and_every_row_for_it() -> None:
    """It must not overtake a row that is in the queue, nor be overtaken."""
    rows = frame(
        ("c", "orders", 8, None),
        ("t", "orders", None, None),
        ("c", "orders", 9, None),
        ("c", "items", 9, None),
    )

    assert waiting(BlockedKeys([entry(0, "dead", segment=1)]), 2, rows) == [1, 2]


_CHANGES = st.lists(
    st.one_of(
        st.tuples(st.sampled_from("cud"), st.sampled_from(["orders", "items"]), st.integers(1, 4))
        .map(lambda one: (*one, None)),
        st.tuples(st.just("u"), st.just("orders"), st.integers(1, 4), st.integers(1, 4)),
        st.just(("t", "orders", None, None)),
        st.just(("c", "logs", None, None)),
    ),
    max_size=30,
)  # fmt: skip


@given(_CHANGES)
def test_whoever_touches_what_is_held_waits(changes: list[Change]) -> None:
    """Row by row the same as for whole batches: nothing of a held key passes, all else does."""
    held = {1}
    everything = False
    expected = []
    for index, (op, table, key, old) in enumerate(changes):
        touched = {key, old if op == "u" else None} - {None}
        if table != "orders":
            continue
        if op == "t" or everything or touched & held:
            expected.append(index)
            everything |= op == "t"
            held |= touched  # type: ignore[arg-type]

    blocked = BlockedKeys([entry(0, "dead", segment=1)])
    assert (waiting(blocked, 2, frame(*changes)) if changes else []) == expected


def test_what_may_be_delivered() -> None:
    """What was asked for, and what waits for nothing: in the journal's order, as far as it is passed."""
    entries = [
        entry(1, "redrive"),
        entry(2, "waiting"),
        entry(3, "dead", 2),
        entry(4, "waiting", 2),
        entry(5, "waiting", 3, old=2),
        entry(6, "waiting", 3),
        entry(7, "waiting", 4),
        entry(8, "redrive", 2, holds=False),
        entry(1, "redrive", 9, segment=2),
    ]

    def ordinals(*reached: int) -> list[int]:
        return [one.ordinal for one in due_entries(entries, (reached[0], reached[1]))]

    assert ordinals(2, 0) == [1, 2, 7, 8]
    assert ordinals(2, 1) == [1, 2, 7, 8, 1]
    assert ordinals(1, 1) == [1]
