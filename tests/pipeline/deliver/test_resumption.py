"""Going on after an open, on a real store and real journal files; the sink only tells a position."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from deltaforge_dagster.errors import JournalDamaged, PositionLost, SinkRejected
from deltaforge_dagster.pipeline.deliver.resumption import Resumption
from deltaforge_dagster.pipeline.run_context import ActiveLease
from deltaforge_dagster.sinks.base import SendGuard, SinkBatch, SinkPosition
from deltaforge_dagster.state.records import CheckpointRow
from tests.pipeline.deliver.scene import NAME, Scene, lsn, place, scene

__all__ = ["scene"]


@dataclass
class Teller:
    """A sink that tells a position, or an error instead, and takes nothing."""

    held: SinkPosition | SinkRejected | None = None
    exactly_once: bool = True
    takes_parts: bool = True

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


def settled(scene: Scene, sink: Teller) -> CheckpointRow | None:
    """Return where a sink goes on that was just opened by a new run."""
    resumption = Resumption(scene.context())
    resumption.begin(sink, scene.checkpoint)
    found = resumption.settle(sink, scene.checkpoint)
    assert found in {None, scene.checkpoint}, "what is returned is what is stored"
    return found


def foreign(position: SinkPosition) -> SinkPosition:
    """Return the position as another store's pipeline would have written it."""
    return replace(position, uid="another", incarnation="another", segment=77, segment_id="another")


def test_a_first_start(scene: Scene) -> None:
    """Without a position the checkpoint stays, and a incarnation begins before anything is sent."""
    scene.capture(1, 9)

    first = settled(scene, Teller())

    assert first is not None
    assert (place(first), first.overrules) == ((0, -1, True), True)
    assert first.incarnation is not None
    assert settled(scene, Teller()) == first, "and goes on until it is used"


def test_at_least_once_has_no_incarnation(scene: Scene) -> None:
    """A sink that keeps no position is not asked for one."""
    scene.capture(1, 9)

    found = settled(scene, Teller(SinkRejected("not asked"), exactly_once=False))

    assert found is not None
    assert (found.incarnation, place(found)) == (None, (0, -1, True))


@pytest.mark.parametrize("event", [1, 4, 8, 9])
def test_newer(scene: Scene, event: int) -> None:
    """What arrived before the checkpoint was written is not sent again; it is no news."""
    scene.capture(1, 9)
    settled(scene, Teller())

    found = settled(scene, Teller(scene.position(event, (1, 1, 9))))

    assert place(found) == (1, event - 1, event == 9)
    assert scene.warnings == []


def test_older(scene: Scene) -> None:
    """Lost data comes again; the notice stays until a later run has delivered after it."""
    scene.capture(1, 9)
    scene.capture(10, 12)
    settled(scene, Teller())
    held = Teller(scene.position(4, (1, 1, 9)))
    scene.acknowledge(2, 2, complete=True)

    found = settled(scene, held)

    assert found is not None
    assert place(found) == (1, 3, False)
    assert found.source_position == lsn(0)
    assert scene.warnings == [f"sink redis: {found.notice}"]
    assert "before row 0 of segment 3, but holds only what is before row 4 of segment 1" in (
        found.notice or ""
    )
    settled(scene, held)
    assert scene.checkpoint.notice == found.notice
    scene.acknowledge(2, 2, complete=True)
    settled(scene, Teller(scene.position(12, (2, 10, 12))))
    assert scene.checkpoint.notice is None


def test_by_the_source_position(scene: Scene) -> None:
    """An event of another journal is found wherever it lies in this one, once it is captured."""
    sink = Teller(foreign(scene.position(14, (1, 11, 15))))
    scene.capture(1, 9)
    resumption = Resumption(scene.context())
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
    assert place(settled(scene, sink)) == (3, 1, False), "again, before anything was sent"


def test_an_event_of_another_log(scene: Scene) -> None:
    """What the source's log does not have at its place stops the sink, and nothing has moved."""
    held = foreign(scene.position(4, (1, 1, 9)))
    sink = Teller(replace(held, event_id="of another log"))
    scene.capture(1, 9)

    with pytest.raises(PositionLost, match=r"of another log, is not in .*checkpoint reset orders"):
        settled(scene, sink)
    assert place(scene.checkpoint) == (0, -1, True)


def test_a_reset_ends_the_search(scene: Scene) -> None:
    """After a reset neither another store's position nor garbage matters any more."""
    scene.capture(1, 9)
    scene.lease.release()
    scene.store.checkpoints.reset(NAME, "redis", 0)
    again = scene.store.leases.acquire(NAME, "run", 60)
    assert again is not None
    scene.lease = ActiveLease(
        scene.store, again, scene.lease._deadline, seconds=60, renew_seconds=20,
        on_renewal=lambda: None,
    )  # fmt: skip

    for held in (foreign(scene.position(4, (1, 1, 9))), SinkRejected("garbage")):
        assert place(settled(scene, Teller(held))) == (0, -1, True)
    scene.acknowledge(1, 1, complete=False)
    with pytest.raises(SinkRejected):
        settled(scene, Teller(SinkRejected("garbage")))
    scene.lease.release()


def test_a_position_that_is_gone(scene: Scene) -> None:
    """The checkpoint counts, and it is said; before the first delivery there was none to lose."""
    scene.capture(1, 9)
    settled(scene, Teller())
    scene.acknowledge(1, 3, complete=False)

    found = settled(scene, Teller())

    assert place(found) == (1, 3, False)
    (warning,) = scene.warnings
    assert "position that the sink kept is gone" in warning


def test_a_lost_file_in_the_search(scene: Scene) -> None:
    """Looking for an event in a file that is gone is the journal's damage."""
    scene.capture(1, 9)
    (segment,) = scene.store.segments.read(NAME)
    scene.journal.delete(segment.path)

    with pytest.raises(JournalDamaged):
        settled(scene, Teller(foreign(scene.position(4, (1, 1, 9)))))


@pytest.mark.parametrize("exactly_once", [False, True])
def test_after_a_rebuild(scene: Scene, exactly_once: bool) -> None:
    """Whole segments that the sink has are skipped; one that it has in part is sent again."""
    scene.capture(1, 9)
    scene.lease.write(lambda writer: writer.pipeline.set_confirmed(lsn(0)))
    scene.lease.write(lambda writer: writer.checkpoints.advance("redis", 1, 8, True, lsn(9)))
    scene.lease.release()
    scene.store.journals.rebuild(NAME, accept_loss=False)
    lease = ActiveLease.acquire(
        scene.store, NAME, "run-2", seconds=60, renew_seconds=20, on_renewal=lambda: None
    )
    assert lease is not None
    scene.lease = lease
    sink = Teller(exactly_once=exactly_once)

    scene.capture(1, 4)
    assert settled(scene, sink) is None
    scene.capture(5, 12)
    found = settled(scene, sink)

    assert found is not None
    assert (place(found), found.skip) == ((2, 3, True), None)
    lease.release()
