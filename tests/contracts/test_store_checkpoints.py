"""What every kind of state store promises of sinks' checkpoints, and of schema versions."""

from __future__ import annotations

import pytest

from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.state.records import Lease, SinkStart
from deltaforge_dagster.state.store import StateStore
from tests.state.make import NAME, capture, deliver, held, position, table


class TestCheckpoints:
    """How far each sink is: forwards only, except by hand."""

    def test_advance(self, store: StateStore) -> None:
        """A checkpoint moves inside a segment and from one to the next, with its position."""
        lease = held(store, "a", "b")
        capture(store, lease, 1, 2)
        with store.fenced(lease) as writer:
            writer.checkpoints.advance("a", 1, 1, False, None)
        row = store.checkpoints.read(NAME)["a"]
        assert (row.segment, row.ordinal, row.complete) == (1, 1, False)
        assert row.source_position == position(0)

        with store.fenced(lease) as writer:
            writer.checkpoints.advance("a", 1, 2, True, position(1))
            writer.checkpoints.advance("a", 2, -1, True, position(2))

        row = store.checkpoints.read(NAME)["a"]
        assert (row.segment, row.ordinal, row.complete) == (2, -1, True)
        assert row.source_position == position(2)
        assert store.checkpoints.read(NAME)["b"].segment == 0

    @pytest.mark.parametrize(
        ("segment", "ordinal", "complete"),
        [(1, 2, True), (2, 0, True), (2, 0, False), (2, 1, False), (0, 0, True), (4, -1, False)],
    )
    def test_never_backwards_nor_beyond(
        self, store: StateStore, segment: int, ordinal: int, complete: bool
    ) -> None:
        """Neither an earlier place nor one after the journal's end is taken."""
        lease = held(store)
        capture(store, lease, 1, 2, 3)
        with store.fenced(lease) as writer:
            writer.checkpoints.advance("redis", 2, 1, True, position(2))
        before = store.checkpoints.read(NAME)

        with pytest.raises(NotAllowed, match="'redis' stands at"), store.fenced(lease) as writer:
            writer.checkpoints.advance("redis", segment, ordinal, complete, position(segment))

        assert store.checkpoints.read(NAME) == before

    def test_failures(self, store: StateStore) -> None:
        """Failures are counted with the last error, and forgotten at the next success."""
        lease = held(store)
        capture(store, lease, 1)
        for number in (1, 2):
            with store.fenced(lease) as writer:
                writer.checkpoints.failed("redis", "no route to host" + "x" * 5000, 100.0 + number)
        row = store.checkpoints.read(NAME)["redis"]
        assert (row.failures, row.next_attempt_at) == (2, 102.0)
        assert row.last_error is not None
        assert row.last_error.startswith("no route")
        assert len(row.last_error) == 2000

        deliver(store, lease, "redis", 1)

        row = store.checkpoints.read(NAME)["redis"]
        assert (row.failures, row.next_attempt_at, row.last_error) == (0, 0.0, None)

    def test_only_a_move_makes_it_younger(self, store: StateStore) -> None:
        """A sink that fails, rests or is detached does not look as if it went on."""
        lease = held(store)
        capture(store, lease, 1, 2)
        deliver(store, lease, "redis", 1)
        moved = store.checkpoints.read(NAME)["redis"].updated_at
        while store.now() <= moved:
            pass

        with store.fenced(lease) as writer:
            writer.checkpoints.failed("redis", "down", 0.0)
        store.checkpoints.pause(NAME, "redis")
        store.checkpoints.resume(NAME, "redis")
        with store.fenced(lease) as writer:
            writer.checkpoints.detach("redis", "full")
        assert store.checkpoints.read(NAME)["redis"].updated_at == moved

        store.checkpoints.attach(NAME, "redis", tail=False)
        deliver(store, lease, "redis", 2)
        assert store.checkpoints.read(NAME)["redis"].updated_at > moved

    def test_unknown_sink(self, store: StateStore) -> None:
        """A sink that is not registered has no checkpoint to move."""
        lease = held(store)
        capture(store, lease, 1)
        with pytest.raises(NotAllowed, match="no sink 'kafka'"):
            deliver(store, lease, "kafka", 1)
        with pytest.raises(NotAllowed, match="no sink"), store.fenced(lease) as writer:
            writer.checkpoints.failed("kafka", "down", 0.0)

    def test_reset(self, store: StateStore) -> None:
        """By hand a checkpoint goes anywhere in the journal, with the position of that place."""
        lease = held(store)
        capture(store, lease, 1, 2, 3)
        deliver(store, lease, "redis", 3)
        with store.fenced(lease) as writer:
            writer.checkpoints.failed("redis", "down", 1e12)
        with pytest.raises(NotAllowed, match="held by run run-1"):
            store.checkpoints.reset(NAME, "redis", 1)
        with store.fenced(lease) as writer:
            writer.lease.release()

        row = store.checkpoints.reset(NAME, "redis", 1)
        assert (row.segment, row.complete, row.source_position) == (1, True, position(1))
        assert (row.failures, row.next_attempt_at, row.last_error) == (0, 0.0, None)
        row = store.checkpoints.reset(NAME, "redis", 2, ordinal=1, complete=False)
        assert (row.segment, row.ordinal, row.source_position) == (2, 1, position(1))
        assert store.checkpoints.reset(NAME, "redis", 0).source_position == position(0)
        assert store.checkpoints.reset(NAME, "redis", 3).source_position == position(3)
        for nowhere in (-1, 4, 9):
            with pytest.raises(NotAllowed, match="not in the journal"):
                store.checkpoints.reset(NAME, "redis", nowhere)
        with pytest.raises(NotAllowed, match="no sink 'kafka'"):
            store.checkpoints.reset(NAME, "kafka", 0)


