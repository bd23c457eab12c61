"""What a sink is given at once: cut and joined to limits, never inside a change or a transaction."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.errors import SinkRejected
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.deliver.batches import (
    JOINED_BYTES,
    BatchLimits,
    BatchSettings,
    cut,
)
from deltaforge_dagster.sinks.base import MESSAGES, SinkBatch
from tests.pipeline.deliver.scene import PIPELINE

ROWS = 1 << 30


def batch(ordinals: Sequence[int], value: str | None = "x") -> SinkBatch:
    """Return messages of these ordinals."""
    count = len(ordinals)
    columns: list[pa.Array[Any]] = [
        pa.array([str(number) for number in ordinals], pa.string())
        if not field.nullable
        else pa.nulls(count, pa.string())
        for field in MESSAGES
    ]
    columns[MESSAGES.get_field_index("ordinal")] = pa.array(ordinals, pa.int64())
    columns[MESSAGES.get_field_index("value")] = pa.array([value] * count, pa.string())
    return SinkBatch(7, "id", pa.RecordBatch.from_arrays(columns, schema=MESSAGES))


def batches(*counts: int, fails: bool = False) -> Iterator[SinkBatch]:
    """Yield batches of so many changes of one message each, then perhaps an error."""
    first = 0
    for count in counts:
        yield batch(range(first, first + count))
        first += count
    if fails:
        raise SinkRejected("no destination")


def never() -> npt.NDArray[np.int64]:
    """Fail: nobody needs to know where transactions end."""
    raise AssertionError("transactions were asked for")


def ordinals(sent: Iterator[SinkBatch]) -> list[list[int]]:
    """Return the ordinals of each delivery batch."""
    found = []
    for sent_batch in sent:
        assert (sent_batch.segment, sent_batch.segment_id) == (7, "id")
        messages = pa.Table.from_batches(sent_batch.parts)
        messages.validate(full=True)
        found.append(cast("list[int]", messages.column("ordinal").to_pylist()))
        assert messages.column("event_id").to_pylist() == [str(one) for one in found[-1]]
    return found


def address(messages: pa.RecordBatch) -> int:
    """Return the address of the buffer that holds the messages' values."""
    values = messages.column("value").buffers()[2]
    assert values is not None
    return values.address


@pytest.mark.parametrize(
    ("given", "for_parts", "for_others"),
    [
        ("", (100_000, 64 << 20), None),
        ("  batch: {max_events: 7}", (7, JOINED_BYTES), (7, JOINED_BYTES)),
        ("  batch: {max_bytes: 700}", (50_000, 700), (50_000, 700)),
        ("    checkpoint: {after: 5}", (5, 64 << 20), (5, JOINED_BYTES)),
        ("    checkpoint: {after: 5}\n  batch: {max_bytes: 700}", (5, 700), (5, 700)),
    ],
)
def test_limits(
    tmp_path: Path,
    given: str,
    for_parts: tuple[int, int],
    for_others: tuple[int, int] | None,
) -> None:
    """Without limits in the pipeline file, only a sink that takes parts has some."""
    path = tmp_path / "it.yaml"
    path.write_text(PIPELINE.replace("BACKOFF", "1").replace("    checkpoint: {after: 4}", given))
    settings = BatchSettings(load_pipeline(path).spec.spec, Journal(f"file://{tmp_path}"))

    parts, others = settings.limits(parts=True), settings.limits(parts=False)

    assert parts is not None
    assert (parts.max_rows, parts.max_bytes, parts.joined) == (*for_parts, False)
    assert (others and (others.max_rows, others.max_bytes)) == for_others
    assert others is None or others.joined


def test_units_are_joined_and_cut_to_a_number_of_messages() -> None:
    """Whatever batches they come in; every message once, in order."""
    sent = ordinals(cut(batches(4, 6, 1, 12, 3), BatchLimits(10, JOINED_BYTES), never))

    assert [len(one) for one in sent] == [10, 10, 6]
    assert [number for one in sent for number in one] == list(range(26))


def test_parts_stay_as_they_are() -> None:
    """Nothing is copied for a sink that takes several parts at once; the others get one."""
    parts = [batch(range(4)), batch(range(4, 10)), batch(range(10, 13))]
    limits = BatchLimits(8, JOINED_BYTES, joined=False)

    first, second = cut(parts, limits, never)

    assert [len(one) for one in first.parts] == [4, 4]
    assert [len(one) for one in second.parts] == [2, 3]
    places = [address(one) for one in (*first.parts, *second.parts)]
    given = [address(one.messages) for one in parts]
    assert places == [given[0], given[1], given[1], given[2]]
    joined = [*cut(parts, BatchLimits(8, JOINED_BYTES), never)]
    assert [(len(one.messages), one.earlier) for one in joined] == [(8, ()), (5, ())]


