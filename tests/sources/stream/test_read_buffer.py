"""The buffer between a stream and its decoder, against plain bytes."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.sources.stream import BUFFER_BYTES, ReadBuffer


@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=30), st.randoms())
def test_a_decoder_sees_every_byte_once(sizes: list[int], random: Random) -> None:
    """However much arrives at a time, and however much of it a decoder takes."""
    said = b"".join(bytes([number % 251]) * size for number, size in enumerate(sizes))
    sent = 0
    taken = bytearray()
    buffer = ReadBuffer(1)

    def receive(view: memoryview, seconds: float) -> int:
        nonlocal sent
        count = min(len(view), len(said) - sent, random.randrange(1, 100_000))
        view[:count] = said[sent : sent + count]
        sent += count
        return count

    while buffer.fill(receive, 1.0):
        consumed = random.choice([0, buffer.length, random.randrange(buffer.length + 1)])
        taken += buffer.data[:consumed]
        buffer.drop(consumed)

    assert taken + buffer.data[: buffer.length] == said


def test_it_grows_for_one_large_row_and_shrinks_behind_it() -> None:
    """Memory follows the largest row in sight, not the largest there has been."""

    def receive(view: memoryview, seconds: float) -> int:
        return len(view)

    buffer = ReadBuffer(1 << 20)
    usual = len(buffer.data)
    while buffer.length < 9 * usual:
        buffer.fill(receive, 1.0)
    assert len(buffer.data) == 16 * usual

    buffer.drop(buffer.length - 10)
    assert (len(buffer.data), buffer.length) == (usual, 10)


def test_it_is_filled_a_little_at_first() -> None:
    """Twice as much with each call that gets all it asks for, so that the first changes need not wait for megabytes."""
    asked = []

    def receive(view: memoryview, seconds: float) -> int:
        asked.append(len(view) >> 10)
        return len(view) if len(asked) != 2 else 5

    buffer = ReadBuffer(1 << 20)
    for _ in range(6):
        buffer.fill(receive, 1.0)
        buffer.drop(buffer.length)

    assert asked == [64, 128, 128, 256, 512, 1024]


def test_a_buffer_is_bounded_on_both_sides() -> None:
    """Neither so large that other threads wait, nor so small that each row is a call."""
    assert len(ReadBuffer(1 << 40).data) == BUFFER_BYTES
    assert len(ReadBuffer(1).data) == 64 << 10
