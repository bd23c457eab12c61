"""What runs leave behind: nothing grows with the number of ranges, nor with that of runs.

These tests have a Spark server of their own, whose processes they count.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from deltaforge_dagster.installation.spark_server import SparkServer
from deltaforge_dagster.pipeline.encode import encoder
from tests.e2e.conftest import shop
from tests.e2e.deployment import eventually
from tests.fix_spark import SparkAddress
from tests.pipeline.meter import Meter, Usage
from tests.pipeline.run.test_live import PATIENT, MakeFeed, insert, make_feed

__all__ = ["make_feed", "shop"]

pytestmark = [pytest.mark.spark, pytest.mark.postgres, pytest.mark.redis]


@pytest.fixture(scope="module")
def spark_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkAddress]:
    """A server that nobody else uses."""
    home = tmp_path_factory.mktemp("installation")
    server = SparkServer.ensure(home)
    yield SparkAddress(server.remote, home / "spark")
    server.stop()


@pytest.fixture
def through_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Spark write each result, however small, with its Python workers."""
    monkeypatch.setattr(encoder, "SMALL_ROWS", 0)


@pytest.mark.parametrize(
    "many",
    [10, pytest.param(50, marks=[pytest.mark.soak("growth"), pytest.mark.timeout(3600)])],
)
def test_many_ranges_of_one_run_leave_no_more_than_five(
    make_feed: MakeFeed, spark_server: SparkAddress, through_files: None, many: int
) -> None:
    """Processes, files, threads and connections do not grow with the number of ranges."""
    feed = make_feed(run=PATIENT, range_="{max_events: 1}")
    meter = Meter(feed, spark_server)
    run = feed.begin()

    def make_ranges(first: int, last: int) -> Usage:
        for number in range(first, last + 1):
            insert(feed.shop, number, number)
            eventually(lambda: feed.store.checkpoints.read("feed")["redis"].segment == number)  # noqa: B023
        eventually(lambda: len(feed.store.ranges.read("feed", state="closed")) == last)
        return meter.settled()

    after_five = make_ranges(1, 5)
    after_many = make_ranges(6, many)

    assert after_many == after_five
    assert after_many.spark_processes > 0
    outcome = run.end()
    assert (outcome.captured, outcome.ranges) == (many, many)
    assert [json.loads(one["df-event"])["after"]["id"] for one in feed.delivered("customers")] == [
        *range(1, many + 1)
    ]


@pytest.mark.soak("growth")
def test_short_runs_leave_nothing(
    make_feed: MakeFeed, spark_server: SparkAddress, through_files: None
) -> None:
    """One run after another uses the same Spark session, and closes all that it opened."""
    feed = make_feed(range_="{max_events: 1}")
    meter = Meter(feed, spark_server)

    def make_runs(first: int, last: int) -> Usage:
        for number in range(first, last + 1):
            insert(feed.shop, number, number)
            assert feed.catch_up().captured == 1
        return meter.settled()

    after_two = make_runs(1, 2)
    after_eight = make_runs(3, 8)

    assert after_eight.open_files <= after_two.open_files + 5, "a channel that gRPC closes late"
    assert replace(after_eight, open_files=0) == replace(after_two, open_files=0)
    assert after_eight.postgres_connections == after_eight.encoded_files == 0
