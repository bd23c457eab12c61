"""A wrapper that makes any sink fail on command, for tests and failure drills.

The environment variable `DELTAFORGE_SINK_FAULTS` names a directory. While this directory contains a
file named after a sink's id, that sink misbehaves in every process. The product finds `wrap` by the
entry point of the variable's name in the group `deltaforge.sink_wrappers`. The file's content says
how the sink misbehaves:

==================  ====================================================================
`fail_before`       nothing is delivered, the sink cannot be reached (`open`, `send`)
`fail_during`       half of the batch is delivered, then the connection breaks (`send`)
`fail_after`        the batch is delivered, but the acknowledgement is lost (`send`)
`hang`              blocks until the file is removed or the sink closed (`open`, `send`)
`slow SECONDS`      waits that long, then delivers (`open`, `send`)
==================  ====================================================================

With the suffix ` once`, the first call that is affected removes the file, so that the fault happens
for one call of one process only. A `hang once` lasts until the sink is closed.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, replace
from pathlib import Path

from deltaforge_dagster.errors import SettingsError, SinkUnavailable
from deltaforge_dagster.sinks.base import (
    SendGuard,
    Sink,
    SinkBatch,
    SinkPosition,
    Traffic,
    traffic_of,
    whole_ordinals,
)

_FAULT = re.compile(
    r"(?P<name>fail_before|fail_during|fail_after|hang|slow (?P<seconds>[0-9]+(\.[0-9]+)?))"
    r"(?P<once> once)?"
)
_HANG_POLL = 0.02


@dataclass(frozen=True, slots=True)
class _Fault:
    name: str
    seconds: float
    once: bool


def wrap(sink: Sink, sink_id: str, directory: str) -> Sink:
    """Return the sink, wrapped so that files in `directory` make it fail."""
    return FaultySink(sink, sink_id, Path(directory))


class FaultySink:
    """Wraps `inner` and injects the fault that the file `sink_id` in `directory` describes."""

    def __init__(self, inner: Sink, sink_id: str, directory: Path) -> None:
        self._inner = inner
        self._sink_id = sink_id
        self._file = directory / sink_id
        self._closed = threading.Event()

    @property
    def exactly_once(self) -> bool:
        """Whether the sink keeps its own position."""
        return self._inner.exactly_once

    @property
    def takes_parts(self) -> bool:
        """Whether the sink takes several parts at once."""
        return self._inner.takes_parts

    @property
    def traffic(self) -> Traffic | None:
        """The traffic counts of the sink's client library."""
        return traffic_of(self._inner)

    def open(self) -> None:
        """Open the sink, unless the fault prevents that."""
        self._closed.clear()
        fault = self._read()
        if fault is not None and fault.name in {"fail_before", "hang", "slow"}:
            self._strike_before(fault)
        self._inner.open()

    def position(self) -> SinkPosition | None:
        """Return the sink's own position."""
        return self._inner.position()

    def send(self, batch: SinkBatch, guard: SendGuard) -> int:
        """Deliver the batch as far as the fault allows."""
        fault = self._read()
        if fault is None or not self._strike_before(fault):
            return self._inner.send(batch, guard)
        if fault.name == "fail_during":
            half = batch.messages.num_rows // 2  # of the last part
            if half:
                part = batch.messages.slice(0, whole_ordinals(batch.messages, 0, half))
                self._inner.send(replace(batch, messages=part), guard)
        else:
            self._inner.send(batch, guard)
        raise self._failure(fault.name)

    def close(self) -> None:
        """Close the sink and end a hang."""
        self._closed.set()
        self._inner.close()

    def _strike_before(self, fault: _Fault) -> bool:
        """Apply the fault before a delivery; return whether it also affects the delivery."""
        if fault.once:
            try:
                self._file.unlink()
            except FileNotFoundError:
                return False  # the fault has happened in another process
        if fault.name == "fail_before":
            raise self._failure(fault.name)
        if fault.name == "slow" and self._closed.wait(fault.seconds):
            raise self._failure("slow, closed meanwhile")
        if fault.name == "hang":
            while fault.once or ((current := self._read()) is not None and current.name == "hang"):
                if self._closed.wait(_HANG_POLL):
                    raise self._failure("hang, closed meanwhile")
        return fault.name in {"fail_during", "fail_after"}

    def _failure(self, what: str) -> SinkUnavailable:
        return SinkUnavailable(f"sink {self._sink_id}: injected fault ({what})")

    def _read(self) -> _Fault | None:
        try:
            text = self._file.read_text().strip()
        except FileNotFoundError:
            return None
        if not text:
            return None  # the file is still being written
        parsed = _FAULT.fullmatch(text)
        if parsed is None:
            raise SettingsError(f"{self._file}: unknown fault {text[:40]!r}")
        name = parsed["name"].partition(" ")[0]
        return _Fault(name, float(parsed["seconds"] or 0), once=parsed["once"] is not None)
