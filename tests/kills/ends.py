"""The two ends of a pipeline under test: what a database and a sink are to the harness."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, Protocol

from tests.kills.checker import Arrived
from tests.kills.workload import Change, Connection

Row = dict[str, Any]


class Database(Protocol):
    """A source with the two tables of the workload."""

    def connect(self) -> Connection:
        """Return a connection for a writer."""
        ...

    def source(self, name: str, *, chunk_rows: int) -> str:
        """Return the `source` of a pipeline file, as YAML in braces."""
        ...

    def rows(self) -> dict[int, Row]:
        """Return the rows of the table, by their keys."""
        ...

    def confirmed(self) -> int | None:
        """Return the place before which the source has forgotten its log; None if it keeps none."""
        ...


MESSAGE_STEPS: tuple[str, ...] = ("segment-encoded", "sink-sent")
TABLE_STEPS: tuple[str, ...] = (
    "table-commit-planned",
    "table-commit-staged",
    "table-committed",
    "table-commit-complete",
)


class Destination(Protocol):
    """An empty sink of its own, and all that ever arrives in it.

    Attributes:
        steps: The failpoints that only delivery to its kind passes, in their order.
    """

    steps: tuple[str, ...]

    def sink(self, *, exactly_once: bool) -> str:
        """Return a sink of a pipeline file, as YAML in braces; its id is `sink`."""
        ...

    def settle(self) -> None:
        """Wait until what senders have left on its way has arrived, while nobody sends more."""
        ...

    def lengths(self) -> tuple[int, ...]:
        """Return how many messages each partition has."""
        ...

    def values(self) -> list[list[str | bytes]]:
        """Return every message of every partition, in order."""
        ...


def parse(value: str | bytes) -> Arrived:
    """Return what a native event says."""
    event = json.loads(value)
    row = event["before"] if event["op"] == "d" else event["after"]
    return Arrived(Change(row["id"], row["version"], event["op"]), event["event_id"])


def wait_until_still(value: Callable[[], object], seconds: float) -> None:
    """Wait until a value has stayed the same for that long."""
    last, since = value(), time.monotonic()
    while time.monotonic() - since < seconds:
        time.sleep(0.02)
        if (now := value()) != last:
            last, since = now, time.monotonic()
