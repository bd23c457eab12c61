"""What every kind of state store promises of segments and ranges, and of what becomes of them."""

from __future__ import annotations

import math

import pytest

from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.state.records import Lease
from deltaforge_dagster.state.store import StateStore
from tests.state.make import (
    NAME,
    capture,
    deliver,
    everything,
    expire,
    held,
    new_segment,
    position,
    table,
)


class TestJournal:
    """Segments follow one another, ranges follow one another, nothing is written twice."""

    def test_segments_and_ranges(self, store: StateStore) -> None:
        """Segments enter the open range, which sums them up; the captured position follows."""
        lease = held(store)
        with store.fenced(lease) as writer:
            number = writer.ranges.open(position(0), "spec-1", 1)
            writer.segments.add(new_segment(1), number)
        with store.fenced(lease) as writer:
            second = new_segment(
                2,
                counts={"public.orders": {"u": 5}, "public.items": {"d": 1}},
                schema_versions={"public.orders": "sha256:two", "public.items": "sha256:x"},
                rows=6,
                first_ts_us=1,
            )
            writer.segments.add(second, number)

        open_range = store.ranges.get(NAME, 1)
        assert open_range is not None
        assert (open_range.state, open_range.closed_at) == ("open", None)
        assert (open_range.first_segment, open_range.last_segment) == (1, 2)
        assert (open_range.start_position, open_range.end_position) == (position(0), position(2))
        assert (open_range.rows, open_range.bytes) == (9, 200)
        assert open_range.counts == {"public.orders": {"c": 2, "u": 6}, "public.items": {"d": 1}}
        assert open_range.schema_versions == {
            "public.orders": ["sha256:one", "sha256:two"],
            "public.items": "sha256:x",
        }
        assert (open_range.first_ts_us, open_range.last_ts_us) == (1, 2002)
        pipeline = store.pipelines.get(NAME)
        assert pipeline is not None
        assert (pipeline.captured_position, pipeline.next_segment) == (position(2), 3)
        row = store.segments.get(NAME, 2)
        assert row is not None
        assert (row.range, row.epoch, row.segment_id) == (1, 1, "id-2")
        assert row.counts == second.counts
        assert row.created_at == pytest.approx(store.now(), abs=60)
        assert store.segments.total_bytes(NAME) == 200
        assert store.segments.about_bytes(NAME, after=1, last=2) == 100
        assert store.segments.about_bytes(NAME, after=0, last=6) == 600
        assert store.segments.about_bytes(NAME, after=2, last=2) == 0

    def test_close(self, store: StateStore) -> None:
        """A closed range says when, why and with which content, and stays so."""
        lease = held(store)
        number = capture(store, lease, 1)

        closed = store.ranges.get(NAME, number)
        assert closed is not None
        assert (closed.state, closed.close_reason) == ("closed", "max_events")
        assert closed.content_hash == "hash-1"
        assert closed.closed_at is not None
        with pytest.raises(NotAllowed, match="closed"), store.fenced(lease) as writer:
            writer.ranges.close(number, "max_seconds", "another hash")
        with pytest.raises(NotAllowed, match="closed"), store.fenced(lease) as writer:
            writer.segments.add(new_segment(2), number)

    @pytest.mark.parametrize("number", [0, 1, 2, 4, 5])
    def test_segment_numbers_are_consecutive(self, store: StateStore, number: int) -> None:
        """Only the very next number is taken: no gap, and none a second time."""
        lease = held(store)
        capture(store, lease, 1, 2, close=False)

        with pytest.raises(NotAllowed, match="next segment is 3"), store.fenced(lease) as writer:
            writer.segments.add(new_segment(number, segment_id="another"), 1)

        assert [row.segment for row in store.segments.read(NAME)] == [1, 2]

    def test_range_rules(self, store: StateStore) -> None:
        """One range is open at a time, begins with the next segment, and is never empty."""
        lease = held(store)
        with pytest.raises(NotAllowed, match="next one is 1"), store.fenced(lease) as writer:
            writer.ranges.open(position(0), "spec-1", 2)
        with pytest.raises(NotAllowed, match="cannot be closed"), store.fenced(lease) as writer:
            writer.ranges.close(writer.ranges.open(position(0), "spec-1", 1), "idle", "hash")
        with pytest.raises(NotAllowed, match="no range 9"), store.fenced(lease) as writer:
            writer.ranges.close(9, "idle", "hash")
        capture(store, lease, 1, close=False)
        with pytest.raises(NotAllowed, match="still open"), store.fenced(lease) as writer:
            writer.ranges.open(position(1), "spec-1", 2)
        with pytest.raises(NotAllowed, match="no range 2"), store.fenced(lease) as writer:
            writer.segments.add(new_segment(2), 2)

    def test_range_of_a_dead_run(self, store: StateStore) -> None:
        """The next holder closes what the last one left open, and numbers go on."""
        old = held(store)
        capture(store, old, 1, 2, close=False)
        expire(store)
        lease = held(store, run_id="run-2")

        with store.fenced(lease) as writer:
            writer.ranges.close(1, "recovered", "hash-1")
        capture(store, lease, 3)

        assert [(row.range, row.epoch) for row in store.ranges.read(NAME)] == [(1, 1), (2, 2)]

    def test_block_may_be_run_again(self, store: StateStore) -> None:
        """A block whose commit was not answered can be repeated: nothing is written twice."""
        lease = held(store)

        def block() -> None:
            with store.fenced(lease) as writer:
                number = writer.ranges.open(position(0), "spec-1", 1)
                writer.segments.add(new_segment(1), number)

        def close() -> None:
            with store.fenced(lease) as writer:
                writer.ranges.close(1, "idle", "hash-1")
                writer.checkpoints.advance("redis", 1, 2, True, position(1))
                writer.schemas.register("acme", table("id"), position(1))

        for repeated in (block, close):
            repeated()
            once = store.ranges.read(NAME), store.segments.read(NAME), store.pipelines.get(NAME)
            repeated()
            assert (
                store.ranges.read(NAME),
                store.segments.read(NAME),
                store.pipelines.get(NAME),
            ) == once

    def test_reading(self, store: StateStore) -> None:
        """Ranges and segments can be had by number, state, limit and from the end."""
        lease = held(store)
        for number in range(1, 6):
            capture(store, lease, number, close=number < 5)

        assert [row.range for row in store.ranges.read(NAME, state="open")] == [5]
        assert [row.range for row in store.ranges.read(NAME, state="closed", limit=2)] == [1, 2]
        assert [row.range for row in store.ranges.read(NAME, first=2, last=3)] == [2, 3]
        newest = store.ranges.read(NAME, limit=2, newest_first=True)
        assert [row.range for row in newest] == [5, 4]
        assert [row.segment for row in store.segments.read(NAME, first=3, limit=2)] == [3, 4]
        assert store.ranges.get(NAME, 9) is None
        assert store.segments.get(NAME, 9) is None

    def test_idle_progress(self, store: StateStore) -> None:
        """The captured position moves over log without changes, and never back."""
        lease = held(store)
        capture(store, lease, 1)
        for passed, expected in ((5, 5), (3, 5), (6, 6)):
            with store.fenced(lease) as writer:
                writer.pipeline.set_captured(position(passed))
            pipeline = store.pipelines.get(NAME)
            assert pipeline is not None
            assert pipeline.captured_position == position(expected)


