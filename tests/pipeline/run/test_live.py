"""One run, in this process: how it ends, what it says, and that it leaves nothing behind."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest
from psycopg import conninfo

from deltaforge_dagster.assets.execution import failure_of
from deltaforge_dagster.pipeline.control.catalog import without_file
from deltaforge_dagster.pipeline.control.journal_space import expire
from deltaforge_dagster.pipeline.control.work import register
from deltaforge_dagster.pipeline.health.health import health
from deltaforge_dagster.pipeline.run.leased_work import LeasedWork
from deltaforge_dagster.pipeline.run.live import LiveRun, RunOutcome
from deltaforge_dagster.pipeline.run_context import ActiveLease
from deltaforge_dagster.sources.postgres.position import LsnPosition, parse_lsn
from deltaforge_dagster.sources.postgres.source_type import PostgresSourceConfig
from deltaforge_dagster.sources.registry import parse_position
from deltaforge_dagster.state.records import SourceLog
from deltaforge_lab.servers.http import HttpAnswer, HttpServer
from tests.e2e.conftest import Shop, shop
from tests.e2e.deployment import eventually
from tests.faulty_proxy import FaultyProxy
from tests.fix_spark import SparkAddress
from tests.pipeline.live import Feed, opened_feed

__all__ = ["shop"]

pytestmark = [pytest.mark.spark, pytest.mark.postgres, pytest.mark.redis]

PATIENT = "{idle_seconds: 120, lease_seconds: 120, renew_seconds: 0.5}"
QUICK = "{idle_seconds: 1, lease_seconds: 120, renew_seconds: 0.5}"

MakeFeed = Callable[..., Feed]


@pytest.fixture
def make_feed(shop: Shop, spark_server: SparkAddress, tmp_path: Path) -> Iterator[MakeFeed]:
    """Make a feed of the shop with the given parts of its pipeline file."""
    with ExitStack() as stack:

        def make(name: str = "feed", **parts: str) -> Feed:
            text = shop.pipeline(name, **parts)
            path = tmp_path / f"{name}.yaml"
            return stack.enter_context(opened_feed(shop, path, text, spark_server))

        yield make


def insert(shop: Shop, first: int, last: int) -> None:
    """Insert customers in one transaction."""
    shop.execute(f"INSERT INTO customers SELECT n, 'x' FROM generate_series({first}, {last}) n")


def expires_at(feed: Feed) -> float:
    """Return until when the run has its lease."""
    lease = feed.store.leases.get(feed.name)
    assert lease is not None
    return lease.expires_at


def test_until_caught_up(make_feed: MakeFeed) -> None:
    """Everything committed before is captured and delivered, its range closed; then it ends."""
    feed = make_feed(range_="{max_seconds: 600}")
    insert(feed.shop, 1, 100)
    feed.shop.execute("UPDATE customers SET name = 'y' WHERE id = 7", "DELETE FROM customers")

    outcome = feed.catch_up()

    assert outcome == RunOutcome(
        "caught up", captured=201, segments=outcome.segments, ranges=1, delivered={"redis": 201}
    )
    assert outcome.segments >= 1
    assert len(feed.delivered("customers")) == 201
    (row,) = feed.store.ranges.read("feed")
    assert (row.state, row.rows, row.close_reason) == ("closed", 201, "run ended")
    lease = feed.store.leases.get("feed")
    assert lease is not None
    assert lease.run_id is None, "the next run need not wait"


def test_a_run_ends_where_it_has_read_to(make_feed: MakeFeed) -> None:
    """Log behind the last change is confirmed, too, so that the next run need not read it."""
    feed = make_feed()
    insert(feed.shop, 1, 10)
    feed.shop.execute("CREATE TABLE other AS SELECT generate_series(1, 1000) AS id")
    with psycopg.connect(feed.shop.dsn) as connection:
        end = connection.execute("SELECT pg_current_wal_flush_lsn()::text").fetchone()
    assert end is not None

    assert feed.catch_up().delivered == {"redis": 10}

    row = feed.store.pipelines.get("feed")
    assert row is not None
    assert row.confirmed_position is not None
    confirmed = parse_position(row.confirmed_position)
    assert isinstance(confirmed, LsnPosition)
    assert confirmed.lsn >= parse_lsn(end[0])


def test_a_slot_that_somebody_else_reads(make_feed: MakeFeed) -> None:
    """A run that cannot read tries again for a while, has failed then, and says so; the next one has all."""
    feed = make_feed(run=QUICK)
    insert(feed.shop, 1, 10)
    config = feed.loaded.spec.spec.source.config
    assert isinstance(config, PostgresSourceConfig)
    dsn = conninfo.make_conninfo(feed.shop.dsn, application_name="somebody")
    with closing(psycopg.connect(dsn, replication="database", autocommit=True)) as other:
        other.pgconn.send_query(
            f"START_REPLICATION SLOT {config.slot} LOGICAL 0/0 (proto_version '1',"
            f" publication_names '{config.publication}')".encode()
        )
        outcome = feed.catch_up()
        assert outcome.reason == "capture failed"
        assert "is in use by" in str(outcome.capture_error)
        found = health(feed.store, feed.loaded)
        assert (found.status, found.error) == ("failed", outcome.capture_error)
    assert feed.catch_up().captured == 10
    assert health(feed.store, feed.loaded).problems == ()


def test_a_table_that_is_not_sent(make_feed: MakeFeed) -> None:
    """A run names it, however short the run is, and no longer once the publication has it."""
    feed = make_feed(tables='["public.*"]', run=QUICK, dagster="{sensor_interval_seconds: 600}")
    assert feed.catch_up().problems == ()
    config = feed.loaded.spec.spec.source.config
    assert isinstance(config, PostgresSourceConfig)
    feed.shop.execute(
        f"COMMENT ON PUBLICATION {config.publication} IS NULL",
        "DROP TABLE customers",
        "CREATE TABLE customers (id bigint PRIMARY KEY, name text)",
    )
    statement = f'ALTER PUBLICATION "{config.publication}" ADD TABLE "public"."customers"'
    (problem,) = feed.catch_up().problems
    assert problem.line.startswith("publication: not captured")
    assert problem.remedy == (statement,)
    feed.shop.execute(statement)
    (gap,) = feed.catch_up().problems
    assert gap.line.startswith("table public.customers: the table was dropped")
    assert feed.store.gaps.acknowledge(feed.name) == ["public.customers"]
    assert feed.catch_up().problems == ()
    assert health(feed.store, feed.loaded).problems == ()


def test_an_idle_run_ends_and_makes_no_range(make_feed: MakeFeed) -> None:
    """Nothing to do: it ends by itself, and the source is asked again a little later each time."""
    feed = make_feed(run=QUICK)

    waits = []
    for _ in range(2):
        outcome = feed.begin().outcome()
        row = feed.store.pipelines.get("feed")
        assert row is not None
        waits.append(row.probe_wait)

    assert outcome == RunOutcome("idle", delivered={"redis": 0})
    assert feed.store.ranges.read("feed") == []
    assert waits[1] == 2 * waits[0] > 0


@pytest.mark.parametrize("desired", ["paused", "stopped"])
def test_a_run_ends_when_the_desired_state_changes(make_feed: MakeFeed, desired: str) -> None:
    """Within seconds, with its range closed; and a paused pipeline captures nothing."""
    feed = make_feed(run=PATIENT)
    run = feed.begin()
    insert(feed.shop, 1, 1)
    eventually(lambda: len(feed.delivered("customers")) == 1, what="the delivery")

    feed.store.pipelines.set_desired_state("feed", desired)  # type: ignore[arg-type]
    outcome = run.outcome()

    assert (outcome.reason, outcome.captured, outcome.ranges) == (desired, 1, 1)
    assert [row.state for row in feed.store.ranges.read("feed")] == ["closed"]
    insert(feed.shop, 2, 2)
    assert feed.catch_up().captured == 0
    feed.store.pipelines.set_desired_state("feed", "running")
    assert feed.catch_up().captured == 1


def test_a_resident_run_goes_on_until_other_code_ticks(make_feed: MakeFeed) -> None:
    """It idles for longer than others may; its ranges are closed, published and pruned meanwhile."""
    feed = make_feed(
        run="{max_seconds: 0, idle_seconds: 0.2, lease_seconds: 120, renew_seconds: 0.2}",
        range_="{max_seconds: 0.2}\n    journal: {retention_hours: 0}",
    )
    feed.store.pipelines.note_code(feed.name, "1.0 in shop:1")
    run = feed.begin(code="1.0 in shop:1")

    def delivered(count: int) -> bool:
        return len(feed.delivered("customers")) == count

    for number in (1, 2, 3):
        insert(feed.shop, number, number)
        eventually(partial(delivered, number), what="the delivery")
        eventually(lambda: not feed.store.ranges.read(feed.name, state="open"), what="its end")
        eventually(lambda: not feed.store.ranges.unpublished(feed.name), what="publication")
        eventually(
            lambda: expire(feed.store, feed.opened.journal, feed.loaded).segments, what="pruning"
        )
    assert feed.store.ranges.read(feed.name) == []
    renewed = expires_at(feed)
    eventually(lambda: expires_at(feed) > renewed + 1, what="renewals, which go on while it idles")
    assert not run.ended

    feed.store.pipelines.note_code(feed.name, "1.0 in shop:2")
    outcome = run.outcome()
    assert (outcome.reason, outcome.captured, outcome.ranges) == ("code changed", 3, 3)
    assert failure_of(outcome) is None


def test_a_lease_lost_while_the_work_begins(
    make_feed: MakeFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the range that a killed run left open is closed: the outcome says so, as it does later."""
    feed = make_feed(run=QUICK)
    insert(feed.shop, 1, 1)
    feed.catch_up()
    with closing(sqlite3.connect(feed.path.with_name("home") / "state.db")) as store, store:
        store.execute("UPDATE range SET state = 'open'")
    begin = LiveRun._begin_work

    def lose_it_first(run: LiveRun, lease: ActiveLease) -> LeasedWork:
        lease.lost.set()
        return begin(run, lease)

    with monkeypatch.context() as patch:
        patch.setattr(LiveRun, "_begin_work", lose_it_first)
        assert feed.begin().outcome() == RunOutcome("lease lost")
    assert [row.state for row in feed.store.ranges.read("feed")] == ["open"]


