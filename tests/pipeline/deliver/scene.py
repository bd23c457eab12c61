"""One sink of a pipeline, with a real store, journal and lease, and what stands for Spark and the server."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import cast

import pyarrow as pa
import pytest

from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.errors import Undeliverable
from deltaforge_dagster.journal import writer as writing
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.committed import PendingSegments
from deltaforge_dagster.pipeline.delivery import DeliveryContext
from deltaforge_dagster.pipeline.meters import SinkMeter
from deltaforge_dagster.pipeline.run_context import ActiveLease, LeasedRun
from deltaforge_dagster.sinks.base import MESSAGES, SendGuard, SinkBatch, SinkPosition
from deltaforge_dagster.sources.postgres.position import LsnPosition
from deltaforge_dagster.state.records import CheckpointRow, NewSegment, SegmentRow
from deltaforge_dagster.state.store import FencedWriter, StateStore
from tests.pipeline.changes import frame

NAME = "orders"
SINK = "redis"

PIPELINE = f"""
metadata: {{name: {NAME}, tenant: acme}}
spec:
  source: {{type: postgres, config: {{id: db, dsn: "postgres://u@localhost/x", slot: s,
    publication: p, tables: [public.orders]}}}}
  sinks: [{{type: redis, config: {{id: {SINK}, uri: "redis://localhost", stream: x}}}}]
  engine:
    deliver: {{backoff_initial_seconds: BACKOFF, backoff_max_seconds: 40}}
    checkpoint: {{after: 4}}
  journal: {{enabled: true}}
