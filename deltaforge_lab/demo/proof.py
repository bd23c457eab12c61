"""The demo's proof: compares what a sink holds with what was written.

A `Proof` reads every event of one sink, in the sink's order, and counts the changes that are lost
(written, but missing), duplicated (present more than once), out of order (after a later change of
the same key) and wrong (never written, or with other values). It knows only the workload's record
and the events, not the pipeline.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson
import redis

from deltaforge_lab.arrivals import TIMEOUT_SECONDS, Arrival
from deltaforge_lab.demo.workload import TABLES, DemoTable, Record

_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class SinkVerdict:
    """The result for one sink; its content is correct if all counts but `delivered` are 0."""

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
    """Compares the content of one sink with the record of what was written.

    Args:
        record: The complete record of the workload.
        tables: The tables that the workload wrote to.
    """

    def __init__(self, record: Record, tables: Sequence[DemoTable] = TABLES) -> None:
        self._record = record
        self._tables = {table.name: table for table in tables}
        self._seen: dict[tuple[str, int], int] = {}
        """For each key, a bit set of the steps seen; the highest bit is the latest change."""
        self._delivered = self._matched = 0
        self._duplicated = self._out_of_order = self._wrong = 0

    def see(self, event: dict[str, Any]) -> None:
        """Process the next event of the sink."""
        self._delivered += 1
        step = self._step(event)
        if step is None:
            self._wrong += 1
            return
        key, number = step
        seen = self._seen.get(key, 0)
        if seen >> number & 1:
            self._duplicated += 1
            return
        if seen >> number:
            self._out_of_order += 1
        self._seen[key] = seen | 1 << number
        self._matched += 1

    def verdict(self) -> SinkVerdict:
        """Return the result for all events seen so far."""
        return SinkVerdict(
            delivered=self._delivered,
            lost=self._record.total - self._matched,
            duplicated=self._duplicated,
            out_of_order=self._out_of_order,
            wrong=self._wrong,
        )

    def _step(self, event: dict[str, Any]) -> tuple[tuple[str, int], int] | None:
        """Return key and step number of the written change that `event` matches, None if none."""
        try:
            op, before, after = event["op"], event["before"], event["after"]
            table = self._tables[event["source"]["table"]]
            image = before if op == "d" else after
            key = (table.name, image["id"])
            steps = self._record.steps[key]
            if op == "d" and not table.full_identity:
                # The old row has only the key; such a key is deleted at most once.
                number = next(number for number, (name, _) in enumerate(steps) if name == "d")
                return (key, number) if after is None else None
            number = steps.index((op, image["version"]))
        except (KeyError, TypeError, ValueError, StopIteration):
            return None
        as_written = image == table.row(key[1], image["version"])
        return (key, number) if as_written and (after is None) == (op == "d") else None


def read_lines(directory: Path) -> Iterator[Arrival]:
    """Yield the events of each `*.jsonl` file of a directory, in order."""
    for path in sorted(directory.glob("*.jsonl")):
        with path.open("rb") as lines:
            for line in lines:
                yield Arrival(orjson.loads(line))


class ArrivalCounter:
    """Counts the events in the sinks while they fill, without reading file contents twice.

    A context manager.

    Args:
        uri: URI of the Redis server.
        pattern: Glob pattern of its streams.
        directory: Directory of the `*.jsonl` files.
    """

    def __init__(self, uri: str, pattern: str, directory: Path) -> None:
        self._client = redis.Redis.from_url(uri, socket_timeout=TIMEOUT_SECONDS)
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
    """Return the sorted latencies, in ms, of changes committed from `since_ms` to `until_ms`."""
    return sorted(
        arrival.at_ms - arrival.event["ts_ms"]
        for arrival in arrivals
        if arrival.at_ms is not None and since_ms <= arrival.event["ts_ms"] < until_ms
    )


def arrival_rate(arrivals: Iterable[Arrival], since_ms: int) -> float | None:
    """Return how many changes committed since `since_ms` arrived per second; None if none did.

    The rate is taken over the time from `since_ms` to the last arrival.
    """
    arrived = [
        arrival.at_ms
        for arrival in arrivals
        if arrival.at_ms is not None and arrival.event["ts_ms"] >= since_ms
    ]
    return len(arrived) * 1000 / max(max(arrived) - since_ms, 1) if arrived else None
