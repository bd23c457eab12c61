"""Tests that the data a pipeline leaves behind does not grow from day to day."""

from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path

import dagster as dg
import pytest
import sqlalchemy as sa
from dagster._core.storage.event_log import SqlEventLogStorage
from dagster._core.storage.event_log.schema import (
    AssetCheckExecutionsTable,
    SqlEventLogStorageTable,
)

from deltaforge_dagster.assets import lake_tables
from deltaforge_dagster.assets.checks import evaluate
from deltaforge_dagster.assets.lake_tables import publish_writes
from deltaforge_dagster.assets.names import partitions_name
from deltaforge_dagster.assets.publish import publish
from deltaforge_dagster.config.file.load import LoadedPipeline, load_pipeline
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.resources.platform import Opened
from deltaforge_dagster.sensors.retention import _forget
from deltaforge_dagster.state.database import tables
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.state.table_commits import TableWrite
from tests.state.make import NAME, capture, deliver, expire, held, position

logger = logging.getLogger(__name__)

FILE = """\
metadata: {name: orders, tenant: acme}
spec:
  source:
    type: postgres
    config: {id: db, dsn: "postgres://u@localhost/d", slot: s, publication: p, tables: [t]}
  sinks:
    - {type: redis, config: {id: redis, uri: "redis://localhost", stream: s}}
"""


def pluralize(store: StateStore, instance: dg.DagsterInstance) -> dict[str, int]:
    """Return the number of rows of each table, of the state store and of Dagster's events."""
    storage = instance.event_log_storage
    assert isinstance(storage, SqlEventLogStorage)
    with store.database.read() as ours, storage.index_connection() as dagsters:
        found = {
            table.name: ours.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()
            for table in tables.metadata.sorted_tables
        }
        for table in (SqlEventLogStorageTable, AssetCheckExecutionsTable):
            count = sa.select(sa.func.count()).select_from(table)
            found[table.name] = dagsters.execute(count).scalar_one()
    partitions = instance.get_dynamic_partitions(partitions_name(NAME))
    return {**found, "partitions": len(partitions)}


def let_a_day_pass(store: StateStore, instance: dg.DagsterInstance) -> None:
    """Move every stored time back by a day."""
    with store.database.write() as connection:
        ranges = tables.ranges
        connection.execute(
            sa.update(ranges).values(
                opened_at=ranges.c.opened_at - 86400, closed_at=ranges.c.closed_at - 86400
            )
        )
    storage = instance.event_log_storage
    assert isinstance(storage, SqlEventLogStorage)
    checks = AssetCheckExecutionsTable
    with storage.index_connection() as connection:
        for number, made in list(
            connection.execute(sa.select(checks.c.id, checks.c.create_timestamp))
        ):
            earlier = made - timedelta(days=1)
            connection.execute(
                sa.update(checks).where(checks.c.id == number).values(create_timestamp=earlier)
            )


def a_day(
    opened: Opened, instance: dg.DagsterInstance, loaded: LoadedPipeline, day: int, ranges: int
) -> None:
    """Capture and deliver some ranges, publish them, evaluate checks, and run retention."""
    store = opened.store
    lease = held(store, run_id=f"run-{day}", seconds=3600)
    for number in range(day * ranges + 1, (day + 1) * ranges + 1):
        capture(store, lease, number)
    deliver(store, lease, "redis", (day + 1) * ranges)
    with store.fenced(lease) as writer:
        if day == 0:
            writer.table_commits.restart("redis", 0)
        for number in range(day * ranges + 1, (day + 1) * ranges + 1):
            written = TableWrite(("a", "b"), ("a", "b"), (), 1, position(number), 0.0)
            writer.table_commits.advance("redis", number, (), [written])
    expire(store)
    emit = instance.report_runless_asset_event
    publish(instance, store, NAME, emit, opened.journal)
    publish_writes(instance, store, loaded, emit)
    for evaluation in evaluate(instance, store, loaded, None, []):
        emit(evaluation)
    _forget(instance, opened, loaded)


@pytest.mark.parametrize(
    ("days", "ranges"),
    [
        pytest.param(6, 3, id="some days"),
        pytest.param(
            30, 1440, id="a month of ranges of a minute",
            marks=[pytest.mark.soak("growth"), pytest.mark.timeout(14400)],
        ),
    ],
)  # fmt: skip
def test_nothing_grows(
    sqlite_store: StateStore,
    tmp_path: Path,
    days: int,
    ranges: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the third day on, the numbers of rows and partitions are the same after each day."""
    monkeypatch.setattr(lake_tables, "EVENT_SECONDS", 0.0)  # events keep the times of this day
    (tmp_path / "orders.yaml").write_text(FILE)
    loaded = load_pipeline(tmp_path / "orders.yaml")
    settings = Settings.from_env({"DELTAFORGE_HOME": str(tmp_path)})
    opened = Opened(settings, sqlite_store, Journal(tmp_path.joinpath("journal").as_uri()))
    rows, files = [], []
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        for day in range(days):
            a_day(opened, instance, loaded, day, ranges)
            rows.append(pluralize(sqlite_store, instance))
            files.append(sum(one.stat().st_size for one in tmp_path.rglob("*.db")))
            let_a_day_pass(sqlite_store, instance)
            logger.info("day %d: %d bytes of databases", day, files[-1])

    assert rows[0]["range"] == rows[-1]["range"] == ranges
    assert rows[3:] == [rows[2]] * (days - 3)
    assert files[-1] < files[3] * 1.5
