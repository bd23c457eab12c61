"""Snapshots through Dagster's daemon: begun by the sensor, gone on with after a kill, asked for in the UI."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import dagster as dg
import psycopg
import pytest
from dagster._core.execution.backfill import BulkActionStatus, PartitionBackfill
from dagster._core.storage.tags import BACKFILL_ID_TAG
from psycopg import sql
from psycopg.rows import dict_row

from deltaforge_dagster.assets.names import PIPELINE_TAG, RUN_TAG, snapshot_key
from deltaforge_dagster.definitions import build_definitions
from deltaforge_dagster.state.store import StateStore
from tests.e2e.conftest import Shop
from tests.e2e.deployment import Deployment, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.spark, pytest.mark.postgres, pytest.mark.redis]

wait = partial(eventually, seconds=600.0)

NAME = "snaps"
CUSTOMERS, ORDERS = "public.customers", "public.orders"
CHUNKS = 8
NOTED = 5
"""A run that reads dies when it has noted so many chunks."""
LATE = """\
    - type: redis
      config: {{id: late, start: snapshot, uri: "{uri}", stream: "late.${{source.table}}"}}
"""


def file(shop: Shop) -> str:
    """Return a pipeline over one table, in chunks of ten rows, that begins with a snapshot."""
    text = shop.pipeline(
        NAME,
        tables=f"[{CUSTOMERS}]",
        run="{idle_seconds: 300, lease_seconds: 20, renew_seconds: 1}",
    )
    block = "snapshot: {mode: initial, chunk_size: 10}"
    return text.replace(f"[{CUSTOMERS}]", f"[{CUSTOMERS}]\n      {block}")


def readings(store: StateStore) -> dict[int, float]:
    """Return when each chunk of the first snapshot was read; nothing until all were."""
    found = store.snapshots.chunks(NAME, 1)
    read = {one.number: one.read_at for one in found if one.read_at is not None}
    return read if len(read) == len(found) else {}


def spliced(store: StateStore, snapshot: int) -> bool:
    """Say whether all of a snapshot is in the journal."""
    return any(
        row.snapshot == snapshot and row.state == "complete" for row in store.snapshots.read(NAME)
    )


def delivered(store: StateStore) -> bool:
    """Say whether every sink has got all that is in the journal."""
    pipeline = store.pipelines.get(NAME)
    assert pipeline is not None
    reached = {row.whole_segment for row in store.checkpoints.read(NAME).values()}
    return reached == {pipeline.next_segment - 1}


def events(shop: Shop, stream: str) -> list[dict[str, Any]]:
    """Return the events of a stream."""
    return [json.loads(fields["df-event"]) for fields in shop.entries(stream)]


def ops(shop: Shop, stream: str) -> Counter[str]:
    """Return how many events of each kind a stream has."""
    return Counter(event["op"] for event in events(shop, stream))


def has(shop: Shop, stream: str, rows: dict[object, str]) -> bool:
    """Say whether these rows are what somebody has who applies every event of a stream in order."""
    made: dict[object, str] = {}
    for event in events(shop, stream):
        if event["op"] == "d":
            made.pop(event["before"]["id"], None)
        else:
            made[event["after"]["id"]] = json.dumps(event["after"], sort_keys=True)
    return made == rows


def source(shop: Shop, table: str) -> dict[object, str]:
    """Return a table's rows, as events say them."""
    with psycopg.connect(shop.dsn, row_factory=dict_row) as connection:
        found = connection.execute(sql.SQL("SELECT * FROM {}").format(sql.Identifier(table)))
        return {row["id"]: json.dumps(row, sort_keys=True, default=str) for row in found}


def readers(deployment: Deployment) -> list[dg.RunRecord]:
    """Return the runs that the snapshots' sensor has started, oldest first, once all have ended."""
    tags = {PIPELINE_TAG: NAME, RUN_TAG: "snapshot"}
    found = deployment.instance.get_run_records(dg.RunsFilter(tags=tags), ascending=True)
    return list(found) if all(one.dagster_run.is_finished for one in found) else []


