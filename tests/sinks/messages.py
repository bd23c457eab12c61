"""Batches of messages for the tests of sinks, and waits that a slow machine does not break."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pyarrow as pa

from deltaforge_dagster.errors import SinkUnavailable
from deltaforge_dagster.sinks.base import MESSAGES, Origin, Sink, SinkBatch

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


def sent(sink: Sink, batch: SinkBatch, seconds: float = 120) -> int:
    """Open a sink and send, again when a slow machine lets the sink's own short time run out."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            sink.open()
            return sink.send(batch, allow)
        except SinkUnavailable:
            sink.close()
            if time.monotonic() > deadline:
                raise


def closed_during(sink: Sink, call: Callable[[], object], seconds: float = 20) -> SinkUnavailable:
    """Close a sink while another thread is in `call`, and return the error that ends the call.

    Closed until then: a thread that comes late begins to wait only after the first time.
    """
    errors: list[SinkUnavailable] = []

    def run() -> None:
        try:
            call()
        except SinkUnavailable as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive(), "nothing waited"
    deadline = time.monotonic() + seconds
    while thread.is_alive():
        assert time.monotonic() < deadline, "it waits on in spite of being closed"
        sink.close()
        thread.join(0.1)
    (error,) = errors
    return error