class TestPublication:
    """What is due, and what is not."""

    def test_unpublished(self, store: StateStore) -> None:
        """A closed range is due with its changes, and with each sink that has all of it."""
        lease = held(store, "a", "b")
        capture(store, lease, 1, 2)
        capture(store, lease, 3)
        capture(store, lease, 4, close=False)
        assert store.ranges.unpublished(NAME) == [(1, "changes"), (2, "changes")]

        deliver(store, lease, "a", 3)
        with store.fenced(lease) as writer:
            writer.checkpoints.advance("b", 2, 1, False, None)
        assert store.ranges.unpublished(NAME) == [
            (1, "changes"),
            (1, "a"),
            (2, "changes"),
            (2, "a"),
        ]

        deliver(store, lease, "b", 2)
        assert store.ranges.mark_published(NAME, 1, "changes")
        assert not store.ranges.mark_published(NAME, 1, "changes")
        assert store.ranges.mark_published(NAME, 2, "a")
        assert store.ranges.unpublished(NAME) == [(1, "a"), (1, "b"), (2, "changes")]
        assert store.ranges.published(NAME, 1, 1) == {(1, "changes")}
        assert store.ranges.published(NAME, 1, 2) == {(1, "changes"), (2, "a")}

    def test_late_sink(self, store: StateStore) -> None:
        """Ranges that a sink was not given, or not whole, are never published for it."""
        lease = held(store, "a")
        capture(store, lease, 1)
        capture(store, lease, 2, 3)
        capture(store, lease, 4)
        deliver(store, lease, "a", 2)
        store.pipelines.register(NAME, "spec-2", ["a", "late"])

        deliver(store, lease, "late", 4)

        assert [pair for pair in store.ranges.unpublished(NAME) if pair[1] == "late"] == [
            (3, "late")
        ]

    def test_skipped_ranges(self, store: StateStore) -> None:
        """Ranges skipped by a reset are not published; after going back they are."""
        lease = held(store, "a")
        for number in (1, 2, 3):
            capture(store, lease, number)
        with store.fenced(lease) as writer:
            writer.lease.release()

        def due() -> list[int]:
            return [number for number, asset in store.ranges.unpublished(NAME) if asset == "a"]

        store.checkpoints.reset(NAME, "a", 2)
        assert due() == []
        deliver(store, held(store, "a", run_id="run-2"), "a", 3)
        assert due() == [3]

        with store.fenced(Lease(NAME, "run-2", 2, 0.0)) as writer:
            writer.lease.release()
        store.checkpoints.reset(NAME, "a", 0)
        deliver(store, held(store, "a", run_id="run-3"), "a", 3)
        assert due() == [1, 2, 3]


