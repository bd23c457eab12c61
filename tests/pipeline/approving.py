"""Runs over a log that is always the same, each in a process of its own, which may be killed.

`python -m tests.pipeline.approving FOLDER FAILPOINT...` executes a run for each failpoint, which kills it there. A run
captures with `pause_table` until the journal and what is held have everything of the log; with `-` it ends then.
"""

from __future__ import annotations

import os
import signal
import sys
import uuid
from collections.abc import Generator, Sequence
from pathlib import Path

import pyarrow as pa
from sqlalchemy import update

from deltaforge_dagster.config.engine import RangeLimits, SegmentLimits
from deltaforge_dagster.frame import CAPTURED
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.capture.capture import Capture, CaptureOptions
from deltaforge_dagster.pipeline.capture.committer import Ranges
from deltaforge_dagster.pipeline.failpoints import VARIABLE
from deltaforge_dagster.pipeline.run_context import ActiveLease, LeasedRun
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.base import ChangeBatch, ReadLimits, SchemaRegistry
from deltaforge_dagster.sources.postgres.position import LsnPosition
from deltaforge_dagster.state.database.database import clock
from deltaforge_dagster.state.database.tables import leases
from deltaforge_dagster.state.store import StateStore
from tests.pipeline.changes import PlayedSource, eventually, frame
from tests.state.make import table

Change = tuple[int, str, int]
"""A row: its id, its table, and how many columns that has there."""

LOG: Sequence[Sequence[Change]] = (
    [(1, "orders", 1), (2, "items", 1)],
    [(3, "orders", 1), (4, "orders", 2), (5, "items", 1), (6, "orders", 2)],
    [(7, "items", 1)],
    [(8, "orders", 2)],
    [(9, "orders", 3), (10, "items", 1), (11, "orders", 3)],
    [(12, "orders", 3), (13, "items", 2)],
    [(14, "items", 2), (15, "orders", 3)],
)
"""Transactions, one after the other."""


class Log(PlayedSource):
    """A source of `LOG`, which registers the form of each row as a decoder does."""

    def read(
        self, start: Position, limits: ReadLimits, registry: SchemaRegistry
    ) -> Generator[ChangeBatch]:
        """Yield each transaction in two pieces."""
        self.closed.clear()
        for transaction in LOG:
            end = LsnPosition(transaction[-1][0])
            if start < end:
                rows = _rows(transaction, registry, end)
                yield ChangeBatch(rows.slice(0, 1), None)
                yield ChangeBatch(rows.slice(1) if rows.num_rows > 1 else None, end)
        while not self.closed.wait(0.005):
            yield ChangeBatch(None, None)


def _rows(
    transaction: Sequence[Change], registry: SchemaRegistry, end: LsnPosition
) -> pa.RecordBatch:
    rows = frame([one for one, _, _ in transaction], tx_id=end.lsn).to_pylist()
    for row, (_, name, columns) in zip(rows, transaction, strict=True):
        form = table(*(f"c{number}" for number in range(columns)), name=name)
        stamp = registry.register(form, end)
        row |= {
            "table": name,
            "schema_version": stamp.fingerprint,
            "schema_sequence": stamp.sequence,
        }
    # A transaction of one row comes in two pieces as well: the row, and that it is the last.
    return pa.RecordBatch.from_pylist(rows, schema=CAPTURED)


def captured(store: StateStore) -> int:
    """Return how many rows are in the journal, or held."""
    held = sum(hold.events for hold in store.holds.read("p") if hold.state == "held")
    return held + sum(segment.rows for segment in store.segments.read("p"))


def main(folder: Path) -> None:
    """Capture until everything is."""
    store = StateStore.open(f"sqlite:///{folder}/state.db")
    journal = Journal(f"file://{folder}/journal")
    with store.database.write() as connection:  # of one that was killed
        connection.execute(update(leases).values(expires_at=clock() - 1))
    lease = ActiveLease.acquire(
        store, "p", str(uuid.uuid4()), seconds=300, renew_seconds=60, on_renewal=lambda: None
    )
    row = store.pipelines.get("p")
    assert lease is not None
    assert row is not None
    ranges = Ranges(
        store,
        lease,
        spec_hash="hash",
        limits=RangeLimits(),
        opened=lambda _: None,
    )
    ranges.close_left_open()
    capture = Capture(
        LeasedRun(store, journal, lease, warn=lambda _: None),
        CaptureOptions(
            row=row,
            limits=SegmentLimits(min_ms=0, max_ms=1),
            source_id="source",
            tenant="acme",
            pauses_tables=True,
        ),
        build_source=lambda: Log([]),
        ranges=ranges,
        someone_waits=lambda: True,
        segment_wanted=lambda: True,
        captured=lambda _: None,
    )
    everything = sum(len(transaction) for transaction in LOG)
    eventually(lambda: captured(store) == everything or capture.error, 120)
    capture.stop()
    ranges.close("test")
    lease.release()
    store.close()
    assert capture.error is None, capture.error


def fork(folder: Path, failpoint: str) -> int:
    """Let a child, for which everything is imported already, execute a run; return its exit code."""
    pid = os.fork()
    if not pid:
        os.environ[VARIABLE] = failpoint.removeprefix("-")
        main(folder)
        sys.exit()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    for point in sys.argv[2:]:
        code = fork(Path(sys.argv[1]), point)
        assert code == (0 if point == "-" else -signal.SIGKILL), (point, code)
