"""Reads back what has arrived in a sink, with the server's usual client.

The demo's proof and the benchmarks use it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson
import redis

TIMEOUT_SECONDS = 120
"""How long Redis may take to respond; the default of its client is too short for a busy machine."""

_PAGE = 5_000


@dataclass(frozen=True, slots=True)
class Arrival:
    """An event in a sink; `at_ms` is when the sink received it, None if that is not recorded."""

    event: dict[str, Any]
    at_ms: int | None = None


def read_redis(uri: str, pattern: str) -> Iterator[Arrival]:
    """Yield the entries of the streams that match `pattern`, stream by stream, in order.

    The arrival time is taken from the entry's id, where Redis puts it (documentation of XADD).
    """
    with redis.Redis.from_url(uri, socket_timeout=TIMEOUT_SECONDS) as client:
        for stream in sorted(client.scan_iter(match=pattern, _type="stream")):
            start = b"-"
            while page := client.xrange(stream, min=start, count=_PAGE):
                for entry_id, fields in page:
                    event = orjson.loads(fields[b"df-event"])
                    yield Arrival(event, int(entry_id.partition(b"-")[0]))
                start = b"(" + page[-1][0]


def percentile(ordered: list[int], share: float) -> int | None:
    """Return the value below which a `share` (0 to 1) of the sorted values lies; None if empty."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else None
