"""Tests of Materialize for ranges: verify, replay, catch-up, and refusals.

The pipeline's runs are real ones in this process. A Materialize is the pipeline's job on a separate Dagster
instance, with the tags that a backfill over several ranges gives its single run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import dagster as dg
import pytest
from typer.testing import CliRunner

from deltaforge_dagster.assets.names import asset_key, job_name, partition_key
from deltaforge_dagster.assets.publish import add_partition, recorded
from deltaforge_dagster.cli.main import app
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.definitions import build_definitions
from deltaforge_dagster.pipeline import backoff
from deltaforge_dagster.pipeline.control.closed_ranges import CHANGES
from deltaforge_dagster.pipeline.run import catch_up
from tests.e2e.conftest import Shop, shop
from tests.e2e.deployment import eventually
from tests.fix_spark import SparkAddress
from tests.pipeline.live import Feed, opened_feed, whole_lines

__all__ = ["shop"]

pytestmark = [pytest.mark.postgres, pytest.mark.redis, pytest.mark.spark]

SINKS = ("redis", "lines")


class Fed:
    """Four ranges of two changes each; Redis has all of them, the file sink only the first."""

    def __init__(self, feed: Feed, folder: Path) -> None:
        self.feed = feed
        self.store = feed.store
        self.lines = folder / "lines.jsonl"
        self.fault = folder / "faults" / "lines"

    def insert(self, number: int) -> None:
        """Insert the two customers of a range."""
        self.feed.shop.execute(
            f"INSERT INTO customers VALUES ({2 * number - 1}, 'Ada'), ({2 * number}, 'Zoë')"
        )

    def in_redis(self) -> list[dict[str, str]]:
        """Return the entries in Redis."""
        return self.feed.delivered("customers")

    def in_lines(self, path: Path | None = None) -> list[int]:
        """Return the ids in the file, in order."""
        return [json.loads(line)["after"]["id"] for line in whole_lines(path or self.lines)]

    def reached(self, sink: str) -> int:
        """Return the last range that a sink has completely."""
        has = self.store.checkpoints.read("feed")[sink].whole_segment
        return max(
            (row.range for row in self.store.ranges.read("feed") if row.last_segment <= has),
            default=0,
        )


@pytest.fixture
def fed(
    shop: Shop, spark_server: SparkAddress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Fed]:
    """The feed without a live run; the file sink works again."""
    (tmp_path / "faults").mkdir()
    monkeypatch.setattr(backoff, "PATIENCE", 0.5)  # no run waits for the sink that fails
    monkeypatch.setenv("DELTAFORGE_SINK_FAULTS", str(tmp_path / "faults"))
    monkeypatch.setenv("DELTAFORGE_PIPELINES", str(tmp_path / "feed.yaml"))
    spark_server.use(tmp_path / "home", monkeypatch)
    more = f"    - {{type: file, config: {{id: lines, path: {tmp_path}/lines.jsonl}}}}\n"
    text = shop.pipeline(
        "feed",
        run="{idle_seconds: 120, lease_seconds: 120, renew_seconds: 0.5}",
        range_="{max_seconds: 600}",
        more_sinks=more,
    ).replace(
        "{backoff_max_seconds: 2}", "{backoff_initial_seconds: 0.1, backoff_max_seconds: 0.5}"
    )
    with opened_feed(shop, tmp_path / "feed.yaml", text, spark_server) as feed:
        made = Fed(feed, tmp_path)
        for number in range(1, 5):
            made.insert(number)
            feed.catch_up()
            made.fault.write_text("fail_before")
        made.fault.unlink()
        assert (made.reached("redis"), made.reached("lines")) == (4, 1)
        yield made


@contextmanager
def materialized(
    *assets: str, first: int, last: int
) -> Iterator[tuple[dg.ExecuteInProcessResult, dg.DagsterInstance]]:
    """Materialize assets over ranges in one run."""
    job = build_definitions(Settings.from_env(), single_process=True).resolve_job_def(
        job_name("feed")
    )
    with dg.DagsterInstance.ephemeral() as instance:
        for number in range(first, last + 1):
            add_partition(instance, "feed", number)
        result = job.execute_in_process(
            instance=instance,
            asset_selection=[asset_key("feed", asset) for asset in assets],
            tags={
                "dagster/asset_partition_range_start": partition_key(first),
                "dagster/asset_partition_range_end": partition_key(last),
            },
            raise_on_error=False,
        )
        yield result, instance


def failure(result: dg.ExecuteInProcessResult) -> str:
    """Return the message of the failed step."""
    (event,) = [event for event in result.all_events if event.is_step_failure]
    described = event.step_failure_data.user_failure_data
    assert described is not None
    return str(described.description)


def test_several_ranges_in_one_run(fed: Fed) -> None:
    """Ranges that the sink has are replayed, those it lacks are delivered in order, and none beyond.

    The other sink is not touched. The ranges that the sink caught up with are published in order.
    """
    redis, untouched = fed.in_redis(), fed.store.checkpoints.read("feed")["redis"]
    before = fed.store.pipelines.get("feed")
    assert before is not None

    with materialized("lines", first=1, last=3) as (result, instance):
        assert result.success
        done = [
            (str(one.partition), one.step_materialization_data.materialization.metadata)
            for one in result.all_events
            if one.is_step_materialization and one.asset_key == asset_key("feed", "lines")
        ]
        assert [partition for partition, _ in done] == [partition_key(n) for n in (1, 2, 3)]
        assert done[0][1]["replayed"].value == 2
        assert [metadata["events"].value for _, metadata in done[1:]] == [2, 2]
        assert recorded(instance, "feed", "lines", 3) is not None

    assert fed.in_lines() == [1, 2, 3, 4, 5, 6]
    (marked,) = fed.lines.parent.glob("lines.jsonl.*")
    assert result.run_id in marked.name
    assert marked.read_text() == "".join(fed.lines.read_text().splitlines(keepends=True)[:2])
    assert (fed.reached("lines"), fed.reached("redis")) == (3, 4)
    assert fed.store.ranges.published("feed", 1, 4) >= {(2, "lines"), (3, "lines")}
    assert (4, "lines") not in fed.store.ranges.published("feed", 1, 4)
    assert (fed.in_redis(), fed.store.checkpoints.read("feed")["redis"]) == (redis, untouched)
    after = fed.store.pipelines.get("feed")
    assert after is not None
    assert (after.next_segment, after.next_range) == (before.next_segment, before.next_range)
    assert after.captured_position == before.captured_position
    assert after.confirmed_position != before.confirmed_position, "the sink is required"

    outcome = fed.feed.catch_up()
    assert (outcome.captured, outcome.delivered) == (0, {"redis": 0, "lines": 2})
    assert fed.in_lines() == [*range(1, 9)]


def test_beside_a_live_run(fed: Fed) -> None:
    """Replay and verification work beside a live run without affecting it; catch-up is left to the run."""
    fed.fault.write_text("fail_before")
    run = fed.feed.begin()
    fed.insert(5)
    eventually(lambda: fed.reached("redis") == 5, what="the live delivery")
    assert len(fed.in_redis()) == 10
    eventually(lambda: fed.store.checkpoints.read("feed")["lines"].failures > 0, what="a failure")
    lease, first = fed.store.leases.get("feed"), fed.in_redis()
    checkpoint = fed.store.checkpoints.read("feed")["redis"]
    assert lease is not None
    assert lease.run_id is not None

    with materialized(CHANGES, *SINKS, first=2, last=4) as (result, _):
        said = failure(result)

    assert said == (
        f"feed: run {lease.run_id[:8]} is working on it, and delivers what sink lines lacks by "
        "itself, in order"
    )
    assert fed.in_redis()[10:] == [{**one, "df-replay": result.run_id} for one in first[2:8]]
    assert fed.store.checkpoints.read("feed")["redis"] == checkpoint
    now = fed.store.leases.get("feed")
    assert now is not None
    assert (now.run_id, now.epoch) == (lease.run_id, lease.epoch)
    fed.fault.unlink()
    fed.insert(6)
    eventually(lambda: fed.in_lines() == [*range(1, 13)], what="the run's own catch-up")
    assert run.end().delivered == {"redis": 4, "lines": 10}


def test_what_cannot_be_done_is_said(fed: Fed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors name a failing or detached sink and an open or unknown range; the rest is done."""
    monkeypatch.setattr(catch_up, "PATIENCE_SECONDS", 0.5)
    fed.fault.write_text("fail_before")
    with materialized(*SINKS, first=2, last=2) as (result, _):
        assert failure(result) == "sink lines: injected fault (fail_before)"
    assert len(fed.in_redis()) == 10, "the other sink got its replay"
    fed.fault.unlink()
    assert fed.reached("lines") == 1
    lease = fed.store.leases.get("feed")
    assert lease is not None
    assert lease.run_id is None, "the next run need not wait"

    with materialized("lines", first=4, last=5) as (result, _):
        assert failure(result) == "feed: there is no range 5"
    run = fed.feed.begin()
    fed.insert(5)
    eventually(lambda: fed.reached("lines") == 5, what="the open range, delivered")
    with materialized("lines", first=5, last=5) as (result, _):
        assert failure(result) == "feed: range 5 is still open; wait until it is closed"
    run.end()

    held = fed.store.leases.acquire("feed", "detaching", 60)
    assert held is not None
    with fed.store.fenced(held) as writer:
        writer.checkpoints.detach("lines", "detached")
        writer.lease.release()
    fed.insert(6)
    fed.feed.catch_up()
    with materialized("lines", first=6, last=6) as (result, _):
        assert "is detached; to let it go on: deltaforge sink attach feed lines" in failure(result)


def test_the_command_means_the_same(fed: Fed, make_runner: Callable[[], CliRunner]) -> None:
    """`deltaforge replay` replays what the sink has and catches it up with the rest."""
    arguments = ["replay", "feed", "--range", "1-2", "--sink", "lines"]

    result = make_runner().invoke(app, [*arguments, "--json"])

    assert result.exit_code == 0, result.output
    done = json.loads(result.stdout.splitlines()[-1])
    assert done == {"pipeline": "feed", "sink": "lines", "range": "1-2", "sent": 2, "caught_up": 2}
    assert fed.in_lines() == [1, 2, 3, 4]
    again = make_runner().invoke(app, arguments)
    assert again.stdout.strip() == "Range 1-2: 4 messages sent to lines again."


@pytest.fixture
def make_runner() -> Callable[[], CliRunner]:
    """Create a runner of commands."""
    return CliRunner
