"""What tests of sinks do: send with patience, and close a sink while it is in use."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from deltaforge_dagster.errors import SinkUnavailable
from deltaforge_dagster.sinks.base import Sink, SinkBatch
from deltaforge_dagster.testing.sinks import allow


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