class TestDetached:
    """A detached sink holds nothing, and is attached again only where nothing is missing."""

    def journal(self, store: StateStore) -> Lease:
        """Let `a` have three published ranges of which the detached `b` has the first."""
        lease = held(store, "a", "b")
        for number in (1, 2, 3):
            capture(store, lease, number)
        deliver(store, lease, "a", 3)
        deliver(store, lease, "b", 1)
        with store.fenced(lease) as writer:
            writer.checkpoints.detach("b", "the journal is full")
        for number, asset in store.ranges.unpublished(NAME):
            store.ranges.mark_published(NAME, number, asset)
        return lease

    def test_holds_nothing(self, store: StateStore) -> None:
        """Its checkpoint stays, says why, and keeps no segment in the journal."""
        self.journal(store)
        row = store.checkpoints.read(NAME)["b"]
        assert (row.state, row.segment, row.last_error) == ("detached", 1, "the journal is full")

        gone = store.segments.expire(NAME, [1, 2, 3])

        assert [one.segment for one in gone] == [1, 2, 3]

    def test_a_late_failure_does_not_hide_why(self, store: StateStore) -> None:
        """Its deliverer may fail once more before it is stopped."""
        lease = self.journal(store)
        with store.fenced(lease) as writer:
            writer.checkpoints.failed("b", "refused", 5.0)
            writer.checkpoints.suspended(
                "b", "a table", remedy=(), failures=1, since=1.0, next_attempt_at=5.0
            )
        row = store.checkpoints.read(NAME)["b"]
        assert (row.last_error, row.failures) == ("the journal is full", 0)

    def test_attached_from_the_journal(self, store: StateStore) -> None:
        """It goes on after its checkpoint, also while a run holds the lease."""
        lease = self.journal(store)
        store.segments.expire(NAME, [1])

        row = store.checkpoints.attach(NAME, "b", tail=False)

        assert (row.state, row.segment, row.first_segment, row.last_error) == (
            "attached", 1, 1, None,
        )  # fmt: skip
        assert store.segments.expire(NAME, [2]) == []
        deliver(store, lease, "b", 3)
        with pytest.raises(NotAllowed, match="is attached"):
            store.checkpoints.attach(NAME, "b", tail=True)

    def test_attached_at_the_tail(self, store: StateStore) -> None:
        """What it missed is gone, which is refused unless skipping was asked for."""
        lease = self.journal(store)
        store.segments.expire(NAME, [1, 2])
        with pytest.raises(NotAllowed, match=r"segment 2, .* no longer in the journal; --tail"):
            store.checkpoints.attach(NAME, "b", tail=False)
        assert store.checkpoints.read(NAME)["b"].state == "detached"

        row = store.checkpoints.attach(NAME, "b", tail=True)

        assert (row.state, row.segment, row.first_segment) == ("attached", 3, 4)
        assert row.source_position == position(3)
        capture(store, lease, 4)
        deliver(store, lease, "b", 4)
        assert (4, "b") in store.ranges.unpublished(NAME)
        assert (3, "b") not in store.ranges.unpublished(NAME)

    def test_a_new_sink_does_not_begin_there(self, store: StateStore) -> None:
        """A sink added later starts where the slowest attached sink is."""
        self.journal(store)
        store.pipelines.register(NAME, "spec-2", ["a", "b", "c"])
        assert store.checkpoints.read(NAME)["c"].first_segment == 4


class TestPaused:
    """A paused sink keeps its place, and everything that it has yet to get."""

    def test_keeps_the_journal(self, store: StateStore) -> None:
        """Its segments stay, it is resumed where it stood, and its failures are forgotten."""
        lease = held(store, "a", "b")
        for number in (1, 2):
            capture(store, lease, number)
        deliver(store, lease, "a", 2)
        with store.fenced(lease) as writer:
            writer.checkpoints.failed("b", "down", 5e9)

        row = store.checkpoints.pause(NAME, "b")

        assert (row.state, row.attached, row.paused, row.segment) == ("paused", True, True, 0)
        for number, asset in store.ranges.unpublished(NAME):
            store.ranges.mark_published(NAME, number, asset)
        assert store.segments.expire(NAME, [1, 2]) == []
        row = store.checkpoints.resume(NAME, "b")
        assert (row.state, row.segment, row.failures, row.next_attempt_at) == ("attached", 0, 0, 0)
        assert row.last_error is None

    def test_what_is_being_sent_counts(self, store: StateStore) -> None:
        """A deliverer that ends after the pause still writes its checkpoint."""
        lease = held(store, "a")
        capture(store, lease, 1)
        store.checkpoints.pause(NAME, "a")

        deliver(store, lease, "a", 1)

        assert (
            store.checkpoints.read(NAME)["a"].segment,
            store.checkpoints.read(NAME)["a"].paused,
        ) == (
            1,
            True,
        )

    def test_refusals(self, store: StateStore) -> None:
        """A sink is paused once, resumed once, and neither while it is detached."""
        lease = held(store, "a", "b")
        capture(store, lease, 1)
        with store.fenced(lease) as writer:
            writer.checkpoints.detach("b", "full")
        store.checkpoints.pause(NAME, "a")

        for act, sink, expected in (
            (store.checkpoints.pause, "a", "'a' is paused"),
            (store.checkpoints.pause, "b", "'b' is detached"),
            (store.checkpoints.resume, "b", "deltaforge sink attach orders b"),
            (store.checkpoints.resume, "c", "there is: a, b"),
        ):
            with pytest.raises(NotAllowed, match=expected):
                act(NAME, sink)
        store.checkpoints.resume(NAME, "a")
        with pytest.raises(NotAllowed, match="is not paused"):
            store.checkpoints.resume(NAME, "a")


