"""The content hash depends on the rows and on nothing else."""

from __future__ import annotations

import itertools

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.frame import CAPTURED
from deltaforge_dagster.journal.hashing import ContentHash, range_hash
from tests.journal.changes import Change, batch, change, changes

ROWS = [change(number) for number in range(200)]


def content(*batches: pa.RecordBatch) -> str:
    """Return the hash of the batches' rows, with each batch added separately."""
    digest = ContentHash(CAPTURED)
    for rows in batches:
        digest.update(pa.Table.from_batches([rows]))
    return digest.hexdigest()


WHOLE = content(batch(ROWS))


@given(st.lists(st.integers(0, 200), max_size=8))
def test_batch_boundaries_do_not_matter(cuts: list[int]) -> None:
    """However the rows are divided, even with empty parts, the hash is the same."""
    ends = [0, *sorted(cuts), 200]

    pieces = [batch(ROWS[a:b]) for a, b in itertools.pairwise(ends)]

    assert content(*pieces) == WHOLE


def test_slices_and_chunks_do_not_matter() -> None:
    """Sliced buffers, and several chunks with different dictionaries, change nothing."""
    padded = changes(0, 230).slice(0, 200)
    chunked = ContentHash(CAPTURED)

    chunked.update(pa.Table.from_batches([changes(0, 61), changes(61, 200)]))

    assert (content(padded), chunked.hexdigest()) == (WHOLE, WHOLE)


def test_layout_of_dictionaries_does_not_matter() -> None:
    """Order, duplicate entries, unused entries and nulls inside a dictionary change nothing."""
    names = [None if number % 7 else "binlog.1" for number in range(200)]
    odd = pa.DictionaryArray.from_arrays(
        pa.array([4 if name is None else (1, 3)[at % 2] for at, name in enumerate(names)]),
        pa.array(["unused", "binlog.1", "unused", "binlog.1", None]),
    ).cast(CAPTURED.field("file").type)
    columns = dict(zip(CAPTURED.names, batch(ROWS).columns, strict=True)) | {"file": odd}
    rows = pa.RecordBatch.from_arrays(list(columns.values()), schema=CAPTURED)

    plain = batch([row | {"file": name} for row, name in zip(ROWS, names, strict=True)])

    assert content(plain) == content(rows)


def edits() -> list[tuple[str, object]]:
    """Return a different value for each column."""
    return [
        (name, not old if isinstance(old, bool) else 99 if isinstance(old, int) else "other")
        for name, old in ROWS[7].items()
    ]


@pytest.mark.parametrize(("name", "value"), edits())
def test_every_value_counts(name: str, value: object) -> None:
    """A different value in any column changes the hash."""
    edited: list[Change] = [*ROWS[:7], ROWS[7] | {name: value}, *ROWS[8:]]

    assert content(batch(edited)) != WHOLE


def test_order_counts() -> None:
    """Swapping two rows changes the hash."""
    assert content(batch([ROWS[1], ROWS[0], *ROWS[2:]])) != WHOLE


def test_null_and_empty_differ() -> None:
    """A null differs from an empty text, and text cannot move from one row to the next."""
    hashes = {
        content(batch([change(0, tags=a, tx_id=c), change(1, tags=b, tx_id=d)]))
        for a, b in [(None, None), ("", None), (None, ""), ("ab", "c"), ("a", "bc")]
        for c, d in [(None, None), ("", None), (None, ""), ("ab", "c"), ("a", "bc")]
    }

    assert len(hashes) == 25


def test_range_hash_follows_the_order_of_segments() -> None:
    """The hash of a range is a function of its segments' hashes, in order."""
    assert range_hash(["a", "b"]) == range_hash(iter(["a", "b"]))
    assert range_hash(["a", "b"]) != range_hash(["b", "a"])


def test_hash_is_stable() -> None:
    """The hash of known rows never changes, because it is stored and compared across versions."""
    assert WHOLE == "567e1d2172ce0a48cdac340ed5572cd1ed2efaa1ee4e9d1f80aa6e53afb6b1d0"
