"""What the seam itself promises: positions of sinks, and where batches may be cut."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.sinks.base import MESSAGES, SinkBatch, whole_ordinals
from deltaforge_dagster.testing.sinks import ORIGIN


def rows(counts: list[int]) -> pa.RecordBatch:
    """Return messages: so many of each change, whose ordinals have gaps."""
    texts = {"destination": "a", "value": "v", "event_id": "e", "idempotency_key": "i"}
    return pa.RecordBatch.from_pylist(
        [{**texts, "ordinal": 3 * n} for n, count in enumerate(counts) for _ in range(count)],
        schema=MESSAGES,
    )


@given(st.lists(st.integers(1, 4), min_size=1, max_size=9), st.integers(1, 12))
def test_a_part_never_divides_a_change(counts: list[int], most: int) -> None:
    """Parts follow one another, hold whole changes, and no more rows than they may, or one change."""
    messages = rows(counts)
    ordinals = messages.column("ordinal").to_pylist()
    start, parts = 0, []
    while start < messages.num_rows:
        stop = whole_ordinals(messages, start, start + most)
        parts.append(ordinals[start:stop])
        start = stop

    assert [one for part in parts for one in part] == ordinals
    assert sum(len(set(part)) for part in parts) == len(counts)
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        assert len(part) <= most or len(set(part)) == 1
        if following is not None:
            assert len(part) + following.count(following[0]) > most


def test_a_position_names_the_change_in_the_journal() -> None:
    """A message with an id of its own leaves the id of its change: that one can be found again."""
    (own,) = rows([1]).to_pylist()
    messages = [own, {**own, "event_id": "copy", "change_id": "e"}]
    batch = SinkBatch(1, "id", pa.RecordBatch.from_pylist(messages, schema=MESSAGES))

    positions = [replace(batch, origin=ORIGIN).position_at(row) for row in range(2)]

    assert [one.event_id for one in positions] == ["e", "e"]
