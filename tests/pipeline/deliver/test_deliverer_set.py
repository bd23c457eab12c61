"""The deliverers of one run: independent of each other, in order, and catching up in few jobs."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from deltaforge_dagster.journal import writer as writing
from deltaforge_dagster.pipeline.deliver import deliverer_set, sender
from deltaforge_dagster.pipeline.encode import encoder
from deltaforge_dagster.pipeline.encode.encoder import Encoder
from deltaforge_dagster.pipeline.encode.segments import EncodedSegments
from deltaforge_dagster.state.records import SegmentRow
from tests.e2e.conftest import shop
from tests.e2e.deployment import eventually
from tests.pipeline.live import Feed, whole_lines
from tests.pipeline.run.test_live import PATIENT, MakeFeed, insert, make_feed

__all__ = ["make_feed", "shop"]

pytestmark = [pytest.mark.spark, pytest.mark.postgres, pytest.mark.redis]


class Files:
    """File sinks `a` and `b` beside Redis, which misbehave on command."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "faults").mkdir()
        self.sinks = "".join(
            f"    - {{type: file, config: {{id: {sink}, path: {folder}/{sink}.jsonl}}}}\n"
            for sink in "ab"
        )

    def fault(self, what: str | None, *sinks: str) -> None:
        """Let sinks misbehave, or (None) work again."""
        for sink in sinks:
            path = self._folder / "faults" / sink
            if what is None:
                path.unlink()
            else:
                path.write_text(what)

    def ids(self, sink: str) -> list[int]:
        """Return the ids that a sink got, in order."""
        path = self._folder / f"{sink}.jsonl"
        return [json.loads(line)["after"]["id"] for line in whole_lines(path)]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    """The file sinks."""
    monkeypatch.setenv("DELTAFORGE_SINK_FAULTS", str(tmp_path / "faults"))
    return Files(tmp_path)


def in_redis(feed: Feed) -> list[int]:
    """Return the ids in Redis, in order."""
    return [json.loads(one["df-event"])["after"]["id"] for one in feed.delivered("customers")]


def published(feed: Feed, asset: str) -> list[int]:
    """Return the ranges published for an asset."""
    return sorted(
        number for number, one in feed.store.ranges.published("feed", 1, 99) if one == asset
    )


Job = tuple[list[int], range | None]


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The segments of each Spark job, and the part of the segment that it is for."""
    made: list[Job] = []
    make: Callable[[Encoder, Sequence[SegmentRow], range | None], EncodedSegments] = Encoder.encode

    def counted(
        encoder: Encoder, segments: Sequence[SegmentRow], ordinals: range | None = None
    ) -> EncodedSegments:
        made.append(([one.segment for one in segments], ordinals))
        return make(encoder, segments, ordinals)

    monkeypatch.setattr(Encoder, "encode", counted)
    return made


def test_a_sink_that_was_down_catches_up_in_the_same_run(make_feed: MakeFeed, files: Files) -> None:
    """Down during three ranges, which its siblings get meanwhile; then all in order, source idle."""
    feed = make_feed(run=PATIENT, range_="{max_events: 2}", more_sinks=files.sinks)
    files.fault("fail_before", "a")
    run = feed.begin()
    for number in (1, 3, 5):
        insert(feed.shop, number, number + 1)
        eventually(lambda: len(in_redis(feed)) == len(files.ids("b")) == number + 1)  # noqa: B023
    for sink in ("b", "redis"):
        eventually(lambda: published(feed, sink) == [1, 2, 3], what=f"the publication of {sink}")  # noqa: B023
    assert (files.ids("a"), published(feed, "a")) == ([], [])

    files.fault(None, "a")
    eventually(lambda: published(feed, "a") == [1, 2, 3], what="the catch-up")

    assert files.ids("a") == files.ids("b") == in_redis(feed) == [*range(1, 7)]
    outcome = run.end()
    assert (outcome.captured, outcome.ranges) == (6, 3)
    assert outcome.delivered == {"redis": 6, "a": 6, "b": 6}
    assert (outcome.sink_errors, outcome.behind) == ({}, {})


def test_sinks_that_hang_hold_up_nobody(make_feed: MakeFeed, files: Files) -> None:
    """Two of three are held in the middle of a send; the third gets everything all the same."""
    feed = make_feed(run=PATIENT, range_="{max_events: 2}", more_sinks=files.sinks)
    files.fault("hang", "a", "b")
    run = feed.begin()
    for number in (1, 3, 5, 7):
        insert(feed.shop, number, number + 1)
        eventually(lambda: len(in_redis(feed)) == number + 1)  # noqa: B023
    eventually(lambda: published(feed, "redis") == [1, 2, 3, 4], what="the publication")
    assert (files.ids("a"), files.ids("b")) == ([], [])

    files.fault(None, "a", "b")
    everything = [*range(1, 9)]
    eventually(lambda: files.ids("a") == files.ids("b") == everything, what="the catch-up")
    assert run.end().delivered == {"redis": 8, "a": 8, "b": 8}


def test_a_segment_ends_while_the_sink_still_sends(
    make_feed: MakeFeed, jobs: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is captured while the only sink sends is encoded meanwhile, and does not wait for the sink or the clock."""
    feed = make_feed(run=PATIENT, range_="{max_events: 9}\n    segment: {max_ms: 600000}")
    sending, free = threading.Event(), threading.Event()
    send = sender.SegmentSender.send

    def held(one: sender.SegmentSender, encoded: EncodedSegments, row: SegmentRow) -> bool:
        sending.set()
        assert free.wait(300)
        return send(one, encoded, row)

    monkeypatch.setattr(sender.SegmentSender, "send", held)
    run = feed.begin()
    insert(feed.shop, 1, 1)
    assert sending.wait(60)
    insert(feed.shop, 2, 2)
    eventually(lambda: jobs == [([1], None), ([2], None)])
    insert(feed.shop, 3, 3)
    free.set()
    eventually(lambda: in_redis(feed) == [1, 2, 3])

    assert run.end().delivered == {"redis": 3}


