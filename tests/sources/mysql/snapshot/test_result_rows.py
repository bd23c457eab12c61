"""Rows of a result, wherever the network cuts them."""

from __future__ import annotations

import io
import struct
from typing import Any

import pymysql
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltaforge_dagster.errors import CorruptLog
from deltaforge_dagster.sources.mysql.snapshot import result_rows
from tests.chance import examples

END = b"\xfe\0\0\2\0"
REFUSED = b"\xff" + struct.pack("<H", 1317) + b"#70100interrupted"
Cell = bytes | None


class Socket:
    """A socket that gives so many bytes at a time, then is closed."""

    def __init__(self, data: bytes, size: int) -> None:
        self._file = io.BytesIO(data)
        self._size = size

    def recv_into(self, room: memoryview) -> int:
        """Receive a piece."""
        piece = self._file.read(min(len(room), self._size))
        room[: len(piece)] = piece
        return len(piece)


class Connection:
    """A connection of PyMySQL that has read ahead so many bytes of an answer."""

    def __init__(self, data: bytes, ahead: int, size: int) -> None:
        self._rfile = io.BufferedReader(io.BytesIO(data[:ahead]))
        self._sock = Socket(data[ahead:], size)


def packet(payload: bytes) -> bytes:
    """Return a payload in as many packets as it takes."""
    parts, full = [], (1 << 24) - 1
    for start in range(0, len(payload) + 1, full):
        part = payload[start : start + full]
        parts.append(len(part).to_bytes(3, "little") + b"\1" + part)
    return b"".join(parts)


def cell(value: Cell) -> bytes:
    """Return a value as the protocol has it."""
    if value is None:
        return b"\xfb"
    size = len(value)
    if size < 251:
        return bytes([size]) + value
    if size < 1 << 16:
        return b"\xfc" + struct.pack("<H", size) + value
    if size < 1 << 24:
        return b"\xfd" + size.to_bytes(3, "little") + value
    return b"\xfe" + struct.pack("<Q", size) + value


def read(data: bytes, columns: int, ahead: int = 5, size: int = 1 << 30) -> list[list[Cell]]:
    """Return the cells of all rows of an answer."""
    connection: Any = Connection(data, min(ahead, len(data)), size)
    found: list[list[Cell]] = []
    for rows in result_rows._rows(connection, columns):
        cells = [
            None if start < 0 else rows.source[start:end].tobytes()
            for start, end in rows.bounds.tolist()
        ]
        found += [cells[at : at + columns] for at in range(0, len(cells), columns)]
    return found


CELLS = st.none() | st.binary(max_size=5) | st.sampled_from([0, 250, 251, 65535, 65536]).map(bytes)


@settings(max_examples=examples(25))
@given(
    st.integers(1, 4).flatmap(
        lambda n: st.tuples(st.just(n), st.lists(st.lists(CELLS, min_size=n, max_size=n)))
    ),
    st.integers(1, 9000),
    st.integers(1, 100_000),
)
def test_every_cell_is_found(drawn: tuple[int, list[list[Cell]]], ahead: int, size: int) -> None:
    """Lengths of every form and nulls, in pieces of any size."""
    columns, rows = drawn
    data = b"".join(packet(b"".join(map(cell, row))) for row in rows) + packet(END)
    assert read(data, columns, ahead, size) == rows


def test_rows_larger_than_a_packet() -> None:
    """A row in several packets is one, also where it ends with a full packet; what follows is read."""
    full = (1 << 24) - 1
    for size in (full - 4, full, (1 << 24) + 3):
        rows: list[list[Cell]] = [[b"a", b"b"], [bytes(size), None], [b"c", b""]]
        data = b"".join(packet(b"".join(map(cell, row))) for row in rows) + packet(END)
        assert read(data, 2, size=1 << 20) == rows


def test_an_answer_that_ends_in_an_error() -> None:
    """The server's error is raised behind the rows before it; so is a connection that is closed."""
    with pytest.raises(pymysql.OperationalError, match="interrupted"):
        read(packet(cell(b"a")) + packet(REFUSED), 1)
    with pytest.raises(pymysql.OperationalError, match="closed"):
        read(packet(cell(b"a")), 1)


@pytest.mark.parametrize(
    "payload", [b"\5ab", b"\1ab", b"", b"\xfc\1", b"\xfe" + b"\xff" * 8 + b"x" * 9]
)
def test_what_is_no_row_is_refused(payload: bytes) -> None:
    """A length beyond the row, more than a row, and nothing at all."""
    with pytest.raises((CorruptLog, pymysql.MySQLError)):
        read(packet(payload) + packet(END), 1)