def backfill(deployment: Deployment, numbers: Iterable[int]) -> dg.DagsterRun:
    """Ask for chunks of the customers, as the UI's Materialize does; return the run when it ended."""
    graph = build_definitions(deployment.settings).resolve_asset_graph()
    instance = deployment.instance
    asked = PartitionBackfill.from_asset_partitions(
        backfill_id="onceagain",
        asset_graph=graph,
        partition_names=[f"{CUSTOMERS}/{number:06d}" for number in numbers],
        asset_selection=[snapshot_key(NAME)],
        backfill_timestamp=time.time(),
        tags={},
        dynamic_partitions_store=instance,
        all_partitions=False,
        title=None,
        description=None,
        run_config=None,
    )
    instance.add_backfill(asked)

    def ended() -> bool:
        found = instance.get_backfill(asked.backfill_id)
        assert found is not None
        return found.status not in {BulkActionStatus.REQUESTED, BulkActionStatus.FAILING}

    wait(ended, what="the end of the backfill")
    (run,) = instance.get_runs(dg.RunsFilter(tags={BACKFILL_ID_TAG: asked.backfill_id}))
    return run


@pytest.mark.soak("snapshots")
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore:Function `AssetSelection.sources`:DeprecationWarning")
def test_what_died_is_gone_on_with_and_what_joins_is_read(
    shop: Shop, deploy: Callable[..., Deployment]
) -> None:
    """A run that reads dies after five of eight chunks: the next one reads just the three others.

    So it is with six chunks that are asked for in the UI. Then a table and a sink join in the file:
    the sensor brings the sink all rows, and a snapshot that is asked for the table's; nobody
    stops the pipeline, and the first sink gets no row of what was for the other.
    """
    shop.execute(
        f"INSERT INTO customers SELECT n, 'name ' || n FROM generate_series(1, {10 * CHUNKS}) n",
        "INSERT INTO orders SELECT n, n, n FROM generate_series(1, 15) n",
    )
    deployment = deploy(environment={"DELTAFORGE_FAILPOINT": f"chunk-noted:{NOTED}"})
    text = file(shop)
    deployment.add(NAME, text)
    deployment.start()
    store = deployment.store()

    wait(lambda: store.snapshots.read(NAME), what="the wish")
    shop.execute(
        "UPDATE customers SET name = 'new' WHERE id % 3 = 0", "DELETE FROM customers WHERE id = 5"
    )
    wait(lambda: spliced(store, 1), what="the snapshot")
    died, done = wait(lambda: readers(deployment), what="the end of who read it")
    assert died.dagster_run.is_failure
    assert done.dagster_run.is_success
    whole = readings(store)
    begun = done.create_timestamp.timestamp()
    assert len(whole) == CHUNKS
    assert sum(at < begun for at in whole.values()) == NOTED

    chosen = set(range(1, 7))
    assert backfill(deployment, chosen).is_failure
    noted = {
        one.number: one.read_at for one in store.snapshots.chunks(NAME, 1) if one.number in chosen
    }
    again = wait(lambda: readings(store), what="what the backfill had left")
    wait(lambda: spliced(store, 1), what="the snapshot, once more")
    assert {number for number in again if again[number] != whole[number]} == chosen
    kept = {number: at for number, at in noted.items() if at is not None}
    assert len(kept) >= NOTED
    assert {number: again[number] for number in kept} == kept

    wait(lambda: delivered(store), what="the rows that were read again")
    before = ops(shop, f"{NAME}.customers")
    late = LATE.format(uri=shop.redis_uri)
    more = text.replace(f"[{CUSTOMERS}]", f"[{CUSTOMERS}, {ORDERS}]")
    deployment.add(NAME, more.replace("  engine:\n", f"{late}  engine:\n"))
    wait(lambda: spliced(store, 2), what="the snapshot of the sink that joined")
    assert store.snapshots.read(NAME, newest=1)[0].sinks == ["late"]
    shop.execute(
        "UPDATE orders SET total = 7 WHERE id = 7", "INSERT INTO customers VALUES (1000, 'last')"
    )
    number = store.snapshots.request(NAME, tables=[ORDERS], cause="command").snapshot
    wait(lambda: spliced(store, number), what="the snapshot of the table that joined")
    for table in ("customers", "orders"):
        rows = source(shop, table)
        for sink in (NAME, "late"):
            wait(partial(has, shop, f"{sink}.{table}", rows), what=f"{table} in {sink}")
    assert ops(shop, f"{NAME}.customers") - before == {"c": 1}
    assert ops(shop, "late.customers")["r"] == 10 * CHUNKS - 1
    store.pipelines.set_desired_state(NAME, "stopped")
    store.close()