"""


def lsn(number: int) -> str:
    """Return the position after the event of that number."""
    return LsnPosition(number, number).to_json()


def event_id(number: int) -> str:
    """Return the id of an event."""
    return f"00000000-0000-7000-8000-{number:012d}"


@dataclass
class Recorder:
    """A sink that remembers what it got.

    Attributes:
        sent: Segment and ordinal of each message that has arrived.
        errors: What `send` raises next, one after the other, with nothing sent.
        refused: Messages that it can never take.
        detail: What it says about them.
        parts: The number of messages in each part of each batch.
        opened: How often it was opened.
        closed: How often it was closed.
    """

    sent: list[tuple[int, int]] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    refused: set[tuple[int, int]] = field(default_factory=set)
    detail: str = ""
    exactly_once: bool = False
    takes_parts: bool = False
    parts: list[list[int]] = field(default_factory=list)
    opened: int = 0
    closed: int = 0

    def open(self) -> None:
        """Count it."""
        self.opened += 1

    def position(self) -> SinkPosition | None:
        """Return None: it keeps none."""
        return None

    def send(self, batch: SinkBatch, guard: SendGuard) -> int:
        """Take the messages up to one that is refused."""
        guard()
        if self.errors:
            raise self.errors.pop(0)
        parts = [part.column("ordinal").to_pylist() for part in batch.parts]
        self.parts.append([len(part) for part in parts])
        ordinals = cast("list[int]", [*itertools.chain.from_iterable(parts)])
        for ordinal in ordinals:
            if (batch.segment, ordinal) in self.refused:
                raise Undeliverable("too large", ordinal, "too_large", self.detail)
            self.sent.append((batch.segment, ordinal))
        return ordinals[-1]

    def close(self) -> None:
        """Count it."""
        self.closed += 1


class Encoded:
    """Stands for `EncodedSegments`: one message for each row, three in a batch."""

    def __init__(self, rows: Sequence[SegmentRow]) -> None:
        self.last_segment = rows[-1].segment
        self.told: list[str] = []
        self._rows = {row.segment: row for row in rows}

    def last_ordinal(self, segment: int) -> int:
        """Return the last ordinal of a segment."""
        return self._rows[segment].rows - 1

    def batches(
        self, sink_id: str, segment: int, after_ordinal: int, *, set_aside: bool = False
    ) -> Iterator[SinkBatch]:
        """Yield the messages after an ordinal."""
        del sink_id, set_aside
        row = self._rows[segment]
        for first in range(after_ordinal + 1, row.rows, 3):
            yield batch(row, *range(first, min(first + 3, row.rows)))

    def sent(self, sink_id: str) -> None:
        """Note that it was told what was sent."""
        self.told.append(sink_id)


class Lender:
    """Stands for the `EncodeCache` of a run."""

    def __init__(self, store: StateStore, last: int | None) -> None:
        self._store = store
        self._last = last

    @contextmanager
    def covering(self, sink: str, segment: int, ordinal: int) -> Iterator[Encoded]:
        """Lend a segment and everything after it, up to the last."""
        del sink, ordinal
        yield Encoded(self._store.segments.read(NAME, first=segment, last=self._last))


def batch(row: SegmentRow, *ordinals: int) -> SinkBatch:
    """Return the messages of some rows of a segment."""
    messages = [
        {
            "ordinal": one,
            "destination": "x",
            "value": "{}",
            "event_id": f"{row.segment}-{one}",
            "idempotency_key": f"{row.segment}-{one}",
        }
        for one in ordinals
    ]
    return SinkBatch(
        row.segment, row.segment_id, pa.RecordBatch.from_pylist(messages, schema=MESSAGES)
    )


def place(checkpoint: CheckpointRow | None) -> tuple[int, int, bool] | None:
    """Return the place of a checkpoint."""
    if checkpoint is None:
        return None
    return checkpoint.segment, checkpoint.ordinal, checkpoint.complete


@dataclass
class Scene:
    """A pipeline with one sink whose journal holds events 1, 2, 3 ..., one per transaction.

    Attributes:
        warnings: What people were told.
    """

    store: StateStore
    journal: Journal
    lease: ActiveLease
    spec: PipelineSpec
    warnings: list[str] = field(default_factory=list)

    def capture(self, first: int, last: int) -> None:
        """Add the segment of some events, in row groups of a few rows."""
        row = self.store.pipelines.get(NAME)
        assert row is not None
        number = row.next_segment
        writer = self.journal.writer(NAME, row.uid, number, self.lease.epoch)
        for one in range(first, last + 1, 3):
            writer.write(frame([*range(one, min(one + 3, last + 1))]))
        written = writer.close()
        known = {one.name for one in fields(NewSegment)}
        segment = NewSegment(
            segment=number,
            start_position=lsn(first - 1),
            end_position=lsn(last),
            **{name: getattr(written, name) for name in written.__slots__ if name in known},
        )

        def add(writer: FencedWriter) -> None:
            opened = writer.ranges.open(lsn(first - 1), "spec", number)
            writer.segments.add(segment, opened)
            writer.ranges.close(opened, "test", "hash")

        self.lease.write(add)

    def context(self) -> DeliveryContext:
        """Return what the parts of a run's deliverer share."""
        return DeliveryContext(
            LeasedRun(self.store, self.journal, self.lease, self.warnings.append),
            self.spec,
            SINK,
            PendingSegments(self.store, NAME, chained=False),
            SinkMeter(SINK),
        )

    @property
    def checkpoint(self) -> CheckpointRow:
        """The sink's checkpoint in the store."""
        return self.store.checkpoints.read(NAME)[SINK]

    def acknowledge(self, segment: int, ordinal: int, *, complete: bool) -> None:
        """Advance the checkpoint, exactly once."""
        self.lease.write(
            lambda writer: writer.checkpoints.advance(
                SINK, segment, ordinal, complete, None, exactly_once=True
            )
        )

    def position(self, event: int, segment: tuple[int, int, int]) -> SinkPosition:
        """Return what a sink holds after an event of segment (number, first, last)."""
        number, first, last = segment
        row = self.store.pipelines.get(NAME)
        stored = self.store.segments.get(NAME, number)
        assert row is not None
        return SinkPosition(
            uid=row.uid,
            incarnation=self.checkpoint.incarnation or "",
            segment=number,
            segment_id=stored.segment_id if stored else "gone",
            ordinal=event - first,
            event_id=event_id(event),
            start=lsn(last if event == last else first - 1),
            end=lsn(last),
            source="db",
        )


@pytest.fixture
def scene(
    sqlite_store: StateStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Iterator[Scene]:
    """A pipeline that begins before event 1; row groups hold some three rows. A module may have a `BACKOFF_SECONDS`."""
    monkeypatch.setattr(writing, "ROW_GROUP_BYTES", 500)
    sqlite_store.pipelines.register(NAME, "spec", [SINK])
    sqlite_store.pipelines.set_start(NAME, lsn(0))
    lease = ActiveLease.acquire(
        sqlite_store, NAME, "run", seconds=60, renew_seconds=20, on_renewal=lambda: None
    )
    assert lease is not None
    backoff = getattr(request.module, "BACKOFF_SECONDS", 0.01)
    (tmp_path / f"{NAME}.yaml").write_text(PIPELINE.replace("BACKOFF", str(backoff)))
    spec = load_pipeline(tmp_path / f"{NAME}.yaml").spec
    yield Scene(sqlite_store, Journal(f"file://{tmp_path}/journal"), lease, spec)
    lease.release()
