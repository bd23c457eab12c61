"""Changes made by hand for tests of the run: frames, batches, and a source that plays them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from deltaforge_dagster.errors import (
    DeltaforgeError,
    NotAllowed,
    SourceMisconfigured,
    UnsupportedEvent,
)
from deltaforge_dagster.frame import CAPTURED
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import ChangeBatch, ReadLimits, SchemaRegistry, SourceNotes
from deltaforge_dagster.sources.findings import Finding
from deltaforge_dagster.sources.postgres.position import LsnPosition
from deltaforge_dagster.tables import TableDetails, TableSchema
from tests.e2e import deployment


def eventually(happened: Callable[[], object], seconds: float = 300.0) -> None:
    """Wait until something of this process has happened, or fail."""
    deployment.eventually(happened, seconds=seconds, every=0.005)


NOTHING = ChangeBatch(rows=None, end=None)


def frame(ids: Sequence[int], *, table: str = "orders", tx_id: int = 1) -> pa.RecordBatch:
    """Return inserts of the given ids, as a source captures them."""
    rows = [
        {
            "op": "c",
            "ts_us": 1_700_000_000_000_000 + one,
            "db": "shop",
            "schema": "public",
            "table": table,
            "before": None,
            "after": f'{{"id":{one}}}',
            "key": f'{{"id":{one}}}',
            "file": None,
            "pos": one,
            "row": index,
            "tx_id": str(tx_id),
            "tx_end": index == len(ids) - 1,
            "schema_version": "sha256:0",
            "schema_sequence": 1,
            "event_id": f"00000000-0000-7000-8000-{one:012d}",
            "ddl": None,
            "topic": None,
            "route_key": None,
            "headers": None,
            "raw_payload": False,
            "tags": None,
        }
        for index, one in enumerate(ids)
    ]
    return pa.RecordBatch.from_pylist(rows, schema=CAPTURED)


def transaction(*ids: int) -> ChangeBatch:
    """Return a whole transaction that ends at the position of its last id."""
    return ChangeBatch(rows=frame(ids, tx_id=ids[-1]), end=LsnPosition(ids[-1], ids[-1]))


def unfinished(*ids: int) -> ChangeBatch:
    """Return changes of a transaction that is still open."""
    return ChangeBatch(rows=frame(ids), end=None)


def passed(lsn: int) -> ChangeBatch:
    """Return idle progress up to `lsn`."""
    return ChangeBatch(rows=None, end=LsnPosition(lsn))


@dataclass
class PlayedSource:
    """A source that plays batches: those after the position it is asked for, then waits.

    An error in the list is raised once, when the reader first reaches it.
    """

    batches: list[ChangeBatch | DeltaforgeError]
    confirmed: list[Position] = field(default_factory=list)
    readers: list[Position] = field(default_factory=list)
    closed: threading.Event = field(default_factory=threading.Event)
    findings: list[Finding] = field(default_factory=list)

    def head(self) -> LsnPosition:
        """Return the end of the newest transaction."""
        ends = [getattr(one, "end", None) for one in self.batches]
        return max((end for end in ends if end is not None), default=LsnPosition(0))

    def ensure_start(self, at: Position | None = None) -> LsnPosition:
        """Begin before everything."""
        return LsnPosition(0)

    def reset(self, *, dry_run: bool) -> list[str]:
        """Keep nothing."""
        del dry_run
        return []

    def definitions(self, start: Position) -> dict[str, str]:
        """Return nothing: the log says everything itself."""
        return {}

    def identity(self) -> str:
        """Return always the same."""
        return "played"

    def relocate(self, position: Position, previous: str) -> Position:
        """Go on where reading ended."""
        del previous
        return position

    def tables(self) -> list[str]:
        """Know no catalog."""
        return []

    def schema(self, table: str) -> TableSchema:
        """Know no catalog."""
        raise SourceMisconfigured(table)

    def database(self) -> str | None:
        """Return always the same."""
        return "shop"

    def details(self, table: str) -> TableDetails:
        """Know no catalog."""
        raise SourceMisconfigured(table)

    def preflight(
        self, position: Position | None, as_of: float | None, *, snapshot: bool = False
    ) -> list[Finding]:
        """Find nothing."""
        del position, as_of, snapshot
        return []

    def maintain(self, position: Position | None) -> list[Finding]:
        """Return `findings`, which a test sets."""
        del position
        return list(self.findings)

    def has_changes(self, after: Position) -> bool:
        """Compare with the newest transaction."""
        return after < self.head()

    def read(
        self, start: Position, limits: ReadLimits, registry: SchemaRegistry
    ) -> Generator[ChangeBatch]:
        """Play what lies after `start`."""
        self.closed.clear()
        self.readers.append(start)
        for index, one in enumerate(list(self.batches)):
            if isinstance(one, DeltaforgeError):
                if one in self.batches:
                    self.batches.remove(one)
                    raise one
            elif one.end is None or start < one.end or index < 0:
                yield one
        while not self.closed.wait(0.005):
            yield NOTHING

    def read_again(
        self, start: Position, limits: ReadLimits, registry: SourceNotes
    ) -> Iterator[ChangeBatch]:
        """Refuse: the slot holds what is not confirmed, and what was confirmed is gone.

        Raises:
            NotAllowed: Always.
        """
        raise NotAllowed(
            "PostgreSQL's log cannot be captured again: the server gives it to a slot once, and "
            "forgets what was confirmed; only MySQL keeps its log for other readers"
        )

    def decode_parked(
        self, events: Iterator[bytes], fix: str, position: Position, registry: SourceNotes
    ) -> Iterator[pa.RecordBatch]:
        """Refuse: nothing of this source is ever held, since its log describes every row."""
        raise UnsupportedEvent("events that this source never holds")

    def confirm(self, position: Position) -> None:
        """Note what may be forgotten."""
        self.confirmed.append(position)

    def close(self) -> None:
        """End the reading."""
        self.closed.set()
