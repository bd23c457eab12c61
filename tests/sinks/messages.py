"""Batches of messages for the tests of sinks."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from deltaforge_dagster.sinks.base import MESSAGES, Origin, SinkBatch

ORIGIN = Origin(
    pipeline="shop",
    uid="uid-1",
    lineage="lineage-1",
    source="orders-db",
    start='{"lsn": "0/10"}',
    end='{"lsn": "0/20"}',
    rows=100_000,
)
"""Where the batches of a sink that keeps its position come from."""


def messages(
    rows: list[tuple[str, str]],
    *,
    first: int = 0,
    each: int = 1,
    replay: str | None = None,
    origin: Origin | None = None,
) -> SinkBatch:
    """Return a batch of (destination, value), `each` of one change.

    Every third ordinal is an event filtered out.
    """
    columns = [
        {
            "ordinal": (first + number) // each * 3 // 2,
            "destination": destination,
            "key": f"k{number % 7}",
            "value": value,
            "event_id": f"e{first + number}",
            "idempotency_key": f"i{first + number}",
            "headers": None,
        }
        for number, (destination, value) in enumerate(rows)
    ]
    rows_of_segment = pa.RecordBatch.from_pylist(columns, schema=MESSAGES)
    return SinkBatch(1, "5e9", rows_of_segment, replay, origin)


def allow() -> None:
    """A guard that lets everything pass."""


def refuse_from(call: int, error: Exception) -> tuple[Callable[[], None], list[int]]:
    """Return a guard that raises from its `call`th call on, and the list that counts its calls."""
    calls: list[int] = []

    def guard() -> None:
        calls.append(len(calls) + 1)
        if calls[-1] >= call:
            raise error

    return guard, calls
