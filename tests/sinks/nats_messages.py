"""Sinks of NATS, and messages for them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pyarrow as pa
import pytest

from deltaforge_dagster.sinks.base import MESSAGES, Origin, SinkBatch
from deltaforge_dagster.sinks.nats import answers as nats_answers
from deltaforge_dagster.sinks.nats import pack as nats_pack
from deltaforge_dagster.sinks.nats.link import NatsLink
from deltaforge_dagster.sinks.nats.sink import NatsSink
from deltaforge_lab.servers.nats import NatsServer

Row = dict[str, str | int | None]
MakeSink = Callable[..., NatsSink]


def opened(server: NatsServer, stream: str, **usual: object) -> Iterator[MakeSink]:
    """Yield a function that opens a sink on a stream, `usual` unless told otherwise; close all of them."""
    made = []

    def make(sink_id: str = "sink", pattern: str | None = None, **options: object) -> NatsSink:
        options = {"stream": stream, **usual, **options}
        pattern = pattern or f"{stream}.>"
        sink = NatsSink(sink_id, server.url, pattern, **options)  # type: ignore[arg-type]
        made.append(sink)
        sink.open()
        return sink

    yield make
    for sink in made:
        sink.close()


def row(number: int, subject: str, **changes: str | int | None) -> Row:
    """Return one message; its numbers say which it is."""
    return {
        "ordinal": number,
        "destination": subject,
        "key": f"k{number % 7}",
        "value": f'{{"n":{number}}}',
        "event_id": f"e{number}",
        "idempotency_key": f"i{number}",
        "headers": None,
        "change_id": None,
        **changes,
    }


def batch(
    rows: list[Row], replay: str | None = None, origin: Origin | None = None, segment: int = 1
) -> SinkBatch:
    """Return a batch of messages."""
    columns = pa.RecordBatch.from_pylist(rows, schema=MESSAGES)
    return SinkBatch(segment, "segment", columns, replay, origin)


def numbered(
    subject: str,
    count: int,
    first: int = 0,
    *,
    size: int = 20,
    origin: Origin | None = None,
    prefix: str = "i",
) -> SinkBatch:
    """Return a batch of `count` messages whose values are numbers."""
    rows = range(first, first + count)
    return batch(
        [row(n, subject, value=str(n).ljust(size), idempotency_key=f"{prefix}{n}") for n in rows],
        origin=origin,
    )


def allow() -> None:
    """A guard that lets everything pass."""


@contextmanager
def amid(block: int, messages: int, act: Callable[[float], None]) -> Iterator[None]:
    """Call a function, with the time when an answer is due, once so many messages of a block have been sent."""
    transmit = NatsLink.transmit
    blocks = itertools.count()

    def interrupted(link: NatsLink, data: memoryview | bytes, deadline: float) -> None:
        if bytes(data[:4]) != b"HPUB" or next(blocks) != block:
            transmit(link, data, deadline)
            return
        cut = [found.start() for found in re.finditer(b"HPUB ", data)][messages]
        transmit(link, data[:cut], deadline)
        act(deadline)
        transmit(link, data[cut:], deadline)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NatsLink, "transmit", interrupted)
        yield


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """Have machine code ready: these tests look at the clock."""
    nats_pack.warm()
    nats_answers.warm()
