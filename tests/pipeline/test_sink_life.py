"""A sink's life in real runs: down, paused, added, given batches; PostgreSQL's slot is the witness."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import psycopg
import pytest

from deltaforge_dagster.errors import PositionLost
from deltaforge_dagster.pipeline.control.work import NoWork, find_work
from deltaforge_dagster.resources.run_context import build_run_context
from deltaforge_dagster.sinks.base import SendGuard, SinkBatch
from deltaforge_dagster.sinks.file.sink import FileSink
from deltaforge_dagster.sources.base import Source
from deltaforge_dagster.sources.postgres.position import LsnPosition, parse_lsn
from deltaforge_dagster.sources.registry import parse_position
from deltaforge_dagster.state import legacy
from deltaforge_dagster.state.checkpoints import CheckpointWrites
from deltaforge_dagster.state.database.primitives import Kv
from tests.e2e.conftest import Shop, shop
from tests.e2e.deployment import eventually
from tests.fix_spark import SparkAddress
from tests.pipeline.live import Feed, in_one_segment, opened_feed, whole_lines

__all__ = ["shop"]

pytestmark = [pytest.mark.spark, pytest.mark.postgres, pytest.mark.redis]


class Lives:
    """A pipeline with Redis and the file sinks that its file has now, which misbehave on command."""

    def __init__(self, feed: Feed, folder: Path, text: str) -> None:
        self.feed = feed
        self.store = feed.store
        self.inserted = 0
        self._folder = folder
        self._text = text

    def file(self, *sinks: str, spec: str = "", engine: str = "") -> None:
        """Write the pipeline file: sinks as `a` or `a, required: false`, more of spec and engine."""
        files = "".join(
            f"    - {{type: file, config: {{path: {self._folder}/{one[0]}.jsonl, id: {one}}}}}\n"
            for one in sinks
        )
        self.feed.path.write_text(
            self._text.replace("  engine:\n", f"{files}{spec}  engine:\n{engine}")
        )

    def fault(self, sink: str, what: str | None) -> None:
        """Let a sink misbehave, or (None) work again."""
        path = self._folder / "faults" / sink
        if what is None:
            path.unlink(missing_ok=True)
        else:
            path.write_text(what)

    def insert(self, *counts: int) -> int:
        """Insert customers, a transaction for each count; return where the log ends then."""
        for count in counts or (1,):
            first, self.inserted = self.inserted + 1, self.inserted + count
            self.feed.shop.execute(
                f"INSERT INTO customers SELECT n, 'x' FROM generate_series({first}, {self.inserted}) n"
            )
        with psycopg.connect(self.feed.shop.dsn) as connection:
            row = connection.execute("SELECT pg_current_wal_flush_lsn()::text").fetchone()
        assert row is not None
        return parse_lsn(row[0])

    def captured(self) -> int:
        """Return where the last captured transaction ends."""
        end = parse_position(self.store.segments.read("feed")[-1].end_position)
        assert isinstance(end, LsnPosition)
        return end.lsn

    def forgotten(self) -> int:
        """Return up to where PostgreSQL may have forgotten its log."""
        with psycopg.connect(self.feed.shop.dsn) as connection:
            row = connection.execute(
                "SELECT confirmed_flush_lsn::text FROM pg_replication_slots"
                " WHERE database = current_database()"
            ).fetchone()
        assert row is not None
        return parse_lsn(row[0])

    def ids(self, sink: str) -> list[int]:
        """Return the ids that a sink got, in order."""
        if sink == "redis":
            entries = self.feed.delivered("customers")
            return [json.loads(one["df-event"])["after"]["id"] for one in entries]
        path = self._folder / f"{sink}.jsonl"
        return [json.loads(line)["after"]["id"] for line in whole_lines(path)]

    def has_all(self, *sinks: str) -> Callable[[], bool]:
        """Return whether these sinks have every customer, once and in order."""
        return lambda: all(self.ids(sink) == [*range(1, self.inserted + 1)] for sink in sinks)


@pytest.fixture
def lives(
    shop: Shop, spark_server: SparkAddress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Lives]:
    """A pipeline with Redis alone, so far."""
    (tmp_path / "faults").mkdir()
    monkeypatch.setenv("DELTAFORGE_SINK_FAULTS", str(tmp_path / "faults"))
    text = shop.pipeline(
        "feed",
        run="{idle_seconds: 120, lease_seconds: 120, renew_seconds: 0.3}",
        range_="{max_seconds: 600}",
    )
    with opened_feed(shop, tmp_path / "feed.yaml", text, spark_server) as feed:
        yield Lives(feed, tmp_path, text)


@pytest.mark.parametrize(
    ("sinks", "policy", "waits"),
    [
        (("a", "b"), "{mode: required}", True),
        (("a, required: false", "b"), "{mode: required}", False),
        (("a, required: false", "b"), "{mode: all}", True),
        (("a", "b"), "{mode: quorum, quorum: 2}", False),
        (("a, required: false", "b"), "{mode: quorum, quorum: 3}", True),
    ],
)
def test_what_the_source_may_forget(
    lives: Lives, sinks: tuple[str, ...], policy: str, waits: bool
) -> None:
    """With a sink down the others get everything, the slot moves or not, and the sink catches up.

    It is tried again all the time: the run does not end, and nothing is left out once it is back.
    """
    lives.file(*sinks, spec=f"  commit_policy: {policy}\n")
    run = lives.feed.begin()
    lives.insert()
    eventually(lives.has_all("redis", "a", "b"), what="the first change")
    eventually(lambda: lives.forgotten() >= lives.captured(), what="the slot")
    lives.fault("a", "fail_before")

    lives.insert(3, 1)

    eventually(lives.has_all("redis", "b"), what="the siblings")
    end = lives.captured()
    eventually(
        lambda: lives.store.checkpoints.read("feed")["a"].failures > 1, what="another attempt"
    )
    lives.insert()
    eventually(lives.has_all("redis", "b"), what="the siblings")
    if waits:
        assert lives.forgotten() < end
    else:
        eventually(lambda: lives.forgotten() >= end, what="the slot")
    assert lives.ids("a") == [1]

    lives.fault("a", None)
    eventually(lives.has_all("redis", "a", "b"), what="the catch-up")
    eventually(lambda: lives.forgotten() >= lives.captured(), what="the slot")
    outcome = run.end()
    assert (outcome.reason, outcome.sink_errors, outcome.behind) == ("asked", {}, {})


def test_a_paused_sink(lives: Lives) -> None:
    """It gets nothing, its siblings all, the slot waits for it; resumed it has all, in one run."""
    lives.file("a", "b")
    run = lives.feed.begin()
    lives.insert()
    eventually(lives.has_all("redis", "a", "b"), what="the first change")

    lives.store.checkpoints.pause("feed", "a")
    eventually(lambda: "deliver feed a" not in threads(), what="the end of its deliverer")
    lives.insert(2, 3)
    eventually(lives.has_all("redis", "b"), what="the siblings")
    end = lives.captured()
    outcome = run.end()
    assert (outcome.reason, outcome.paused_sinks, outcome.sink_errors) == ("asked", ("a",), {})
    again = lives.feed.catch_up()  # a run that finds nothing else to do ends, and sends it nothing
    assert (again.reason, again.delivered) == ("caught up", {"redis": 0, "b": 0})
    assert lives.ids("a") == [1]
    assert lives.forgotten() < end
    work = find_work(lives.store, lives.feed.loaded, lambda: source_of(lives))
    assert isinstance(work, NoWork)

    run = lives.feed.begin()
    lives.insert()
    eventually(lives.has_all("redis", "b"), what="the siblings")
    assert lives.ids("a") == [1]
    lives.store.checkpoints.resume("feed", "a")
    eventually(lives.has_all("redis", "a", "b"), what="the catch-up")
    eventually(lambda: lives.forgotten() >= lives.captured(), what="the slot")
    assert run.end().paused_sinks == ()


def test_a_file_that_is_edited_while_a_run_lives(
    lives: Lives, caplog: pytest.LogCaptureFixture
) -> None:
    """Sinks that are added begin where they should, one that is gone loses its checkpoint only."""
    lives.file("a")
    run = lives.feed.begin()
    lives.insert(2)
    eventually(lives.has_all("redis", "a"), what="the first changes")
    eventually(
        lambda: lives.store.checkpoints.read("feed")["a"].segment == 1, what="the checkpoint"
    )

    lives.file("b", "t, start: tail", "j, start: journal")
    assert run.outcome().reason == "pipeline file changed"
    lives.insert(3)
    first = lives.feed.catch_up()

    assert first.delivered == {"redis": 3, "b": 3, "t": 3, "j": 5}
    assert (lives.ids("b"), lives.ids("t")) == ([3, 4, 5], [3, 4, 5])
    assert lives.has_all("redis", "j")()
    assert lives.ids("a") == [1, 2]
    assert set(lives.store.checkpoints.read("feed")) == {"redis", "b", "t", "j"}
    assert "sink a is gone, and its checkpoint with it" in caplog.text
    assert (
        "sink b: added; begins with segment 2, where sink a, the slowest, stood; a is"
        in caplog.text
    )
    assert "sink t: added; begins with segment 2, with what was captured after it" in caplog.text
    assert "sink j: added; begins with segment 1, the journal's oldest" in caplog.text


class Spy:
    """What the sink `a` was given, and when its checkpoint was written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[list[int]] = []
        self.written: list[int] = []
        send, advance = FileSink.send, CheckpointWrites.advance

        def sent(sink: FileSink, batch: SinkBatch, guard: SendGuard) -> int:
            self.batches.append(cast("list[int]", batch.messages.column("ordinal").to_pylist()))
            return send(sink, batch, guard)

        def written(writer: CheckpointWrites, sink: str, *place: Any, **more: Any) -> None:
            if sink == "a":
                self.written.append(place[1])
            advance(writer, sink, *place, **more)

        monkeypatch.setattr(FileSink, "send", sent)
        monkeypatch.setattr(CheckpointWrites, "advance", written)

    def lengths(self) -> list[int]:
        """Return the sizes of the delivery batches since the last call."""
        taken, self.batches = self.batches, []
        return [len(one) for one in taken]


