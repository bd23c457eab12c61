"""What two chains make of the same rows, compared: against the same done in plain Python."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.pipeline.replay import comparison
from deltaforge_dagster.pipeline.replay.comparison import ReplayDifference, compared
from tests.processors.rows import Row, batch, row


def difference(
    recorded: Sequence[Row], made: Sequence[Row], *, sample: int = 5, values: bool = False
) -> ReplayDifference:
    """Compare rows in their order, whatever ordinals they have."""
    old, new = (
        [batch([{**one, "ordinal": number}]) for number, one in enumerate(rows)]
        for rows in (recorded, made)
    )
    return compared(old, new, sample=sample, values=values)


def event(number: int, **changed: Any) -> Row:
    """Return the row with an id for that number."""
    return row(event_id=f"{number:036d}", after=f'{{"id":{number},"price":1.10}}', **changed)


_events = st.builds(
    event,
    st.integers(0, 11),
    table=st.sampled_from(["orders", "items"]),
    tags=st.sampled_from([None, '["a"]']),
)
_sides = st.lists(_events, max_size=10, unique_by=lambda one: one["event_id"])


@given(_sides, _sides, st.integers(1, 4))
def test_every_event_is_counted_once(old: list[Row], new: list[Row], rows_each: int) -> None:
    """Whatever the order and however many rows are looked at together."""
    with patch.object(comparison, "_BATCH_ROWS", rows_each):
        found = difference(old, new)

    was = {one["event_id"]: one for one in old}
    now = {one["event_id"]: one for one in new}
    expected: dict[str, Counter[str]] = {}

    def count(kind: str, one: Row) -> None:
        expected.setdefault(f"public.{one['table']}", Counter())[kind] += 1

    for one in old:
        if one["event_id"] not in now:
            count("dropped", one)
    latest = -1
    places = list(was)
    for one in new:
        before = was.get(one["event_id"])
        if before is None:
            count("added", one)
            continue
        count("same" if before == one else "changed", before)
        place = places.index(one["event_id"])
        if place < latest:
            count("moved", before)
        latest = max(latest, place)
    assert found.tables == expected
    assert found.equal is (old == new)
    changed = sum(one["changed"] for one in expected.values())
    shown = [one for one in found.sample if one["kind"] == "changed"]
    assert len(shown) == min(changed, 5)


def test_fields_are_named_as_in_events() -> None:
    """Names inside of images and headers, names of everything else, and no value anywhere."""
    old = event(1, before=None, headers='{"h":"1"}', topic="a", key='{"id":1}')
    new = {
        **old,
        "after": '{"id":1,"price":1.1,"secret":"s3cret"}',
        "headers": '{"h":"2"}',
        "topic": None,
        "before": '{"id":1}',
        "ts_us": 5_000,
        "raw_payload": True,
        "synthetic": "js",
    }

    found = difference([old], [new])

    assert found.fields == {
        "public.orders": {
            "ts_ms": 1,
            "before": 1,
            "after.price": 1,
            "after.secret": 1,
            "route.headers.h": 1,
            "route.topic": 1,
            "route.raw_payload": 1,
            "synthetic": 1,
        }
    }
    assert "s3cret" not in json.dumps(found.to_json())
    assert found.sample[0]["fields"] == list(found.fields["public.orders"])


def test_an_image_that_is_written_otherwise_is_changed() -> None:
    """The order of fields alone is a difference, of the image as a whole."""
    old = event(1)

    found = difference([old], [{**old, "after": '{"price":1.10,"id":1}'}])

    assert found.fields == {"public.orders": {"after": 1}}


def test_what_follows_from_drops_is_no_change() -> None:
    """Numbers of rows and the ends of transactions are not the processors' doing."""
    first, second = event(1), event(2, tx_end=True)

    found = difference([first, second], [{**first, "tx_end": True}])

    assert found.tables == {"public.orders": {"same": 1, "dropped": 1}}


def test_values_on_request() -> None:
    """A sample shows both sides of some events of each kind, in order."""
    old, new = [event(1), event(2), event(3)], [event(2, tags='["x"]'), event(4), event(5)]

    found = difference(old, new, sample=1, values=True)

    assert [one["kind"] for one in found.sample] == ["changed", "dropped", "added"]
    changed, dropped, added = found.sample
    assert "tags" not in changed["recorded"]
    assert changed["made"]["tags"] == '["x"]'
    assert dropped["recorded"]["after"] == '{"id":1,"price":1.10}'
    assert (dropped["made"], added["recorded"]) == (None, None)