class TestAddedSinks:
    """Where a sink begins that is added to a pipeline at work, and what is said of it."""

    def journal(self, store: StateStore) -> Lease:
        """Let `a` have segment 4 of 2 to 5, and `b` all."""
        lease = held(store, "a", "b")
        for number in (1, 2, 3, 4, 5):
            capture(store, lease, number)
        deliver(store, lease, "a", 4)
        deliver(store, lease, "b", 5)
        for number, asset in store.ranges.unpublished(NAME):
            store.ranges.mark_published(NAME, number, asset)
        store.segments.expire(NAME, [1])
        return lease

    def test_first_sinks_have_no_story(self, store: StateStore) -> None:
        """A new pipeline's sinks begin with the first segment, whatever `start` says."""
        store.pipelines.register(NAME, "spec", ["a", "b"], {"a": "tail", "b": "journal"})

        rows = store.checkpoints.read(NAME)
        assert [(one.first_segment, one.began) for one in rows.values()] == [(1, None), (1, None)]

    def test_where_it_begins(self, store: StateStore) -> None:
        """Where the slowest stands, at the journal's end, or as far back as the journal goes."""
        self.journal(store)
        starts: dict[str, SinkStart] = {"t": "tail", "j": "journal", "s": "snapshot"}

        store.pipelines.register(NAME, "spec-2", ["a", "b", "m", "t", "j", "s"], starts)

        rows = store.checkpoints.read(NAME)
        begun = {
            "m": (5, 4, "added; begins with segment 5, where sink a, the slowest, stood"),
            "t": (6, 5, ("added; begins with segment 6, with what was captured after it was added"
                        " (start: tail)")),
            "j": (2, 1, "added; begins with segment 2, the journal's oldest (start: journal)"),
            "s": (6, 5, ("added; begins with segment 6, with what was captured after it was added; "
                         "a snapshot brings it the rows of before (start: snapshot)")),
        }  # fmt: skip
        for sink, (first, after, began) in begun.items():
            row = rows[sink]
            assert (row.first_segment, row.segment, row.began) == (first, first - 1, began)
            assert row.source_position == position(after)
            assert row.snapshot_due == (sink == "s")
        # It is there now, and `start` means nothing any more.
        everyone = ["a", "b", "m", "t", "j", "s"]
        store.pipelines.register(NAME, "spec-3", everyone, {"t": "snapshot"})
        assert store.checkpoints.read(NAME)["t"] == rows["t"]

    def test_a_renamed_sink(self, store: StateStore) -> None:
        """It is a new one, which is said with the name that is gone; the old checkpoint goes."""
        lease = self.journal(store)

        store.pipelines.register(NAME, "spec-2", ["a", "c"])

        began = store.checkpoints.read(NAME)["c"].began
        assert began is not None
        assert began.startswith(
            "added; begins with segment 5, where sink a, the slowest, stood; b is"
        )
        assert "a renamed sink is a new one" in began
        assert set(store.checkpoints.read(NAME)) == {"a", "b", "c"}  # a run is at work
        with store.fenced(lease) as writer:
            writer.lease.release()
        store.pipelines.register(NAME, "spec-2", ["a", "c"])
        assert set(store.checkpoints.read(NAME)) == {"a", "c"}