class TestRetention:
    """Nothing that anybody needs is forgotten."""

    def numbers(self, store: StateStore, before: float = math.inf) -> list[int]:
        """Return the segments that may go."""
        return [row.segment for row in store.segments.expirable(NAME, before)]

    def publish(self, store: StateStore) -> None:
        """Publish all that is due."""
        for number, asset in store.ranges.unpublished(NAME):
            store.ranges.mark_published(NAME, number, asset)

    def test_what_may_go(self, store: StateStore) -> None:
        """Only closed, old, published ranges that every sink has passed, from the start on."""
        lease = held(store, "a", "b")
        capture(store, lease, 1, 2)
        capture(store, lease, 3)
        capture(store, lease, 4, close=False)
        assert self.numbers(store) == []
        deliver(store, lease, "a", 4)
        deliver(store, lease, "b", 3)
        assert self.numbers(store) == []
        store.ranges.mark_published(NAME, 2, "changes")
        store.ranges.mark_published(NAME, 2, "a")
        store.ranges.mark_published(NAME, 2, "b")
        assert self.numbers(store) == []  # no hole in the journal while range 1 stays

        self.publish(store)

        assert self.numbers(store) == [1, 2, 3]
        assert self.numbers(store, before=store.now() - 60) == []

    @pytest.mark.parametrize("segment", [1, 2])
    def test_sink_that_is_behind(self, store: StateStore, segment: int) -> None:
        """A segment some sink still lacks stays, with its whole range."""
        lease = held(store, "a", "b")
        capture(store, lease, 1, 2)
        capture(store, lease, 3, 4)
        deliver(store, lease, "a", 4)
        deliver(store, lease, "b", 2)
        with store.fenced(lease) as writer:
            writer.checkpoints.advance("b", 2 + segment, 1, False, None)
        self.publish(store)

        assert self.numbers(store) == [1, 2]
        assert [row.segment for row in store.segments.expire(NAME, [1, 2, 3, 4])] == [1, 2]
        assert [row.segment for row in store.segments.read(NAME)] == [3, 4]

    def test_decided_again_when_forgotten(self, store: StateStore) -> None:
        """A checkpoint reset between asking and forgetting keeps its segments."""
        lease = held(store)
        capture(store, lease, 1)
        capture(store, lease, 2)
        deliver(store, lease, "redis", 2)
        self.publish(store)
        asked = self.numbers(store)
        with store.fenced(lease) as writer:
            writer.lease.release()
        store.checkpoints.reset(NAME, "redis", 1)

        gone = store.segments.expire(NAME, asked)

        assert asked == [1, 2]
        assert [row.segment for row in gone] == [1]
        assert gone[0].path == "orders/1.parquet"

    def test_ranges(self, store: StateStore) -> None:
        """A range goes, with what was published of it, once its segments are gone; numbers go on."""
        lease = held(store)
        capture(store, lease, 1)
        capture(store, lease, 2)
        deliver(store, lease, "redis", 2)
        self.publish(store)
        store.segments.expire(NAME, [1])

        assert store.ranges.expire(NAME, [1, 2, 77]) == [1]

        assert [row.range for row in store.ranges.read(NAME)] == [2]
        assert store.ranges.published(NAME, 1, 2) == {(2, "changes"), (2, "redis")}
        assert store.ranges.unpublished(NAME) == []
        assert capture(store, lease, 3) == 3
        assert store.ranges.expire(NAME, []) == []
        assert store.segments.expire(NAME, []) == []

    def test_emptied_journal(self, store: StateStore) -> None:
        """After everything is forgotten, capture and delivery go on with the next numbers."""
        lease = held(store)
        capture(store, lease, 1)
        deliver(store, lease, "redis", 1)
        self.publish(store)
        store.segments.expire(NAME, [1])
        store.ranges.expire(NAME, [1])

        capture(store, lease, 2)
        deliver(store, lease, "redis", 2)

        assert store.segments.total_bytes(NAME) == 100
        assert store.ranges.unpublished(NAME) == [(2, "changes"), (2, "redis")]


