"""The demo's proof: what a sink holds, compared with what was written.

A `Proof` is fed every event of one sink, in the order in which the sink holds them, and says what
is lost (written, not there), duplicated (there again), out of order (there after a later change of
the same key) and wrong (never written, or with other values). It knows the workload's record and
the events, and nothing of the pipeline.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson
import redis

from deltaforge_dagster.cli.demo_workload import TABLES, Record, Table

_PAGE = 5_000
_TIMEOUT_SECONDS = 120
"""How long Redis may take for one answer; the default of its client is too short for a busy machine."""
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Arrival:
    """An event as a sink holds it; `at_ms` is when the sink took it, where the sink knows."""

    event: dict[str, Any]
    at_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is wrong with a sink's content: nothing, if all but `delivered` are 0."""

    delivered: int
    lost: int
    duplicated: int
    out_of_order: int
    wrong: int

    @property
    def good(self) -> bool:
        """Whether every change is there, once, in order, as written."""
        return not (self.lost or self.duplicated or self.out_of_order or self.wrong)


class Proof:
    """Compares one sink with the record of what was written.

    Args:
        record: The workload's, complete.
        tables: Those that it wrote to.
    """

    def __init__(self, record: Record, tables: Sequence[Table] = TABLES) -> None:
        self._record = record
        self._tables = {table.name: table for table in tables}
        self._seen: dict[tuple[str, int], int] = {}
        """Bits: which steps of a key have been seen; the highest one is the latest change."""
        self._delivered = self._found = 0
        self._duplicated = self._out_of_order = self._wrong = 0

    def see(self, event: dict[str, Any]) -> None:
        """Take the next event that the sink holds."""
        self._delivered += 1
        step = self._step(event)
        if step is None:
            self._wrong += 1
            return
        key, place = step
        seen = self._seen.get(key, 0)
        if seen >> place & 1:
            self._duplicated += 1
            return
        if seen >> place:
            self._out_of_order += 1
        self._seen[key] = seen | 1 << place
        self._found += 1

    def verdict(self) -> Verdict:
        """Return the result over everything seen."""
        return Verdict(
            delivered=self._delivered,
            lost=self._record.total - self._found,
            duplicated=self._duplicated,
            out_of_order=self._out_of_order,
            wrong=self._wrong,
        )

    def _step(self, event: dict[str, Any]) -> tuple[tuple[str, int], int] | None:
        """Return key and number of the written change that `event` is, None if it is none."""
        try:
            op, before, after = event["op"], event["before"], event["after"]
            table = self._tables[event["source"]["table"]]
            image = before if op == "d" else after
            key = (table.name, image["id"])
            steps = self._record.steps[key]
            if op == "d" and not table.full_identity:
                # The old row is the key alone; such a key is deleted once at most.
                place = next(place for place, (name, _) in enumerate(steps) if name == "d")
                return (key, place) if after is None else None
            place = steps.index((op, image["version"]))
        except (KeyError, TypeError, ValueError, StopIteration):
            return None
        as_written = image == table.row(key[1], image["version"])
        return (key, place) if as_written and (after is None) == (op == "d") else None


def read_redis(uri: str, pattern: str) -> Iterator[Arrival]:
    """Yield what the streams that match `pattern` hold, stream by stream, in order.

    The time of arrival is the one that Redis puts into each entry's id (manual of XADD).
    """
    with redis.Redis.from_url(uri, socket_timeout=_TIMEOUT_SECONDS) as client:
        for stream in sorted(client.scan_iter(match=pattern, _type="stream")):
            start = b"-"
            while page := client.xrange(stream, min=start, count=_PAGE):
                for entry, fields in page:
                    event = orjson.loads(fields[b"df-event"])
                    yield Arrival(event, int(entry.partition(b"-")[0]))
                start = b"(" + page[-1][0]


def read_lines(directory: Path) -> Iterator[Arrival]:
    """Yield the events of each `*.jsonl` file of a directory, in order."""
    for path in sorted(directory.glob("*.jsonl")):
        with path.open("rb") as lines:
            for line in lines:
                yield Arrival(orjson.loads(line))


class ArrivalCounter:
    """Counts what sinks hold while they fill, reading nothing twice. A context manager.

    Args:
        uri: The Redis server.
        pattern: Its streams.
        directory: The files' directory.
    """

    def __init__(self, uri: str, pattern: str, directory: Path) -> None:
        self._client = redis.Redis.from_url(uri, socket_timeout=_TIMEOUT_SECONDS)
        self._pattern = pattern
        self._directory = directory
        self._read: dict[Path, int] = {}
        self._lines = 0

    def count(self) -> dict[str, int]:
        """Return how many events each sink holds now."""
        streams = list(self._client.scan_iter(match=self._pattern, _type="stream"))
        for path in self._directory.glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                while block := file.read(_BLOCK):
                    self._lines += block.count(b"\n")
                self._read[path] = file.tell()
        return {"redis": sum(map(self._client.xlen, streams)), "files": self._lines}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._client.close()


def latencies(arrivals: Iterable[Arrival], since_ms: int, until_ms: int) -> list[int]:
    """Return, sorted, how long changes committed in a span of time took to arrive, in ms."""
    return sorted(
        arrival.at_ms - arrival.event["ts_ms"]
        for arrival in arrivals
        if arrival.at_ms is not None and since_ms <= arrival.event["ts_ms"] < until_ms
    )


def arrival_rate(arrivals: Iterable[Arrival], since_ms: int) -> float | None:
    """Return how many of the changes committed from a time on arrived in a second, None if none did.

    The time is that from `since_ms` to the last arrival.
    """
    arrived = [
        arrival.at_ms
        for arrival in arrivals
        if arrival.at_ms is not None and arrival.event["ts_ms"] >= since_ms
    ]
    return len(arrived) * 1000 / max(max(arrived) - since_ms, 1) if arrived else None


def percentile(ordered: list[int], share: float) -> int | None:
    """Return the value below which `share` of the sorted values lie, None without values."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else None
