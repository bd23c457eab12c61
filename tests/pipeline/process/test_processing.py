"""Pipelines with processors: what sinks get, once for each segment, whatever happens meanwhile."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from deltaforge_dagster.pipeline.replay.replay import verify
from tests.e2e.conftest import Shop, shop
from tests.e2e.deployment import eventually
from tests.fix_spark import SparkAddress
from tests.pipeline.live import Feed, opened_feed

__all__ = ["shop"]

pytestmark = [pytest.mark.spark, pytest.mark.postgres, pytest.mark.redis]

RUN = "{idle_seconds: 120, lease_seconds: 120, renew_seconds: 0.5}"

MASK = """
- type: javascript
  id: mask
  limits: {cpu_ms: 5000, timeout_ms: 30000}
  inline: |
    let calls = 0;
    function processBatch(events) {
      calls += 1;
      return events
        .filter((e) => e.after === null || e.after.name !== "hidden")
        .map((e) => { if (e.after) e.after.name = `${e.after.name}!`; e.tags = [Math.random().toString()]; return e; });
    }
"""

MakeFeed = Callable[..., Feed]


def with_processors(text: str, processors: str) -> str:
    """Return a pipeline file with these processors, or without any."""
    block = textwrap.indent(f"processors:{processors}", "  ") if processors else ""
    return text.replace("  sinks:\n", f"{block}\n  sinks:\n", 1)


@pytest.fixture
def make_feed(shop: Shop, spark_server: SparkAddress, tmp_path: Path) -> Iterator[MakeFeed]:
    """Make a feed of the shop with processors."""
    with ExitStack() as stack:

        def make(processors: str = MASK, **parts: str) -> Feed:
            text = with_processors(shop.pipeline("feed", run=RUN, **parts), processors)
            path = tmp_path / "feed.yaml"
            return stack.enter_context(opened_feed(shop, path, text, spark_server))

        yield make


def second_sink(shop: Shop) -> str:
    """Return another Redis sink for a pipeline file."""
    return (
        f'    - {{type: redis, config: {{id: second, uri: "{shop.redis_uri}", '
        'stream: "second.${source.table}", exactly_once: true}}\n'
    )


def events(feed: Feed, stream: str = "feed.customers") -> list[dict[str, Any]]:
    """Return what a stream has."""
    return [json.loads(one["df-event"]) for one in feed.shop.entries(stream)]


def test_every_sink_gets_what_the_chain_made_once(make_feed: MakeFeed, shop: Shop) -> None:
    """Random tags are the same at both sinks: the chain ran once; dropped rows are in neither."""
    feed = make_feed(more_sinks=second_sink(shop))
    shop.execute("INSERT INTO customers VALUES (1, 'a'), (2, 'hidden'), (3, 'c')")

    outcome = feed.catch_up()

    first, second = events(feed), events(feed, "second.customers")
    assert first == second
    assert [(one["after"]["id"], one["after"]["name"]) for one in first] == [(1, "a!"), (3, "c!")]
    assert not outcome.behind
    assert outcome.captured == 3
    (row,) = feed.store.segments.read("feed")[-1:]
    assert (row.rows, row.processed_rows) == (3, 2)
    counts = row.processed_counts["mask"] if row.processed_counts else {}
    assert (counts["events_in"], counts["events_out"], counts["calls"]) == (3, 2, 1)


MAKERS = """
- type: javascript
  id: totals
  limits: {cpu_ms: 5000, timeout_ms: 30000}
  inline: "(e) => [e, {...e, tags: ['copy']}, {source: e.source, op: 'c', ts_ms: e.ts_ms, after: {id: -1}}]"
- type: javascript
  id: alarms
  limits: {cpu_ms: 5000, timeout_ms: 30000}
  inline: "(e) => e.after.name === 'b' ? [e, {source: e.source, op: 'c', ts_ms: e.ts_ms, after: {id: -2}}] : e"
"""


def test_sinks_choose_by_who_made_an_event(make_feed: MakeFeed, shop: Shop) -> None:
    """Copies count as captured, new events as their processor's, also behind another one."""
    filters = {
        "captured": "{exclude_synthetic: true}",
        "made": "{synthetic_only: true}",
        "alarms": "{producers: [alarms]}",
    }
    sinks = "".join(
        f'    - {{type: redis, config: {{id: {name}, uri: "{shop.redis_uri}", stream: {name}, '
        f"exactly_once: {str(name != 'made').lower()}, filter: {chosen}}}}}\n"
        for name, chosen in filters.items()
    )
    feed = make_feed(MAKERS, more_sinks=sinks)
    shop.execute("INSERT INTO customers VALUES (1, 'a'), (2, 'b')")

    assert not feed.catch_up().behind

    found = {
        name: [(one["after"]["id"], one.get("synthetic")) for one in events(feed, name)]
        for name in ("feed.customers", *filters)
    }
    first, second = [(1, None)] * 2, [(2, None), (-2, "alarms")] * 2
    total = [(-1, "totals")]
    assert found == {
        "feed.customers": first + total + second + total,
        "captured": [(1, None), (1, None), (2, None), (2, None)],
        "made": total + [(-2, "alarms")] * 2 + total,
        "alarms": [(-2, "alarms")] * 2,
    }
    ids = [one["event_id"] for one in events(feed)]
    assert len(set(ids)) == len(ids)