def test_delivery_batches(lives: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    """One segment is cut as the file says, and each delivery batch is followed by a checkpoint."""
    spy = Spy(monkeypatch)
    seventeen = f"    segment: {in_one_segment(17, monkeypatch)}\n"
    for fields, sizes in (
        ("spec", [17]),
        ("  batch: {max_events: 4}\n", [3, 10, 4]),
        ("  batch: {max_events: 12}\n", [3, 12, 2]),
        ("  batch: {max_events: 4, respect_source_tx: false}\n", [4, 4, 4, 4, 1]),
        ("  batch: {max_bytes: 1, respect_source_tx: false}\n", [1] * 17),
        ("  batch: {max_ms: 20}\n", [17]),
    ):
        lives.file("a", spec="" if fields == "spec" else fields, engine=seventeen)
        spy.written.clear()
        segments = len(lives.store.segments.read("feed"))
        lives.insert(3, 10, 2, 2)

        lives.feed.catch_up()

        assert len(lives.store.segments.read("feed")) == segments + 1
        assert spy.lengths() == sizes
        ends = list(itertools.accumulate(sizes))
        assert spy.written == [end - 1 for end in ends] + [16] * (len(sizes) > 1)
    assert lives.has_all("redis", "a")()


def test_a_checkpoint_after_so_many_events(lives: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many are sent at most without a checkpoint: the most that could come again."""
    spy = Spy(monkeypatch)
    seventeen = f"    segment: {in_one_segment(17, monkeypatch)}\n"
    for after, sizes in ((5, [5, 5, 5, 2]), (1, [1] * 17), (500, [17])):
        lives.file("a", engine=f"{seventeen}    checkpoint: {{after: {after}}}\n")
        spy.written.clear()
        lives.insert(3, 14)

        lives.feed.catch_up()

        assert spy.lengths() == sizes
        assert len(spy.written) >= 17 // after
        assert spy.written[-1] == 16
    lives.file(
        "a", spec="  batch: {max_events: 2}\n", engine=f"{seventeen}    checkpoint: {{after: 6}}\n"
    )
    spy.written.clear()
    lives.insert(*[1] * 17)
    lives.feed.catch_up()
    assert spy.lengths() == [2] * 8 + [1]
    assert spy.written == [5, 11, 16]
    assert lives.has_all("redis", "a")()


def test_a_sink_that_hangs_too_long(lives: Lives) -> None:
    """It is closed at the deadline, counted, and given the batch again; nobody else notices."""
    lives.file("a", spec="  sink_batch_deadline_secs: 1\n")
    run = lives.feed.begin()
    lives.insert()
    eventually(lives.has_all("redis", "a"), what="the first change")
    lives.fault("a", "hang")
    lives.insert(3)
    eventually(lives.has_all("redis"), what="the sibling")

    row = eventually(
        lambda: (one := lives.store.checkpoints.read("feed")["a"]).failures and one,
        what="the deadline",
    )
    assert "took longer than 1 s for a batch (sink_batch_deadline_secs)" in row.last_error

    lives.fault("a", None)
    eventually(lives.has_all("redis", "a"), what="the catch-up")
    outcome = run.end()
    assert outcome.sink_timeouts["a"] >= 1
    assert "redis" not in outcome.sink_timeouts
    assert outcome.sink_errors == {}


def test_moving_from_deltaforge(lives: Lives) -> None:
    """Each sink goes on after what DeltaForge's had; the slot is the one that DeltaForge had."""
    lives.file("a", "b")
    ends = [lives.insert(2) for _ in range(3)]
    lives.store.journals.reset("feed")
    checkpoints = Kv(lives.store.database, legacy.NAMESPACE)
    for sink, end in (("redis", ends[0]), ("a", ends[1])):
        text = LsnPosition(end, 7).to_json()
        checkpoints.put(legacy.sink_key("feed-source", sink), text.encode())

    lives.feed.catch_up()

    assert lives.ids("redis") == lives.ids("b") == [3, 4, 5, 6]
    # At least once: the segment in which its position lies comes whole.
    assert lives.ids("a")[-2:] == [5, 6]
    assert set(lives.ids("a")) <= {3, 4, 5, 6}
    row = lives.store.pipelines.get("feed")
    assert row is not None
    assert parse_position(str(row.start_position)) == LsnPosition(ends[0])


def test_a_position_that_the_slot_let_go_of(lives: Lives) -> None:
    """An imported checkpoint that cannot be gone on after stops with the reason."""
    lives.store.journals.reset("feed")
    text = LsnPosition(0x100, 7).to_json()
    Kv(lives.store.database, legacy.NAMESPACE).put("feed-source", text.encode())

    with pytest.raises(PositionLost, match="beyond 0/00000100"):
        lives.feed.catch_up()


def test_everything_again(lives: Lives) -> None:
    """After `reset --all` the slot's rest is captured and delivered again, under new numbers."""
    lives.file("a")
    lives.insert(2)
    lives.feed.catch_up()
    lives.insert(3)
    lives.store.journals.reset("feed")

    outcome = lives.feed.catch_up()

    assert outcome.captured >= 3
    assert lives.ids("a")[-3:] == lives.ids("redis")[-3:] == [3, 4, 5]
    row = lives.store.pipelines.get("feed")
    assert row is not None
    assert {one.segment for one in lives.store.segments.read("feed")} == {2}


def threads() -> set[str]:
    """Return the names of the threads that live."""
    return {one.name for one in threading.enumerate()}


def source_of(lives: Lives) -> Source:
    """Return a source of the pipeline."""
    return build_run_context(lives.feed.opened, lives.feed.loaded).build_source()
