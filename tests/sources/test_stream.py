"""The socket of a log stream, over a pair of sockets, and the decoder's buffer, against plain bytes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.errors import SourceUnavailable
from deltaforge_dagster.sources.stream import BUFFER_BYTES, ReadBuffer, StreamSocket


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


@pytest.fixture
def pair() -> Iterator[tuple[StreamSocket, socket.socket]]:
    """A stream that has begun, and the server's end of it."""
    ours, theirs = socket.socketpair()
    stream = StreamSocket(ours, "here")
    stream.begin()
    with theirs:
        yield stream, theirs
    stream.close()


def received(stream: StreamSocket, seconds: float = 60.0) -> bytes:
    """Return what one call receives."""
    buffer = bytearray(1 << 20)
    with memoryview(buffer) as view:
        count = stream.receive(view, seconds)
    return bytes(buffer[:count])


def test_the_last_bytes_come_before_the_end(pair: tuple[StreamSocket, socket.socket]) -> None:
    """A server that sends and closes at once is heard out, however much it said."""
    stream, theirs = pair
    said = bytes(range(256)) * 400
    theirs.sendall(said)
    theirs.close()

    heard = b""
    while len(heard) < len(said):
        heard += received(stream)
    assert heard == said
    with pytest.raises(SourceUnavailable, match="here: the server closed the stream"):
        received(stream)


def test_nothing_is_zero_bytes_in_time(pair: tuple[StreamSocket, socket.socket]) -> None:
    """Waiting ends when it should, and silence is counted from the last byte."""
    stream, theirs = pair
    theirs.sendall(b"x")
    received(stream)
    began = time.monotonic()

    assert received(stream, 0.2) == b""
    assert 0.15 < time.monotonic() - began < 30
    assert stream.silence >= 0.15


def test_what_trickles_in_is_taken_together(pair: tuple[StreamSocket, socket.socket]) -> None:
    """A call goes on while each pause brings much, and returns when little comes."""
    stream, theirs = pair
    piece = b"x" * 40_000
    theirs.sendall(piece)
    thread = threading.Thread(target=theirs.sendall, args=(20 * piece,))
    thread.start()
    calls = total = 0
    while total < 21 * len(piece):
        total += len(received(stream))
        calls += 1
    thread.join()

    assert calls < 21


def test_closing_ends_a_waiting_receiver(pair: tuple[StreamSocket, socket.socket]) -> None:
    """From another thread, and twice."""
    stream, _ = pair
    threading.Timer(0.2, stream.close).start()

    with pytest.raises(SourceUnavailable):
        received(stream)
    stream.close()


def test_a_message_is_sent_whole_or_not_at_all(pair: tuple[StreamSocket, socket.socket]) -> None:
    """To a server that takes nothing more, nothing is sent, without waiting."""
    stream, theirs = pair
    stream.send(b"hello")
    assert theirs.recv(100) == b"hello"

    message = bytes(range(100))
    began = time.monotonic()
    for _ in range(20_000):
        stream.send(message)
    assert time.monotonic() - began < 10
    theirs.setblocking(False)
    heard = b""
    try:
        while piece := theirs.recv(1 << 20):
            heard += piece
    except BlockingIOError:
        pass

    assert 0 < len(heard) < 20_000 * len(message), "the connection was full"
    assert heard == message * (len(heard) // len(message))
