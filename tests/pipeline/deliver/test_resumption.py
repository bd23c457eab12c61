"""Going on after an open, on a real store and real journal files; the sink only tells a position."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import pytest

from deltaforge_dagster.errors import JournalDamaged, PositionLost, SinkRejected
from deltaforge_dagster.journal import files
from deltaforge_dagster.journal import writer as writing
from deltaforge_dagster.pipeline.deliver.resumption import Resumption
from deltaforge_dagster.pipeline.lease import HeldLease
from deltaforge_dagster.pipeline.pending_segments import PendingSegments
from deltaforge_dagster.sinks.base import SendGuard, SinkBatch, SinkPosition
from deltaforge_dagster.sources.postgres.position import LsnPosition
from deltaforge_dagster.state.records import CheckpointRow, NewSegment
from deltaforge_dagster.state.store import FencedWriter, StateStore
from tests.pipeline.changes import frame

NAME = "orders"


def lsn(number: int) -> str:
    """Return the position after the event of that number."""
    return LsnPosition(number, number).to_json()


def event_id(number: int) -> str:
    """Return the id of an event."""
    return f"00000000-0000-7000-8000-{number:012d}"


@dataclass
class Teller:
    """A sink that tells a position, or an error instead, and takes nothing."""

    held: SinkPosition | SinkRejected | None = None
    exactly_once: bool = True
    commits: bool = True

    def open(self) -> None:
        """Do nothing."""

    def position(self) -> SinkPosition | None:
        """Tell it."""
        if isinstance(self.held, SinkRejected):
            raise self.held
        return self.held

    def send(self, batch: SinkBatch, guard: SendGuard) -> int:
        """Refuse: these tests send nothing."""
        raise AssertionError

    def close(self) -> None:
        """Do nothing."""


@dataclass
class Scene:
    """A pipeline with one sink whose journal holds events 1, 2, 3 ..., one per transaction.

    Attributes:
        warnings: What people were told.
    """

    store: StateStore
    journal: files.Journal
    lease: HeldLease
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

    def resumption(self) -> Resumption:
        """Return what a run's deliverer has."""
        return Resumption(
            sink_id="redis",
            pipeline=NAME,
            source="db",
            store=self.store,
            segments=PendingSegments(self.store, NAME, chained=False),
            journal=self.journal,
            lease=self.lease,
            warn=self.warnings.append,
        )

    def settled(self, sink: Teller) -> CheckpointRow | None:
        """Return where a sink goes on that was just opened by a new run."""
        resumption = self.resumption()
        resumption.begin(sink, self.checkpoint)
        found = resumption.settle(sink, self.checkpoint)
        assert found in {None, self.checkpoint}, "what is returned is what is stored"
        return found

    @property
    def checkpoint(self) -> CheckpointRow:
        """The sink's checkpoint in the store."""
        return self.store.checkpoints.read(NAME)["redis"]

    def acknowledge(self, segment: int, ordinal: int, *, complete: bool) -> None:
        """Advance the checkpoint, exactly once."""
        self.lease.write(
            lambda writer: writer.checkpoints.advance(
                "redis", segment, ordinal, complete, None, exactly_once=True
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
            lineage=self.checkpoint.lineage or "",
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
    sqlite_store: StateStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Scene]:
    """A pipeline that begins before event 1; row groups hold some three rows."""
    monkeypatch.setattr(writing, "ROW_GROUP_BYTES", 500)
    sqlite_store.pipelines.register(NAME, "spec", ["redis"])
    sqlite_store.pipelines.set_start(NAME, lsn(0))
    lease = HeldLease.acquire(
        sqlite_store, NAME, "run", seconds=60, renew_seconds=20, on_renewal=lambda: None
    )
    assert lease is not None
    yield Scene(sqlite_store, files.Journal(f"file://{tmp_path}/journal"), lease)
    lease.release()


def foreign(position: SinkPosition) -> SinkPosition:
    """Return the position as another store's pipeline would have written it."""
    return replace(position, uid="another", lineage="another", segment=77, segment_id="another")


def place(checkpoint: CheckpointRow | None) -> tuple[int, int, bool] | None:
    """Return the place of a checkpoint."""
    if checkpoint is None:
        return None
    return checkpoint.segment, checkpoint.ordinal, checkpoint.complete


def test_a_first_start(scene: Scene) -> None:
    """Without a position the checkpoint stays, and a lineage begins before anything is sent."""
    scene.capture(1, 9)

    first = scene.settled(Teller())

    assert first is not None
    assert (place(first), first.overrules) == ((0, -1, True), True)
    assert first.lineage is not None
    assert scene.settled(Teller()) == first, "and goes on until it is used"


def test_at_least_once_has_no_lineage(scene: Scene) -> None:
    """A sink that keeps no position is not asked for one."""
    scene.capture(1, 9)

    found = scene.settled(Teller(SinkRejected("not asked"), exactly_once=False))

    assert found is not None
    assert (found.lineage, place(found)) == (None, (0, -1, True))


@pytest.mark.parametrize("event", [1, 4, 8, 9])
def test_newer(scene: Scene, event: int) -> None:
    """What arrived before the checkpoint was written is not sent again; it is no news."""
    scene.capture(1, 9)
    scene.settled(Teller())

    found = scene.settled(Teller(scene.position(event, (1, 1, 9))))

    assert place(found) == (1, event - 1, event == 9)
    assert scene.warnings == []


def test_older(scene: Scene) -> None:
    """Lost data comes again; the notice stays until a later run has delivered after it."""
    scene.capture(1, 9)
    scene.capture(10, 12)
    scene.settled(Teller())
    held = Teller(scene.position(4, (1, 1, 9)))
    scene.acknowledge(2, 2, complete=True)

    found = scene.settled(held)

    assert found is not None
    assert place(found) == (1, 3, False)
    assert found.source_position == lsn(0)
    assert scene.warnings == [f"sink redis: {found.notice}"]
    assert "before row 0 of segment 3, but holds only what is before row 4 of segment 1" in (
        found.notice or ""
    )
    scene.settled(held)
    assert scene.checkpoint.notice == found.notice
    scene.acknowledge(2, 2, complete=True)
    scene.settled(Teller(scene.position(12, (2, 10, 12))))
    assert scene.checkpoint.notice is None


def test_by_the_source_position(scene: Scene) -> None:
    """An event of another journal is found wherever it lies in this one, once it is captured."""
    sink = Teller(foreign(scene.position(14, (1, 11, 15))))
    scene.capture(1, 9)
    resumption = scene.resumption()
    resumption.begin(sink, scene.checkpoint)

    assert resumption.settle(sink, scene.checkpoint) is None
    assert resumption.looked_up_to == lsn(9)
    scene.capture(10, 12)
    assert resumption.settle(sink, scene.checkpoint) is None
    assert resumption.looked_up_to == lsn(12)
    assert place(scene.checkpoint) == (0, -1, True), "nothing is skipped before it is found"
    scene.capture(13, 20)
    found = resumption.settle(sink, scene.checkpoint)

    assert found is not None
    assert place(found) == (3, 1, False)
    assert found.overrules
    assert scene.warnings == []
    assert place(scene.settled(sink)) == (3, 1, False), "again, before anything was sent"


def test_an_event_of_another_log(scene: Scene) -> None:
    """What the source's log does not have at its place stops the sink, and nothing has moved."""
    held = foreign(scene.position(4, (1, 1, 9)))
    sink = Teller(replace(held, event_id="of another log"))
    scene.capture(1, 9)

    with pytest.raises(PositionLost, match=r"of another log, is not in .*checkpoint reset orders"):
        scene.settled(sink)
    assert place(scene.checkpoint) == (0, -1, True)


def test_a_reset_ends_the_search(scene: Scene) -> None:
    """After a reset neither another store's position nor garbage matters any more."""
    scene.capture(1, 9)
    scene.lease.release()
    scene.store.checkpoints.reset(NAME, "redis", 0)
    again = scene.store.leases.acquire(NAME, "run", 60)
    assert again is not None
    scene.lease = HeldLease(
        scene.store, again, scene.lease._deadline, seconds=60, renew_seconds=20,
        on_renewal=lambda: None,
    )  # fmt: skip

    for held in (foreign(scene.position(4, (1, 1, 9))), SinkRejected("garbage")):
        assert place(scene.settled(Teller(held))) == (0, -1, True)
    scene.acknowledge(1, 1, complete=False)
    with pytest.raises(SinkRejected):
        scene.settled(Teller(SinkRejected("garbage")))
    scene.lease.release()


def test_a_position_that_is_gone(scene: Scene) -> None:
    """The checkpoint counts, and it is said; before the first delivery there was none to lose."""
    scene.capture(1, 9)
    scene.settled(Teller())
    scene.acknowledge(1, 3, complete=False)

    found = scene.settled(Teller())

    assert place(found) == (1, 3, False)
    (warning,) = scene.warnings
    assert "position that the sink kept is gone" in warning


def test_a_lost_file_in_the_search(scene: Scene) -> None:
    """Looking for an event in a file that is gone is the journal's damage."""
    scene.capture(1, 9)
    (segment,) = scene.store.segments.read(NAME)
    scene.journal.delete(segment.path)

    with pytest.raises(JournalDamaged):
        scene.settled(Teller(foreign(scene.position(4, (1, 1, 9)))))


@pytest.mark.parametrize("exactly_once", [False, True])
def test_after_a_rebuild(scene: Scene, exactly_once: bool) -> None:
    """Whole segments that the sink has are skipped; one that it has in part is sent again."""
    scene.capture(1, 9)
    scene.lease.write(lambda writer: writer.pipeline.set_confirmed(lsn(0)))
    scene.lease.write(lambda writer: writer.checkpoints.advance("redis", 1, 8, True, lsn(9)))
    scene.lease.release()
    scene.store.journals.rebuild(NAME, accept_loss=False)
    lease = HeldLease.acquire(
        scene.store, NAME, "run-2", seconds=60, renew_seconds=20, on_renewal=lambda: None
    )
    assert lease is not None
    scene.lease = lease
    sink = Teller(exactly_once=exactly_once)

    scene.capture(1, 4)
    assert scene.settled(sink) is None
    scene.capture(5, 12)
    found = scene.settled(sink)

    assert found is not None
    assert (place(found), found.skip) == ((2, 3, True), None)
    lease.release()
