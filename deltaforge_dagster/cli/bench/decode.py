"""Measure the decoder alone: rows of pgoutput a second, on one core, from memory.

The stream is made up (`samples.orders`: inserts of six columns, 100 a transaction), so the numbers
say what the kernels can do, not what a server sends. They are measured in processor time, which
other programs on the machine disturb less than the clock.
"""

from __future__ import annotations

import time

import numpy as np

from deltaforge_dagster.sources.postgres import decoder
from deltaforge_dagster.sources.postgres.samples import orders

PIECE = 4 << 20


def bench_decode(rows: int = 500_000, repeats: int = 3) -> dict[str, float]:
    """Decode `rows` rows `repeats` times in pieces of 4 MiB and return the best of them.

    Returns:
        `rows_per_second` and `megabytes_per_second` (of log) of one core; `times_copy`: how many
        times longer decoding takes than copying the same bytes; `log_bytes_per_row`.
    """
    stream = np.frombuffer(orders(rows), np.uint8)
    decoder.warm()
    copying = min(_seconds_to_copy(stream) for _ in range(repeats))
    decoding = min(_seconds_to_decode(stream) for _ in range(repeats))
    return {
        "rows": rows,
        "log_bytes_per_row": stream.size / rows,
        "rows_per_second": rows / decoding,
        "megabytes_per_second": stream.size / decoding / 1e6,
        "times_copy": decoding / copying,
    }


def _seconds_to_copy(stream: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> float:
    target = np.zeros_like(stream)  # written once, so that no page is missing
    begun = time.process_time()
    for at in range(0, stream.size, PIECE):
        target[at : at + PIECE] = stream[at : at + PIECE]
    return time.process_time() - begun


def _seconds_to_decode(stream: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> float:
    made = decoder.make_up()
    begun = time.process_time()
    at = 0
    while at < stream.size:
        piece = stream[at : at + PIECE]
        at += made.feed(piece, piece.size).consumed
    return time.process_time() - begun
