"""Schema approval: which rows wait, and where transactions end in the rows that pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.errors import UnsupportedEvent
from deltaforge_dagster.frame import CAPTURED
from deltaforge_dagster.pipeline.schemas.approval import SchemaApproval, Waiting, unpacked
from deltaforge_dagster.sources.base import ChangeBatch, ParkedEvent
from deltaforge_dagster.sources.postgres.position import LsnPosition
from deltaforge_dagster.testing.sources import Versions
from tests.pipeline.changes import frame, transaction, unfinished
from tests.state.make import table as form

TABLES = ("a", "b", "c")
WHY = "not approved"
Row = dict[str, Any]


def rows_of(transactions: Sequence[Sequence[tuple[str, int]]]) -> list[Row]:
    """Return the rows of transactions, each row a table and the sequence of its version."""
    (template,) = frame([1]).to_pylist()
    found: list[Row] = []
    for number, changes in enumerate(transactions):
        for index, (table, sequence) in enumerate(changes):
            found.append(
                template
                | {
                    "table": table,
                    "schema_sequence": sequence or None,
                    "pos": len(found),
                    "tx_id": str(number),
                    "tx_end": index == len(changes) - 1,
                }
            )
    return found


def batches_of(rows: Sequence[Row], cuts: Sequence[int]) -> list[ChangeBatch]:
    """Return the rows in batches, cut anywhere; those that end with a transaction say so."""
    places = sorted({0, len(rows), *(cut % (len(rows) + 1) for cut in cuts)})
    found = []
    for begin, end in pairwise(places):
        part = list(rows[begin:end])
        whole = part[-1]["tx_end"]
        found.append(
            ChangeBatch(
                pa.RecordBatch.from_pylist(part, schema=CAPTURED),
                LsnPosition(end) if whole else None,
            )
        )
    return found


@dataclass
class Through:
    """The result of schema approval: rows that passed, and held rows of each table."""

    passed: list[Row] = field(default_factory=list)
    kept: dict[str, list[Row]] = field(default_factory=dict)

    def accept(self, approval: SchemaApproval, batch: ChangeBatch) -> None:
        """Let a batch through; where it ends a segment may end."""
        for one in approval.accept(batch):
            self.passed += [] if one.rows is None else one.rows.to_pylist()
            for event in one.parked:
                assert isinstance(event, Waiting)
                rows = unpacked(event.data).to_pylist()
                assert event.changes == len(rows)
                self.kept.setdefault(event.table, []).extend(rows)


def expected(rows: Sequence[Row], pending: set[int]) -> Through:
    """Return the result of schema approval, determined row by row."""
    found = Through()
    for row in rows:
        name = f"public.{row['table']}"
        if row["schema_sequence"] in pending:
            found.kept.setdefault(name, [])
        rows_of_table = found.kept.get(name, found.passed)
        rows_of_table.append(dict(row))
    for rows_of_table in (found.passed, *found.kept.values()):
        for row, later in zip_longest(rows_of_table, rows_of_table[1:]):
            row["tx_end"] = later is None or later["tx_id"] != row["tx_id"]
    return found


sequences = st.integers(0, 6)
changes = st.lists(st.tuples(st.sampled_from(TABLES), sequences), min_size=1, max_size=5)


@given(
    transactions=st.lists(changes, min_size=1, max_size=8),
    pending=st.sets(st.integers(4, 6)),
    cuts=st.lists(st.integers(0, 40), max_size=8),
)
def test_rows_wait_in_order_and_transactions_end(
    transactions: list[list[tuple[str, int]]], pending: set[int], cuts: list[int]
) -> None:
    """From a waiting version's first row on its table is kept, whole and in order; the rest passes.

    Wherever batches are cut, each transaction ends exactly once in what passes, and once in what is
    kept of each table that it changed.
    """
    # A version is of one table: 4 of a, 5 of b, 6 of c.
    own = {"a": 4, "b": 5, "c": 6}
    of_tables = [
        [(table, own[table] if sequence >= 4 else sequence) for table, sequence in one]
        for one in transactions
    ]
    rows = rows_of(of_tables)
    found = Through()
    approval = SchemaApproval(dict.fromkeys(pending, WHY), pauses=True)
    approval.begin({})
    for batch in batches_of(rows, cuts):
        found.accept(approval, batch)

    assert found == expected(rows, pending)
    assert approval.kept == dict.fromkeys(found.kept, WHY)


def test_what_is_held_already_waits_from_the_start() -> None:
    """A table that a run before has held stays held, whatever its rows are."""
    approval = SchemaApproval(pauses=True)
    approval.begin({"public.orders": WHY})
    found = Through()
    found.accept(approval, transaction(1, 2))

    assert not found.passed
    assert [row["pos"] for row in found.kept["public.orders"]] == [1, 2]


def test_a_segments_end_is_behind_every_row() -> None:
    """If the source says that everything is whole, schema approval keeps nothing back."""
    approval = SchemaApproval(pauses=True)
    approval.begin({})
    found = Through()
    found.accept(approval, unfinished(1))
    found.accept(approval, ChangeBatch(frame([2]).slice(0, 0), None))
    found.accept(approval, ChangeBatch(None, LsnPosition(3)))

    assert [(row["pos"], row["tx_end"]) for row in found.passed] == [(1, True)]


def test_a_new_reader_begins_without_the_open_transaction() -> None:
    """What a stream left unfinished is read again, and comes once."""
    approval = SchemaApproval(pauses=True)
    approval.begin({})
    found = Through()
    (cut,) = [unfinished(1, 2)]
    assert cut.rows is not None
    found.accept(approval, ChangeBatch(cut.rows.slice(0, 1), None))
    approval.begin({})
    found.accept(approval, transaction(1, 2))

    assert [row["pos"] for row in found.passed] == [1, 2]


def test_without_anything_to_wait_for_batches_pass_untouched() -> None:
    """A pipeline that pauses no table pays nothing: the same batch comes out."""
    approval = SchemaApproval()
    approval.begin({})
    for batch in (unfinished(1, 2), transaction(3), ChangeBatch(None, None)):
        assert list(approval.accept(batch)) == [batch]


def test_what_a_source_keeps_back_stays_in_its_place() -> None:
    """Events that the source itself keeps back go on with their batch."""
    event = ParkedEvent("public.items", "why", b"raw")
    approval = SchemaApproval({1: WHY}, pauses=True)
    approval.begin({})
    batch = ChangeBatch(frame([1]), LsnPosition(1), parked=(event,))
    (passed,) = approval.accept(batch)

    assert passed.rows is None
    assert passed.parked[0] == event
    assert isinstance(passed.parked[1], Waiting)


def test_readers_beside_the_stream_end_before_what_waits() -> None:
    """They are told of every table that is held, and refused a version that waits; or nothing changes."""
    registry = Versions()
    registry.on_hold = {"public.odd": "cannot be decoded"}
    assert SchemaApproval().beside(registry) is registry
    approval = SchemaApproval({2: WHY}, pauses=True)
    approval.begin({"public.orders": WHY})
    beside = approval.beside(registry)

    assert beside.holds() == {"public.odd": "cannot be decoded", "public.orders": WHY}
    assert beside.register(form("a"), LsnPosition(1)).sequence == 1
    with pytest.raises(UnsupportedEvent, match=WHY):
        beside.register(form("a", "b"), LsnPosition(2))
    beside.define({"t": "as it is"}, LsnPosition(3))
    assert beside.defined(LsnPosition(3)) == {"t": "as it is"}
