"""Ids and marks of the rows that processors return."""

from __future__ import annotations

import uuid
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.processors.identity import identified
from tests.processors.rows import batch, row

IDS = [str(uuid.UUID(int=number, version=4)) for number in range(6)]
GIVEN, OWN = IDS[:3], IDS[3:]


def settled(made: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return the result for rows that a processor `p` returned for an input with the ids `GIVEN`."""
    return identified("p", batch([row(event_id=one) for one in GIVEN]), made).to_pylist()


def rows(*ids: str | None) -> pa.RecordBatch:
    """Return rows with these ids, which a processor may have omitted."""
    whole = batch([row(event_id=one or "", ordinal=number) for number, one in enumerate(ids)])
    place = whole.schema.get_field_index("event_id")
    return whole.set_column(place, "event_id", pa.array(ids, pa.string()))


@given(st.lists(st.sampled_from([*IDS, None, ""]), min_size=1, max_size=12))
def test_whatever_comes_back(ids: list[str | None]) -> None:
    """Every row has a unique id; the first row with an id keeps it; only rows with foreign ids are marked."""
    found = settled(rows(*ids))

    own = [one["event_id"] for one in found]
    assert len(set(own)) == len(own)
    assert all(uuid.UUID(one) for one in own)
    for row_, (before, after) in enumerate(zip(ids, own, strict=True)):
        if before and before not in ids[:row_]:
            assert after == before
    assert [one["synthetic"] for one in found] == [None if one in GIVEN else "p" for one in ids]
    assert found == settled(rows(*ids)), "the same whenever it is done"


def test_what_was_given_stays_as_it_is() -> None:
    """Input rows that are returned, even fewer of them or in another order, stay unchanged."""
    made = rows(*reversed(GIVEN[:2]))

    assert identified("p", rows(*GIVEN), made) is made


def test_a_mark_that_is_there_stays() -> None:
    """A row whose producer is already set keeps it."""
    made = batch([row(event_id=OWN[0], synthetic="mine"), row(event_id=OWN[1])])

    assert [one["synthetic"] for one in settled(made)] == ["mine", "p"]


def test_ids_of_two_processors_differ() -> None:
    """Copies of the same event by two processors are two events."""
    given_rows, made = rows(GIVEN[0]), rows(GIVEN[0], GIVEN[0], None)

    ids = {
        one["event_id"]
        for name in ("p", "q")
        for one in identified(name, given_rows, made).to_pylist()
    }

    assert len(ids) == 5
