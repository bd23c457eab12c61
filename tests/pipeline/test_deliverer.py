"""What a deliverer hands to a sink at once."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest

from deltaforge_dagster.errors import SinkRejected
from deltaforge_dagster.pipeline import deliverer
from deltaforge_dagster.sinks.base import MESSAGES, SinkBatch


def batches(*counts: int, fails: bool = False) -> Iterator[SinkBatch]:
    """Yield batches of so many messages of one segment, then perhaps an error."""
    first = 0
    for count in counts:
        texts = [pa.array([f"{first + n}" for n in range(count)])] * (len(MESSAGES) - 1)
        ordinals = pa.array(range(first, first + count), pa.int64())
        yield SinkBatch(7, "id", pa.RecordBatch.from_arrays([ordinals, *texts], schema=MESSAGES))
        first += count
    if fails:
        raise SinkRejected("no destination")


def test_batches_are_joined_up_to_a_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sink that stores its position with each batch gets few; every message once, in order."""
    monkeypatch.setattr(deliverer, "JOINED_ROWS", 10)

    found = list(deliverer._joined(batches(4, 6, 1, 12, 3)))

    assert [one.messages.num_rows for one in found] == [10, 1, 12, 3]
    assert {(one.segment, one.segment_id) for one in found} == {(7, "id")}
    ordinals = [n for one in found for n in one.messages.column("ordinal").to_pylist()]
    assert ordinals == list(range(26))
    for one in found:
        one.messages.validate(full=True)
        assert one.messages.column("value").to_pylist() == list(
            map(str, one.messages.column("ordinal").to_pylist())
        )


def test_batches_are_joined_up_to_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large messages are not joined: memory stays what it was."""
    monkeypatch.setattr(deliverer, "JOINED_BYTES", 100)

    assert [one.messages.num_rows for one in deliverer._joined(batches(2, 2, 2))] == [2, 2, 2]


def test_what_comes_before_an_error_is_sent() -> None:
    """A message without a destination stops the sink after all messages before it."""
    joined = deliverer._joined(batches(4, 6, fails=True))

    assert next(joined).messages.num_rows == 10
    with pytest.raises(SinkRejected):
        next(joined)