def test_a_run_ends_when_its_file_changes(make_feed: MakeFeed) -> None:
    """A comment changes nothing, a broken file is left to its check, another setting ends it."""
    feed = make_feed(run=PATIENT)
    run = feed.begin()
    text = feed.path.read_text()
    feed.path.write_text(text + "# a comment\n")
    insert(feed.shop, 1, 1)
    eventually(lambda: len(feed.delivered("customers")) == 1, what="the delivery")
    feed.path.write_text(text + "  sinks: [\n")
    for _ in range(2):  # after each renewal the file is looked at
        renewed = expires_at(feed)
        eventually(lambda: expires_at(feed) > renewed, what="a renewal")  # noqa: B023
    insert(feed.shop, 2, 2)
    eventually(lambda: len(feed.delivered("customers")) == 2, what="the second delivery")

    feed.path.write_text(text.replace("tenant: acme", "tenant: other"))

    assert run.outcome().reason == "pipeline file changed"


def test_a_sink_that_says_when_is_waited_for(make_feed: MakeFeed, http_server: HttpServer) -> None:
    """A run until caught up ends with everything, not with an error, although it idles after a second."""
    sink = f"    - {{type: http, config: {{id: http, url: '{http_server.url}'}}}}\n"
    feed = make_feed(run=QUICK, more_sinks=sink)
    insert(feed.shop, 1, 10)
    answers = [HttpAnswer(429, {"Retry-After": "2"}), HttpAnswer(503, {"Retry-After": "3"})]
    http_server.answer = lambda _: answers.pop() if answers else HttpAnswer(200)

    outcome = feed.catch_up()

    assert (outcome.reason, outcome.sink_errors) == ("caught up", {})
    assert outcome.delivered == {"redis": 10, "http": 10}
    assert len({*http_server.bodies()}) == 10
    assert failure_of(outcome) is None