class TestRebuild:
    """A journal started afresh."""

    @staticmethod
    def prepared(store: StateStore) -> Lease:
        """Return the lease over three segments: `ahead` has all, `behind` the first."""
        lease = held(store, "ahead", "behind")
        capture(store, lease, 1, 2)
        capture(store, lease, 3, close=False)
        with store.fenced(lease) as writer:
            writer.checkpoints.set_incarnation("ahead", "a")
            writer.checkpoints.advance("ahead", 3, 2, True, position(3), exactly_once=True)
            writer.checkpoints.advance("behind", 1, 2, True, position(1))
            writer.pipeline.set_confirmed(position(1))
        return lease

    def test_begins_at_the_confirmed_position(self, store: StateStore) -> None:
        """Everything of the journal goes, numbers go on, and sinks keep what they surely have."""
        lease = self.prepared(store)
        store.ranges.mark_published(NAME, 1, "changes")
        before = store.pipelines.get(NAME)
        with store.fenced(lease) as writer:
            writer.lease.release()

        rebuilt = store.journals.rebuild(NAME, accept_loss=False)

        assert (rebuilt.position, rebuilt.lossy) == (position(1), [])
        assert (rebuilt.segments, rebuilt.ranges) == (3, 2)
        row = store.pipelines.get(NAME)
        assert before is not None
        assert row is not None
        assert row.uid != before.uid
        assert (row.captured_position, row.next_segment, row.next_range) == (position(1), 4, 3)
        assert (store.segments.read(NAME), store.ranges.read(NAME)) == ([], [])
        assert store.ranges.published(NAME, 1, 9) == set()
        ahead, behind = (store.checkpoints.read(NAME)[sink] for sink in ("ahead", "behind"))
        for one in (ahead, behind):
            assert (one.segment, one.complete, one.first_segment) == (3, True, 4)
            assert one.source_position == position(1), "the source must keep what comes again"
        assert (ahead.skip, ahead.incarnation, ahead.overrules) == (position(3), "a", False)
        assert behind.skip == position(1)
        store.journals.rebuild(NAME, accept_loss=False)
        assert store.checkpoints.read(NAME)["ahead"].skip == position(3), "twice is like once"

    def test_goes_on(self, store: StateStore) -> None:
        """What follows is captured and delivered under new numbers."""
        lease = self.prepared(store)
        with store.fenced(lease) as writer:
            writer.lease.release()
        store.journals.rebuild(NAME, accept_loss=False)

        again = store.leases.acquire(NAME, "run-2", 60)
        assert again is not None
        assert capture(store, again, 4) == 3
        deliver(store, again, "behind", 4)

    def test_refusals(self, store: StateStore) -> None:
        """Not under a run, not unknown, not before anything was captured."""
        store.pipelines.register("new", "spec", ["redis"])
        with pytest.raises(NotAllowed, match="captured nothing yet"):
            store.journals.rebuild("new", accept_loss=False)
        with pytest.raises(NotAllowed, match="no pipeline"):
            store.journals.rebuild("other", accept_loss=False)
        self.prepared(store)
        with pytest.raises(NotAllowed, match="held by run run-1; stop it"):
            store.journals.rebuild(NAME, accept_loss=False)

    def test_loss(self, store: StateStore) -> None:
        """A sink that lacks what the source may have forgotten loses it only when told so."""
        lease = self.prepared(store)
        with store.fenced(lease) as writer:
            writer.pipeline.set_confirmed(position(2))
            writer.lease.release()
        before = everything(store)

        with pytest.raises(NotAllowed, match=r"sinks behind lack changes.*--accept-loss"):
            store.journals.rebuild(NAME, accept_loss=False)
        assert everything(store) == before
        assert store.journals.rebuild(NAME, accept_loss=True).lossy == ["behind"]

    def test_empty_log_is_no_loss(self, store: StateStore) -> None:
        """Log without a change that was confirmed meanwhile is nothing that a sink lacks."""
        lease = held(store)
        capture(store, lease, 1)
        deliver(store, lease, "redis", 1)
        with store.fenced(lease) as writer:
            writer.pipeline.set_captured(position(7))
            writer.pipeline.set_confirmed(position(7))
            number = writer.ranges.open(position(7), "spec-1", 2)
            later = {"start_position": position(7), "end_position": position(8)}
            writer.segments.add(new_segment(2, **later), number)
            writer.lease.release()

        assert store.journals.rebuild(NAME, accept_loss=False).lossy == []

    def test_detached_sinks_stay_where_they_are(self, store: StateStore) -> None:
        """A detached sink can afterwards be attached at the tail only: nothing is skipped unsaid."""
        lease = self.prepared(store)
        with store.fenced(lease) as writer:
            writer.checkpoints.detach("behind", "full")
            writer.pipeline.set_confirmed(position(3))
            writer.lease.release()

        assert store.journals.rebuild(NAME, accept_loss=False).detached == ["behind"]
        with pytest.raises(NotAllowed, match="no longer in the journal"):
            store.checkpoints.attach(NAME, "behind", tail=False)
        assert store.checkpoints.attach(NAME, "behind", tail=True).whole_segment == 3