class TestSinksOwnPosition:
    """What a checkpoint says about the position that its sink keeps."""

    @staticmethod
    def incarnation(store: StateStore) -> tuple[str | None, bool]:
        """Return incarnation and whether the checkpoint overrules."""
        row = store.checkpoints.read(NAME)["redis"]
        return row.incarnation, row.overrules

    def test_a_life(self, store: StateStore) -> None:
        """A incarnation begins, is confirmed by a delivery, and ends with one at least once."""
        lease = held(store)
        capture(store, lease, 1, 2, 3)
        assert self.incarnation(store) == (None, False)

        with store.fenced(lease) as writer:
            writer.checkpoints.set_incarnation("redis", "a")
        assert self.incarnation(store) == ("a", True)
        with store.fenced(lease) as writer:
            writer.checkpoints.advance("redis", 1, 2, True, position(1), exactly_once=True)
        assert self.incarnation(store) == ("a", False)
        deliver(store, lease, "redis", 2)
        assert self.incarnation(store) == (None, True)

    def test_reset_and_tail_end_it(self, store: StateStore) -> None:
        """Setting a checkpoint by hand ends the incarnation and what was noted under it."""
        lease = held(store)
        capture(store, lease, 1, 2)
        with store.fenced(lease) as writer:
            writer.checkpoints.set_incarnation("redis", "a")
            writer.checkpoints.resume_at("redis", 1, 2, True, notice="lost")
            writer.lease.release()

        row = store.checkpoints.reset(NAME, "redis", 0)

        assert (row.incarnation, row.overrules, row.notice) == (None, True, None)

    @pytest.mark.parametrize(
        ("segment", "ordinal", "complete", "expected"),
        [(1, 2, True, 1), (2, 0, False, 1), (3, 2, True, 3), (0, -1, True, 0)],
    )
    def test_going_on_elsewhere(
        self, store: StateStore, segment: int, ordinal: int, complete: bool, expected: int
    ) -> None:
        """A sink goes on before or after its checkpoint; twice is like once."""
        lease = held(store)
        capture(store, lease, 1, 2, 3)
        with store.fenced(lease) as writer:
            writer.checkpoints.set_incarnation("redis", "a")
            writer.checkpoints.advance("redis", 2, 2, True, position(2), exactly_once=True)
        for _ in range(2):
            with store.fenced(lease) as writer:
                writer.checkpoints.resume_at("redis", segment, ordinal, complete, notice="lost")

        row = store.checkpoints.read(NAME)["redis"]
        assert (row.segment, row.ordinal, row.complete) == (segment, ordinal, complete)
        assert (row.source_position, row.notice) == (position(expected), "lost")
        assert (row.incarnation, row.overrules) == ("a", True)
        with store.fenced(lease) as writer:
            writer.checkpoints.set_notice("redis", None)
        assert store.checkpoints.read(NAME)["redis"].notice is None

    def test_what_is_not_in_the_journal(self, store: StateStore) -> None:
        """A sink cannot go on with a segment that is not there."""
        lease = held(store)
        capture(store, lease, 1)
        with store.fenced(lease) as writer:
            for segment, complete in ((2, True), (5, False)):
                with pytest.raises(NotAllowed, match="not in the journal"):
                    writer.checkpoints.resume_at("redis", segment, 0, complete, notice=None)


class TestSchemas:
    """Table versions keep their stamps."""

    def test_stamps(self, store: StateStore) -> None:
        """Versions count per table, the sequence over all tables of the pipeline."""
        lease = held(store)
        with store.fenced(lease) as writer:
            first = writer.schemas.register("acme", table("id"), position(1))
            other = writer.schemas.register("acme", table("id", name="items"), position(2))
            second = writer.schemas.register("acme", table("id", "name"), position(3))

        assert [(one.version, one.sequence) for one in (first, other, second)] == [
            (1, 1),
            (1, 2),
            (2, 3),
        ]
        assert first.fingerprint == other.fingerprint != second.fingerprint

    def test_earlier_version_again(self, store: StateStore) -> None:
        """A table that looks again as before gets that version's stamp, not a new one."""
        lease = held(store)
        stamps = []
        for columns in (("id",), ("id", "name"), ("id",), ("id", "name"), ("id", "x")):
            with store.fenced(lease) as writer:
                stamps.append(writer.schemas.register("acme", table(*columns), position(1)))

        assert stamps[2] == stamps[0]
        assert stamps[3] == stamps[1]
        assert (stamps[4].version, stamps[4].sequence) == (3, 3)

    def test_pipelines_do_not_share(self, store: StateStore) -> None:
        """Each pipeline numbers its own versions."""
        leases = []
        for name in ("one", "two"):
            store.pipelines.register(name, "spec", [])
            leases.append(store.leases.acquire(name, "run", 60))
        for lease in leases:
            assert lease is not None
            with store.fenced(lease) as writer:
                stamp = writer.schemas.register("acme", table("id"), position(1))
            assert (stamp.version, stamp.sequence) == (1, 1)
