"""A journal that reaches its limit: what is delivered goes, who is optional, and who must wait."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest

from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.pipeline.run.live import LiveRun
from tests.e2e.conftest import Shop, shop
from tests.e2e.deployment import eventually
from tests.fix_spark import SparkAddress
from tests.pipeline.live import Feed, Watcher, opened_feed, whole_lines

__all__ = ["shop"]

pytestmark = [pytest.mark.spark, pytest.mark.postgres, pytest.mark.redis]

LIMIT = 400 << 10
ROWS = 1_000
"""Changes of one transaction, each a segment of some 130 KiB: event ids do not compress."""
FULL = 10
"""More transactions than the journal has room for, with what is captured before anybody notices."""


class Limited:
    """A feed with a small journal and two sinks, one of which misbehaves on command."""

    def __init__(self, feed: Feed, faults: Path, lines: Path) -> None:
        self.feed = feed
        self.store = feed.store
        self.inserted = 0
        self._faults = faults
        self._lines = lines

    def fault(self, sink: str, what: str | None) -> None:
        """Let a sink misbehave, or pause it, or (None) let it work again."""
        if what is None:
            (self._faults / sink).unlink(missing_ok=True)
        elif what == "pause":
            self.store.checkpoints.pause("feed", sink)
        else:
            (self._faults / sink).write_text(what)

    def insert(self, transactions: int) -> None:
        """Insert customers, each transaction captured as a segment of its own.

        The next one only comes when the run has seen to the journal's limit, however busy it is.
        """
        for _ in range(transactions):
            first, self.inserted = self.inserted + 1, self.inserted + ROWS
            before = self.segments
            self.feed.shop.execute(
                f"INSERT INTO customers SELECT n, md5(n::text) FROM generate_series({first}, "
                f"{self.inserted}) n"
            )
            eventually(
                lambda before=before: self.paused() or (self.segments > before and self.fits()),  # type: ignore[misc]
                what="the segment in a journal that fits, or a pause",
                every=0.02,
            )

    @property
    def segments(self) -> int:
        """How many segments were captured."""
        row = self.store.pipelines.get("feed")
        assert row is not None
        return row.next_segment - 1

    def fits(self) -> bool:
        """Whether the journal is below its limit."""
        return self.store.segments.total_bytes("feed") < LIMIT

    def paused(self) -> str | None:
        """Why capture is paused."""
        row = self.store.pipelines.get("feed")
        assert row is not None
        return row.capture_pause

    def in_redis(self) -> list[int]:
        """Return the ids in Redis, in order."""
        entries = self.feed.delivered("customers")
        return [json.loads(one["df-event"])["after"]["id"] for one in entries]

    def in_lines(self) -> list[int]:
        """Return the ids in the file, in order."""
        return [json.loads(line)["after"]["id"] for line in whole_lines(self._lines)]

    @property
    def expected(self) -> list[int]:
        """Every id inserted, in order."""
        return list(range(1, self.inserted + 1))


@pytest.fixture
def limited(
    shop: Shop, spark_server: SparkAddress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Limited]]:
    """Make a feed; the file sink `lines` is required or not, Redis always is."""
    faults, lines = tmp_path / "faults", tmp_path / "lines.jsonl"
    faults.mkdir()
    monkeypatch.setenv("DELTAFORGE_SINK_FAULTS", str(faults))
    with ExitStack() as stack:

        def make(required: bool) -> Limited:
            text = shop.pipeline(
                "feed",
                run="{idle_seconds: 120, lease_seconds: 120, renew_seconds: 0.5}",
                range_="{max_seconds: 600}",
                more_sinks=f"    - {{type: file, config: {{id: lines, path: {lines}, "
                f"required: {str(required).lower()}}}}}\n",
            )
            text += f"    journal: {{max_bytes: {LIMIT}}}\n"
            path = tmp_path / "feed.yaml"
            feed = stack.enter_context(opened_feed(shop, path, text, spark_server))
            return Limited(feed, faults, lines)

        yield make


def warnings(run: LiveRun) -> list[str]:
    """Return what the run told people."""
    observer = run._observer
    assert isinstance(observer, Watcher)
    return observer.warnings


def test_delivered_segments_go_before_their_time(limited: Callable[..., Limited]) -> None:
    """With every sink at work the journal stays within its limit, and nobody notices."""
    fed = limited(required=True)
    run = fed.feed.begin()

    for _ in range(FULL):
        fed.insert(1)
        eventually(lambda: len(fed.in_redis()) == fed.inserted == len(fed.in_lines()))

    eventually(lambda: fed.store.segments.total_bytes("feed") < LIMIT, what="the journal's limit")
    outcome = run.end()
    assert (outcome.reason, outcome.paused, outcome.detached) == ("asked", None, ())
    assert fed.in_redis() == fed.in_lines() == fed.expected
    kept = fed.store.segments.read("feed")
    assert 0 < len(kept) < FULL
    files = Path(fed.feed.opened.journal.spark_path(kept[0].path)).parent.glob("*.parquet")
    assert len(list(files)) == len(kept)
    assert {row.close_reason for row in fed.store.ranges.read("feed")} >= {"journal full"}


@pytest.mark.parametrize(
    "fault",
    [
        "fail_before",
        pytest.param("hang", marks=pytest.mark.soak("faults")),
        pytest.param("pause", marks=pytest.mark.soak("faults")),
    ],
)
def test_an_optional_sink_is_detached(limited: Callable[..., Limited], fault: str) -> None:
    """It keeps its checkpoint and gets nothing more; the other sink has everything."""
    fed = limited(required=False)
    fed.fault("lines", fault)
    run = fed.feed.begin()

    fed.insert(FULL)
    eventually(lambda: len(fed.in_redis()) == fed.inserted, what="all in Redis")

    row = fed.store.checkpoints.read("feed")["lines"]
    assert (row.state, row.segment) == ("detached", 0)
    assert "detached: the journal is full (400.0 KiB" in str(row.last_error)
    eventually(lambda: fed.store.segments.total_bytes("feed") < LIMIT, what="the journal's limit")
    assert fed.in_redis() == fed.expected
    assert fed.in_lines() == []

    # Attached again at the tail it gets what comes next, in the same run, and nothing else.
    fed.fault("lines", None)
    with pytest.raises(NotAllowed, match="no longer in the journal; --tail"):
        fed.store.checkpoints.attach("feed", "lines", tail=False)
    skipped = fed.inserted
    fed.store.checkpoints.attach("feed", "lines", tail=True)
    fed.insert(1)
    eventually(lambda: len(fed.in_lines()) == ROWS, what="the tail in the file")
    outcome = run.end()
    assert fed.in_lines() == fed.expected[skipped:]
    assert fed.in_redis() == fed.expected
    assert (outcome.reason, outcome.detached, outcome.behind) == ("asked", (), {})
    assert outcome.delivered == {"redis": fed.inserted, "lines": ROWS}
    assert [one for one in warnings(run.run) if one.startswith("sink lines is detached")]


def test_a_required_sink_pauses_capture(limited: Callable[..., Limited]) -> None:
    """Capture reads nothing until the sink is back and the journal drains; nothing is lost."""
    fed = limited(required=True)
    fed.fault("lines", "fail_before")
    run = fed.feed.begin()
    fed.insert(FULL)

    assert fed.paused() is not None
    assert "sink lines is the slowest" in str(fed.paused())
    assert fed.segments < FULL
    first = run.end()
    assert (first.reason, first.pauses, first.paused) == ("asked", 1, fed.paused())
    assert first.captured < fed.inserted
    assert fed.store.checkpoints.read("feed")["lines"].state == "attached"

    # Another run finds the journal as full and captures nothing; the slot keeps the changes.
    captured = fed.segments
    fed.insert(1)
    again = fed.feed.catch_up()
    assert (again.reason, again.captured, fed.segments) == ("journal full", 0, captured)
    assert fed.store.segments.total_bytes("feed") < 2 * LIMIT

    fed.fault("lines", None)
    last = fed.feed.catch_up()
    assert (last.reason, last.paused) == ("caught up", None)
    assert fed.paused() is None
    assert fed.in_redis() == fed.in_lines() == fed.expected


def test_a_paused_required_sink_pauses_capture(limited: Callable[..., Limited]) -> None:
    """It is named as what holds the journal, with the command that lets everything go on."""
    fed = limited(required=True)
    fed.fault("lines", "pause")
    run = fed.feed.begin()
    fed.insert(FULL)

    command = "deltaforge sink resume feed lines"
    assert f"sink lines is the slowest, and paused ({command})" in str(fed.paused())
    assert fed.store.checkpoints.read("feed")["lines"].state == "paused"

    fed.store.checkpoints.resume("feed", "lines")
    eventually(lambda: len(fed.in_lines()) == fed.inserted, what="everything in the file")
    run.end()
    assert fed.in_redis() == fed.in_lines() == fed.expected


def test_the_stream_lives_while_capture_is_paused(limited: Callable[..., Limited]) -> None:
    """A sink hangs for longer than the server would wait for a silent reader; then all arrives."""
    fed = limited(required=True)
    database = psycopg.conninfo.conninfo_to_dict(fed.feed.shop.dsn)["dbname"]
    fed.feed.shop.execute(f"ALTER DATABASE {database} SET wal_sender_timeout = '4s'")
    fed.fault("lines", "hang")
    run = fed.feed.begin()
    fed.insert(FULL)
    assert fed.paused() is not None
    time.sleep(7)

    fed.fault("lines", None)
    eventually(lambda: len(fed.in_lines()) == fed.inserted, what="everything in the file")
    outcome = run.end()

    assert outcome.pauses >= 1
    assert outcome.capture_error is None
    assert fed.in_redis() == fed.in_lines() == fed.expected
    assert warnings(run.run)[-1] == "capture goes on: the journal has room again"