def test_what_a_sink_says_is_far_is_not_waited_for(
    make_feed: MakeFeed, http_server: HttpServer
) -> None:
    """A minute is left to the next run; what failed is in the outcome."""
    sink = f"    - {{type: http, config: {{id: http, url: '{http_server.url}'}}}}\n"
    feed = make_feed(run=QUICK, more_sinks=sink)
    insert(feed.shop, 1, 10)
    http_server.answer = lambda _: HttpAnswer(429, {"Retry-After": "60"})

    outcome = feed.catch_up()

    assert (outcome.delivered, set(outcome.sink_errors)) == ({"redis": 10, "http": 0}, {"http"})
    http_server.answer = lambda _: HttpAnswer(200)
    assert feed.catch_up().delivered == {"redis": 0, "http": 10}


def test_a_run_with_a_failing_sink_ends_by_idling(
    make_feed: MakeFeed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sibling has everything; the store says what failed, and when to try again."""
    faults = tmp_path / "faults"
    faults.mkdir()
    monkeypatch.setenv("DELTAFORGE_SINK_FAULTS", str(faults))
    lines = tmp_path / "lines.jsonl"
    feed = make_feed(
        run=QUICK, more_sinks=f"    - {{type: file, config: {{id: lines, path: {lines}}}}}\n"
    )
    (faults / "lines").write_text("fail_before")
    insert(feed.shop, 1, 10)
    before = feed.store.now()

    outcome = feed.begin().outcome()

    error = "sink lines: injected fault (fail_before)"
    assert outcome == RunOutcome(
        "idle",
        captured=10,
        segments=outcome.segments,
        ranges=1,
        delivered={"redis": 10, "lines": 0},
        sink_errors={"lines": error},
        behind={"lines": outcome.segments},
        problems=health(feed.store, feed.loaded).problems,
    )
    checkpoint = feed.store.checkpoints.read("feed")["lines"]
    assert (checkpoint.segment, checkpoint.last_error) == (0, error)
    assert checkpoint.failures > 0
    assert checkpoint.next_attempt_at > before
    assert feed.store.ranges.unpublished("feed") == []
    (problem,) = outcome.problems
    assert problem.line == "sink lines: injected fault (fail_before)"
    assert outcome.captured == sum(row.rows for row in feed.store.segments.read("feed"))

    (faults / "lines").unlink()
    assert feed.catch_up().delivered == {"redis": 0, "lines": 10}
    assert len(lines.read_text().splitlines()) == 10


def test_a_run_ends_although_a_sink_hangs(
    make_feed: MakeFeed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked to end, it waits a moment for the sink, then closes it; nothing is acknowledged."""
    monkeypatch.setenv("DELTAFORGE_SINK_FAULTS", str(tmp_path))
    feed = make_feed(run=PATIENT)
    (tmp_path / "redis").write_text("hang")
    run = feed.begin()
    insert(feed.shop, 1, 1)
    eventually(lambda: feed.store.segments.read("feed"), what="the segment")

    feed.store.pipelines.set_desired_state("feed", "stopped")
    outcome = run.outcome()

    assert (outcome.reason, outcome.captured, outcome.behind) == ("stopped", 1, {"redis": 1})
    assert [row.state for row in feed.store.ranges.read("feed")] == ["closed"]


def test_an_event_that_cannot_be_decoded_stops_capture_only(make_feed: MakeFeed) -> None:
    """One clear sentence with its position; everything before it is delivered, nothing after.

    Its table would be held, but for the rule that hides a column of it.
    """
    feed = make_feed(run=f"{PATIENT}\n    columns: {{exclude: [public.customers.note]}}")
    insert(feed.shop, 1, 3)
    # What elements of a type that is gone look like, nobody can say any more.
    feed.shop.execute("CREATE TYPE mood AS ENUM ('glad')")
    feed.shop.execute("ALTER TABLE customers ADD COLUMN mood mood[]")
    feed.shop.execute("INSERT INTO customers VALUES (9, 'x', '{glad}')")
    feed.shop.execute("ALTER TABLE customers DROP COLUMN mood")
    feed.shop.execute("DROP TYPE mood")
    insert(feed.shop, 4, 5)

    first = feed.begin().outcome()
    second = feed.begin().outcome()

    assert first.reason == second.reason == "capture failed"
    assert (first.captured, second.captured) == (3, 0)
    assert first.capture_error == second.capture_error
    assert first.capture_error is not None
    assert "type" in first.capture_error
    assert "public.customers" in first.capture_error
    assert "\n" not in first.capture_error
    assert len(feed.delivered("customers")) == 3
    assert first.delivered == {"redis": 3}
    assert [row.state for row in feed.store.ranges.read("feed")] == ["closed"]


def test_a_password_that_is_corrected(make_feed: MakeFeed) -> None:
    """A run that a sink refuses ends once the file has the right password, and the next one need not wait."""
    feed = make_feed(run=PATIENT)
    right, password = feed.path.read_text(), urlsplit(feed.shop.redis_uri).password
    assert password is not None
    feed.path.write_text(right.replace(password, "wrong"))
    before = feed.loaded.hash
    insert(feed.shop, 1, 3)
    refused = feed.begin()

    def error() -> str | None:
        return feed.store.checkpoints.read(feed.name)["redis"].last_error

    eventually(lambda: "the server refused user or password" in (error() or ""), what="the refusal")
    feed.path.write_text(right)
    assert refused.outcome().reason == "pipeline file changed"
    assert feed.loaded.hash == before
    register(feed.store, feed.loaded)
    assert feed.store.checkpoints.read(feed.name)["redis"].next_attempt_at == 0.0
    feed.catch_up()
    assert len(feed.delivered("customers")) == 3


def test_a_transaction_that_is_being_received(make_feed: MakeFeed) -> None:
    """What has come of it shows, and what has not, for as long as it is not whole; afterwards nothing is ahead."""
    feed = make_feed(run=PATIENT, dagster="{sensor_interval_seconds: 1}")
    address = urlsplit(feed.shop.dsn)
    assert address.hostname is not None
    assert address.port is not None
    target = address.hostname, address.port
    with FaultyProxy(target, 1 << 20, 1, 7, faults=["delay"], most_delay=10_000.0) as proxy:
        direct = feed.path.read_text()
        feed.path.write_text(direct.replace(feed.shop.dsn, proxy.through(feed.shop.dsn)))
        slow = feed.begin()
        insert(feed.shop, 1, 100_000)

        def log() -> SourceLog:
            return feed.store.pipelines.source_log(feed.name) or SourceLog(0.0)

        eventually(lambda: log().receiving_rows > 0, what="the first rows")
        seen = log()
        assert seen.receiving_rows < 100_000
        assert (seen.bytes or 0) > 1 << 20
        assert seen.receiving_since is not None
        assert not seen.all_read(seen.seen_at)
        row = feed.store.pipelines.get(feed.name)
        assert row is not None
        assert row.next_segment == 1
    slow.run.request_end()
    slow.outcome()
    feed.path.write_text(direct)
    feed.catch_up()
    assert (log().receiving_rows, log().receiving_since) == (0, None)
    assert len(feed.delivered("customers")) == 100_000


def test_a_file_that_is_deleted(make_feed: MakeFeed) -> None:
    """Its run ends, and the pipeline has failed; once the file is back, everything goes on."""
    feed = make_feed(run=PATIENT)
    text = feed.path.read_text()
    working = feed.begin()
    insert(feed.shop, 1, 3)
    eventually(lambda: len(feed.delivered("customers")) == 3, what="the rows")
    feed.path.unlink()
    assert working.outcome().reason == "pipeline file removed"
    (gone,) = without_file(feed.store.pipelines.read(), [])
    found = health(feed.store, gone)
    assert found.status == "failed"
    (problem,) = found.problems
    assert problem.remedy == ("deltaforge remove feed",)
    feed.path.write_text(text)
    assert without_file(feed.store.pipelines.read(), []) == []
    insert(feed.shop, 4, 4)
    assert feed.catch_up().delivered == {"redis": 1}
