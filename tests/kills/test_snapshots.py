"""A table is read under load while runs and readers are killed: in the end the sink has the table.

Commits are slow to be seen meanwhile: PostgreSQL waits for a standby that is not there, MySQL for
more commits to make durable with one.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from deltaforge_lab.servers import mysql
from deltaforge_lab.servers.mysql import MysqlServer
from deltaforge_lab.servers.postgres import PostgresServer
from tests.e2e.deployment import eventually
from tests.fix_postgres import StartPostgres
from tests.kills.campaign import Campaign
from tests.kills.conftest import MakeCampaign
from tests.kills.databases import PostgresDatabase
from tests.kills.ends import Row

pytestmark = pytest.mark.spark

_POSTGRES = [pytest.mark.postgres, pytest.mark.redis]
_MYSQL = [pytest.mark.mysql, pytest.mark.kafka]
STEPS = ("segment-file-written", "segment-row-written", "sink-sent", "checkpoint-written")
DELAY_US = 30_000


@pytest.fixture
def server(start_postgres: StartPostgres) -> PostgresServer:
    """A server of the test's own, whose commits may wait."""
    return start_postgres()


@pytest.fixture
def postgres_end(server: PostgresServer) -> PostgresDatabase:
    """A database whose updates leave out large texts that stay."""
    database = PostgresDatabase(server.create_database())
    with psycopg.connect(database.dsn) as connection:
        connection.execute("ALTER TABLE items REPLICA IDENTITY DEFAULT")
        connection.execute("ALTER TABLE items ALTER COLUMN body SET STORAGE EXTERNAL")
    return database


@pytest.fixture
def slow_commits(request: pytest.FixtureRequest, ends: Any) -> Iterator[None]:
    """Let commits stand in the log for a while before they can be seen."""
    if isinstance(ends[0], PostgresDatabase):
        with waiting_for_a_standby(request.getfixturevalue("server")):
            yield
        return
    server: MysqlServer = request.getfixturevalue("mysql_server")
    mysql.execute(server.dsn, f"SET GLOBAL binlog_group_commit_sync_delay = {DELAY_US}")
    yield
    mysql.execute(server.dsn, "SET GLOBAL binlog_group_commit_sync_delay = 0")


@contextmanager
def waiting_for_a_standby(server: PostgresServer) -> Iterator[None]:
    """Let commits wait now and then for a standby that never answers."""
    over = threading.Event()

    def stall() -> None:
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            for names in ("nobody", "") * 10_000:
                connection.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{names}'")
                connection.execute("SELECT pg_reload_conf()")
                if over.wait(0.2) and not names:
                    return

    thread = threading.Thread(target=stall, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(60)
        assert not thread.is_alive()


class Fold:
    """What somebody has who applies every message of a sink in order."""

    def __init__(self, partitions: list[list[str | bytes]]) -> None:
        self.rows: dict[int, Row] = {}
        self.read = 0
        self.repeats = 0
        self._newest: dict[int, int] = {}
        self._ids: set[str] = set()
        for partition in partitions:
            for message in partition:
                self._apply(json.loads(message))

    def _apply(self, event: dict[str, Any]) -> None:
        op = event["op"]
        before: Row | None = event.get("before")
        first = event["event_id"] not in self._ids
        self.repeats += not first
        self._ids.add(event["event_id"])
        had: Row = {}
        if before is not None:
            had = self.rows.pop(before["id"], {})
        if op == "d":
            return
        after: Row = event["after"]
        key, version = after["id"], after["version"]
        had = had or self.rows.get(key, {})
        if first:
            assert version >= self._newest.get(key, 0), f"{op} of key {key} brings an older row"
            self._newest[key] = version
        self.read += op == "r"
        new = {name: value for name, value in after.items() if value != {"_unchanged": True}}
        self.rows[key] = {**(had if op == "u" else {}), **new}


def hammer(campaign: Campaign, kills: int) -> None:
    """Read snapshots, and kill who reads and who delivers, one after another."""
    store, name, rng = campaign.store, campaign.name, campaign.rng
    for number in range(kills):
        if store.snapshots.unfinished(name) is None:
            store.snapshots.request(name, cause="command")
        reader = campaign.begin_reader(f"chunk-noted:{rng.randint(1, 4)}" if number % 2 else None)
        if number % 2:
            campaign.kill_at(f"{rng.choice(STEPS)}:{rng.randint(1, 4)}")
        else:
            campaign.kill_at_random()
        reader.join(rng.uniform(0, 1))
        reader.kill()


def finish(campaign: Campaign) -> None:
    """Let what is left be read and delivered, while the database is not quite idle."""
    store, name = campaign.store, campaign.name
    deadline = time.monotonic() + 1800
    with other_writes(campaign):
        while (newest := store.snapshots.read(name, newest=1)[0]).state != "complete":
            assert time.monotonic() < deadline, campaign.report()
            if newest.state == "cancelled":  # rows moved all the time
                store.snapshots.request(name, cause="command")
            reader = campaign.begin_reader()
            campaign.catch_up()
            reader.join(300)
            assert reader.exitcode is not None, campaign.report()
    campaign.catch_up()


@contextmanager
def other_writes(campaign: Campaign) -> Iterator[None]:
    """Write to a table that is not captured: an idle PostgreSQL makes its log durable late."""
    over = threading.Event()

    def write() -> None:
        connection = campaign.database.connect()
        for number in itertools.count(10**15):
            connection.transaction([f"INSERT INTO ledger VALUES ({number})"])
            if over.wait(0.2):
                break
        connection.close()

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(60)


CELLS = [
    ("postgres-redis", True, 2, [*_POSTGRES]),
    *(
        (ends, exactly_once, 25, [*marks, pytest.mark.soak("snapshots"), pytest.mark.timeout(7200)])
        for ends, marks in (("postgres-redis", _POSTGRES), ("mysql-compacted", _MYSQL))
        for exactly_once in (True, False)
    ),
]


@pytest.mark.usefixtures("slow_commits")
@pytest.mark.parametrize(
    ("ends", "exactly_once", "kills"),
    [
        pytest.param(
            ends, once, kills, marks=marks, id=f"{ends}-{'once' if once else 'least'}-{kills}"
        )
        for ends, once, kills, marks in CELLS
    ],
    indirect=["ends", "exactly_once"],
)
def test_in_the_end_the_sink_has_the_table(make_campaign: MakeCampaign, kills: int) -> None:
    """Row by row, also those that moved between chunks; nothing older ever came over anything newer.

    With exactly once no row of a snapshot comes twice.
    """
    campaign = make_campaign(moves=True, body=6000, chunk_rows=60)
    campaign.fill(1500)
    with campaign.under_load():
        campaign.store.snapshots.request(campaign.name, cause="command")
        hammer(campaign, kills)
        eventually(lambda: campaign.workload.moved > 0, what="a row that moves")
    finish(campaign)

    campaign.destination.settle()
    fold = Fold(campaign.destination.values())
    assert fold.rows == campaign.database.rows(), campaign.report()
    assert fold.read > 0
    if campaign.exactly_once:
        assert fold.repeats == 0
    print(f"{fold.read} rows read, {fold.repeats} repeats\n{campaign.report()}")  # noqa: T201