def test_catch_up_takes_few_jobs(make_feed: MakeFeed, files: Files, jobs: list[Job]) -> None:
    """A sink that is many segments behind gets them encoded together."""
    feed = make_feed(run=PATIENT, range_="{max_events: 5}", more_sinks=files.sinks)
    files.fault("fail_before", "a")
    run = feed.begin()
    for number in range(1, 21):
        insert(feed.shop, number, number)
        eventually(lambda: len(feed.store.segments.read("feed")) == number)  # noqa: B023
    eventually(lambda: len(in_redis(feed)) == len(files.ids("b")) == 20, what="the siblings")
    run.end()
    jobs.clear()
    files.fault(None, "a")

    outcome = feed.catch_up()

    assert outcome.delivered == {"redis": 0, "a": 20, "b": 0}
    assert files.ids("a") == [*range(1, 21)]
    assert jobs == [([*range(1, 21)], None)]


def test_a_large_segment_goes_on_in_the_middle(
    make_feed: MakeFeed, files: Files, jobs: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sent in parts; a run that ends between two leaves the rest, and no more, to the next one."""
    monkeypatch.setattr(writing, "ROW_GROUP_BYTES", 128 << 10)
    monkeypatch.setattr(encoder, "PART_ROW_GROUPS", 2)
    monkeypatch.setattr(sender, "CHECKPOINT_SECONDS", 0)
    monkeypatch.setattr(deliverer_set, "_GRACE_SECONDS", 0.5)
    feed = make_feed(run=PATIENT, range_="{max_seconds: 600}", more_sinks=files.sinks)

    first = threading.Event()

    def hang_from_then_on(step: str) -> None:
        if step == "sink-sent" and threading.current_thread().name.endswith(" a"):
            if not first.is_set():
                files.fault("hang", "a")
            first.set()

    monkeypatch.setattr(sender, "failpoint", hang_from_then_on)
    run = feed.begin()
    insert(feed.shop, 1, 10_000)

    eventually(lambda: feed.store.checkpoints.read("feed")["a"].ordinal > 0, what="the first part")

    def at_rest() -> bool:
        found = feed.store.checkpoints.read("feed")
        return all(found[name].complete for name in ("b", "redis"))

    eventually(at_rest, what="the other sinks")
    run.end()

    reached = feed.store.checkpoints.read("feed")["a"]
    (segment,) = feed.store.segments.read("feed")
    parts = sorted({part.start for _, part in jobs if part is not None})
    assert len(parts) > 1
    assert (reached.segment, reached.complete, segment.rows) == (1, False, 10_000)
    assert files.ids("a") == [*range(1, reached.ordinal + 2)]
    files.fault(None, "a")
    jobs.clear()
    feed.catch_up()
    assert files.ids("a") == files.ids("b") == in_redis(feed) == [*range(1, 10_001)]
    needed = {part for _, part in jobs if part is not None and reached.ordinal + 1 < part.stop}
    assert needed == {part for _, part in jobs}
