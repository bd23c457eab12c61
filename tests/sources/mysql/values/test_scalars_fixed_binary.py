"""MariaDB's types of fixed size, against Python's and against MariaDB's own text."""

import ipaddress
import uuid
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaforge_dagster.kernels.runtime import read_only
from deltaforge_dagster.sources.mysql.values.scalars import (
    INET4_ROOM,
    INET6_ROOM,
    UUID_ROOM,
    write_inet4,
    write_inet6,
    write_uuid,
)
from deltaforge_lab.servers.mysql import execute
from tests.fix_mysql import MysqlVersion

words = st.lists(st.sampled_from([0, 0, 0, 1, 0xFFFF, 0xDB8, 0x12]), min_size=8, max_size=8)


def written(write: Callable[..., int], content: bytes, room: int) -> str:
    """Return what a kernel writes, from what the log has of `content`, in the room it asks for."""
    out = np.zeros(room, np.uint8)
    stripped = content.rstrip(b"\0")
    end = write(read_only(b"#" + stripped), 1, 1 + len(stripped), out, 0)
    text = out[:end].tobytes().decode()
    assert text[0] == text[-1] == '"'
    return text[1:-1]


def test_they_are_those_of_python() -> None:
    """Zero bytes at the end come back; every length of a number fits."""
    for text in ("123e4567-e89b-12d3-a456-426655440000", str(uuid.UUID(int=0)), "f" * 32):
        assert written(write_uuid, uuid.UUID(text).bytes, UUID_ROOM) == str(uuid.UUID(text))
    for text in ("0.0.0.0", "255.255.255.255", "10.100.9.0"):
        assert written(write_inet4, ipaddress.IPv4Address(text).packed, INET4_ROOM) == text
    longest = "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"
    assert written(write_inet6, ipaddress.IPv6Address(longest).packed, INET6_ROOM) == longest


@given(words)
def test_an_inet6_reads_back(numbers: list[int]) -> None:
    """Whatever is left out or written in another way, it is the same address."""
    content = b"".join(number.to_bytes(2, "big") for number in numbers)

    assert ipaddress.IPv6Address(written(write_inet6, content, INET6_ROOM)).packed == content


@pytest.mark.mysql
def test_an_inet6_is_written_as_mariadb_does(mysql_version: MysqlVersion) -> None:
    """Runs of zeros at both ends, in the middle and twice, of one word and more; IPv4 inside."""
    shapes = [
        bytes(16), b"\0" * 15 + b"\1", b"\0" * 12 + b"\1\2\3\4", b"\0" * 10 + b"\xff\xff\1\2\3\4",
        b"\0" * 10 + b"\xff\xfe\1\2\3\4", b"\0" * 8 + b"\xff\xff\0\0\1\2\3\4", b"\1" + bytes(15),
        b"\x20\x01\x0d\xb8" + bytes(10) + b"\0\1", b"\0\1\0\0\0\0\0\1\0\0\0\0\0\0\0\1",
        b"\0\1\0\0\0\1\0\0\0\1\0\1\0\1\0\1", bytes(2) + b"\0\1" * 7, b"\0\1" * 7 + bytes(2),
        bytes(14) + b"\xff\xff", bytes(12) + b"\0\1\0\0",
    ]  # fmt: skip
    dsn = mysql_version("mariadb").create_database()
    execute(dsn, "CREATE TABLE t (id int PRIMARY KEY, a inet6)")
    for number, shape in enumerate(shapes):
        execute(dsn, f"INSERT INTO t VALUES ({number}, x'{shape.hex()}')")

    found = [str(row[0]) for row in execute(dsn, "SELECT a FROM t ORDER BY id")]

    assert [written(write_inet6, shape, INET6_ROOM) for shape in shapes] == found
