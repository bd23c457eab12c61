from __future__ import annotations

import hashlib

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from deltaforge_dagster.kernels.sha256 import DIGITS, PADDING, WORDS, write_sha256


def sha256(message: bytes) -> str:
    """Return the kernel's digits."""
    room = np.full(len(message) + PADDING, 255, np.uint8)  # what is behind a message means nothing
    room[: len(message)] = np.frombuffer(message, np.uint8)
    out = np.zeros(DIGITS + 2, np.uint8)
    assert write_sha256(room, len(message), np.full(WORDS, -1, np.int64), out, 1) == DIGITS + 1
    return out.tobytes()[1:-1].decode()


@given(st.binary(max_size=300))
@example(b"")
@example(bytes(55))
@example(bytes(56))
@example(bytes(64))
def test_is_the_hash_of_the_standard_library(message: bytes) -> None:
    """The kernel's digits are those of `hashlib.sha256`, wherever the last block ends."""
    assert sha256(message) == hashlib.sha256(message).hexdigest()