def test_units_are_cut_to_their_bytes() -> None:
    """Values, keys, headers and destinations count; a message larger than the limit goes alone."""
    large = batch(range(6), "x" * 99)  # 100 bytes each, with the destination
    limits = BatchLimits(ROWS, 250)

    assert ordinals(cut([large], limits, never)) == [[0, 1], [2, 3], [4, 5]]
    assert ordinals(cut([large], BatchLimits(ROWS, 50), never)) == [[n] for n in range(6)]
    assert ordinals(cut([batch(range(9), None)], limits, never)) == [[*range(9)]]


def test_what_comes_before_an_error_is_sent() -> None:
    """A message without a destination stops the sink after all messages before it."""
    sent = cut(batches(4, 6, fails=True), BatchLimits(8, JOINED_BYTES), never)

    assert [next(sent).messages.num_rows, next(sent).messages.num_rows] == [8, 2]
    with pytest.raises(SinkRejected):
        next(sent)


def test_a_change_with_several_messages_is_whole() -> None:
    """Also when it alone has more messages than a delivery batch may, and across batches of any size."""
    parts = [batch([0, 0, 0]), batch([1, 1]), batch([2, 3, 3])]

    assert ordinals(cut(parts, BatchLimits(2, JOINED_BYTES), never)) == [
        [0, 0, 0], [1, 1], [2], [3, 3],
    ]  # fmt: skip


def test_a_transaction_is_whole() -> None:
    """A delivery batch ends where one ends, so that a large one makes a large batch; filtered rows do not matter."""
    ends = np.array([1, 2, 6, 8, 9], np.int64)
    limits = BatchLimits(3, JOINED_BYTES, whole_transactions=True)

    assert ordinals(cut([batch(range(10))], limits, lambda: ends)) == [
        [0, 1, 2], [3, 4, 5, 6], [7, 8, 9],
    ]  # fmt: skip
    # The rows 2 and 6, which end transactions, are not for this sink.
    some = [batch([0, 1]), batch([3, 4, 5, 7]), batch([8, 9])]
    assert ordinals(cut(some, limits, lambda: ends)) == [[0, 1], [3, 4, 5], [7, 8, 9]]


def test_nobody_asks_for_transactions_of_what_fits() -> None:
    """The usual small segment is one delivery batch, and its file is not read again."""
    limits = BatchLimits(10, JOINED_BYTES, whole_transactions=True)

    assert ordinals(cut(batches(4, 6), limits, never)) == [[*range(10)]]


@given(
    st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=8), min_size=1, max_size=5),
    st.integers(1, 9),
    st.sets(st.integers(0, 40)),
    st.booleans(),
    st.booleans(),
)
def test_any_delivery_batches(
    groups: list[list[int]], most: int, ends: set[int], whole: bool, joined: bool
) -> None:
    """Nothing lost or moved, no change or transaction divided, and no delivery batch larger than it must be.

    Nor is a change divided between the parts of one.
    """
    parts, ordinal = [], 0
    for group in groups:
        numbers: list[int] = []
        for copies in group:
            numbers += [ordinal] * copies
            ordinal += 1
        parts.append(batch(numbers))
    everything = [n for part in parts for n in part.messages.column("ordinal").to_pylist()]
    limits = BatchLimits(most, JOINED_BYTES, whole_transactions=whole, joined=joined)
    known = np.array(sorted(ends), np.int64)

    made = [*cut(parts, limits, lambda: known)]
    sent = ordinals(iter(made))

    for whole_batch in made:
        assert not (joined and whole_batch.earlier)
        for before, after in itertools.pairwise(whole_batch.parts):
            assert before.column("ordinal")[-1] != after.column("ordinal")[0]
    assert [number for one in sent for number in one] == everything
    for one, following in itertools.pairwise(sent):
        assert one[-1] != following[0]
        if whole:
            assert one[-1] in ends
    for one in sent:
        divisible = [
            before
            for before, after in itertools.pairwise(one)
            if before != after and (not whole or before in ends)
        ]
        assert len(one) <= most or not divisible