def test_a_segment_of_which_nothing_is_left(make_feed: MakeFeed, shop: Shop) -> None:
    """Checkpoints pass a segment that the chain drops whole, also of a sink exactly once."""
    feed = make_feed(more_sinks=second_sink(shop))
    shop.execute("INSERT INTO customers VALUES (1, 'hidden')")
    assert not feed.catch_up().behind
    shop.execute("INSERT INTO customers VALUES (2, 'b')")
    assert not feed.catch_up().behind

    assert [one["after"]["id"] for one in events(feed)] == [2]
    assert events(feed) == events(feed, "second.customers")
    assert feed.store.checkpoints.read("feed")["second"].complete


def test_many_rows_through_files(make_feed: MakeFeed, shop: Shop) -> None:
    """A segment larger than what is sent from memory keeps its order, numbers and values."""
    feed = make_feed()
    shop.execute("INSERT INTO customers SELECT n, 'x' FROM generate_series(1, 30000) n")

    feed.catch_up()

    assert [one["after"]["id"] for one in events(feed)] == list(range(1, 30001))
    assert {one["after"]["name"] for one in events(feed)} == {"x!"}
    assert sum(one.get("tx_end", False) for one in events(feed)) == 1
    (number,) = [one.range for one in feed.store.ranges.read("feed") if one.rows == 30000]
    assert verify(feed.store, feed.opened.journal, "feed", number) == 30000


def test_a_broken_processor_stops_deliveries_not_capture(make_feed: MakeFeed, shop: Shop) -> None:
    """The error names the processor and is that of every sink; once fixed, nothing is missing."""
    broken = MASK.replace("calls += 1;", "if (events.some((e) => e.after.id === 2)) events[0].x.y;")
    feed = make_feed(broken)
    shop.execute("INSERT INTO customers VALUES (1, 'a')")
    assert not feed.catch_up().behind
    shop.execute("INSERT INTO customers VALUES (2, 'b')")

    outcome = feed.catch_up()

    assert outcome.captured == 1
    assert "processor mask: JS processor threw: TypeError" in outcome.sink_errors["redis"]
    assert "mask" in (feed.store.checkpoints.read("feed")["redis"].last_error or "")
    feed.path.write_text(feed.path.read_text().replace("events[0].x.y", "calls += 1"))
    assert not feed.catch_up().behind
    assert [one["after"]["id"] for one in events(feed)] == [1, 2]


def test_what_was_delivered_stays_what_it_was(make_feed: MakeFeed, shop: Shop) -> None:
    """A changed chain makes nothing else of what is processed; a replay sends it as it was."""
    feed = make_feed()
    shop.execute("INSERT INTO customers VALUES (1, 'a')")
    feed.catch_up()
    feed.path.write_text(feed.path.read_text().replace("}!`", "}?`"))
    shop.execute("INSERT INTO customers VALUES (2, 'b')")
    feed.catch_up()

    assert [one["after"]["name"] for one in events(feed)] == ["a!", "b?"]
    assert [row.processed_rows for row in feed.store.segments.read("feed")] == [1, 1]


def test_processors_that_come_later(make_feed: MakeFeed, shop: Shop) -> None:
    """What a sink had begun before the file named processors goes to every sink as captured."""
    feed = make_feed("")
    shop.execute("INSERT INTO customers VALUES (1, 'a')")
    feed.catch_up()
    feed.path.write_text(with_processors(feed.path.read_text(), MASK))
    shop.execute("INSERT INTO customers VALUES (2, 'b')")
    feed.catch_up()

    assert [one["after"]["name"] for one in events(feed)] == ["a", "b!"]
    assert [bool(row.chain_hash) for row in feed.store.segments.read("feed")] == [False, True]


def test_a_live_run_goes_on(make_feed: MakeFeed, shop: Shop) -> None:
    """A run that follows the source gives each commit to the sinks, processed."""
    feed = make_feed()
    run = feed.begin()
    for number in range(1, 6):
        shop.execute(f"INSERT INTO customers VALUES ({number}, 'x')")
        eventually(lambda: len(events(feed)) == number)  # noqa: B023
    run.end()

    assert [one["after"]["id"] for one in events(feed)] == [1, 2, 3, 4, 5]
