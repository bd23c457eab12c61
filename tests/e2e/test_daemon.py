"""The main job through Dagster's daemon: log position moves, sensor, run, rows, materializations."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

import pytest

from tests.e2e.conftest import Shop
from tests.e2e.deployment import Deployment, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.spark, pytest.mark.postgres, pytest.mark.redis]


def ops(shop: Shop, stream: str) -> list[tuple[str, object]]:
    """Return (op, id) of each event of a stream."""
    events = [json.loads(fields["df-event"]) for fields in shop.entries(stream)]
    return [(event["op"], (event["after"] or event["before"])["id"]) for event in events]


def started(deployment: Deployment, pipeline: str) -> bool:
    """Say whether the start position is fixed: everything committed from now on is captured."""
    store = deployment.store()
    try:
        row = store.pipelines.get(pipeline)
    finally:
        store.close()
    return row is not None and row.start_position is not None


def ticks(deployment: Deployment, pipeline: str) -> int:
    """Return how many ticks the sensor of a pipeline has had."""
    (state,) = [
        one
        for one in deployment.instance.all_instigator_state()
        if one.instigator_name == f"{pipeline}_work"
    ]
    found = deployment.instance.get_ticks(state.instigator_origin_id, state.selector_id, limit=1000)
    return len(found)


def test_changes_reach_redis_and_the_ui_knows(
    shop: Shop, deploy: Callable[..., Deployment]
) -> None:
    """Inserts, updates, deletes and multi-row transactions arrive in order, once, in two ranges.

    The ranges are partitions with true metadata, both by one run; an idle phase makes no range;
    then new data starts a new run. Beside it a pipeline that is idle starts none, though other tables move the log.
    """
    deployment = deploy()
    deployment.add("quiet", shop.pipeline("quiet", tables="[public.visits]"))
    # Idle for longer than it takes to see that the first range is closed, and to write the second.
    run = "{idle_seconds: 15, lease_seconds: 20, renew_seconds: 1}"
    deployment.add("shop-feed", shop.pipeline("shop-feed", run=run))
    deployment.start()
    for name in ("shop-feed", "quiet"):
        eventually(partial(started, deployment, name), what=f"the first tick of {name}")
    store = deployment.store()
    before = ticks(deployment, "quiet")

    shop.execute("INSERT INTO customers VALUES (1, 'Ada'), (2, 'Grace')")
    eventually(lambda: len(shop.entries("shop-feed.customers")) == 2, what="the first delivery")
    eventually(
        lambda: store.ranges.read("shop-feed", state="closed"), what="the first range", every=0.05
    )
    shop.execute(
        "INSERT INTO orders SELECT n, 1, n * 1.5 FROM generate_series(1, 50) n",
        "UPDATE orders SET total = 0 WHERE id = 7",
        "DELETE FROM orders WHERE id = 8",
        "UPDATE customers SET name = 'Grace H' WHERE id = 2",
    )
    eventually(lambda: len(shop.entries("shop-feed.orders")) == 52, what="the second delivery")
    eventually(
        lambda: deployment.materializations("shop-feed", "redis", 2), what="the second range"
    )
    finished = eventually(
        lambda: [
            record for record in deployment.live_runs("shop-feed") if record.dagster_run.is_success
        ],
        what="the end of the idle run",
    )

    assert ops(shop, "shop-feed.customers") == [("c", 1), ("c", 2), ("u", 2)]
    assert ops(shop, "shop-feed.orders") == [
        *(("c", number) for number in range(1, 51)),
        ("u", 7),
        ("d", 8),
    ]
    (first,) = deployment.materializations("shop-feed", "changes", 1)
    (second,) = deployment.materializations("shop-feed", "changes", 2)
    assert deployment.materializations("shop-feed", "redis", 1)
    (sent,) = deployment.materializations("shop-feed", "redis", 2)
    assert first["events"] == 2
    assert first["operations/c"] == 2
    assert second["events"] == 53
    assert second["tables/public.orders"] == 52
    assert (second["operations/u"], second["operations/d"]) == (2, 1)
    assert int(sent["checkpoint_segment"]) >= int(second["last_segment"])
    assert first["end_position"] == second["start_position"]
    assert len(str(second["content_hash"])) == 64
    assert str(second["schema/public.orders"]).startswith("sha256:")
    assert len(finished) == 1, "both ranges are one run's"
    for asset, check in [
        ("changes", "contiguity"),
        ("changes", "agreement"),
        ("changes", "source"),
        ("redis", "delivered"),
    ]:
        evaluation = deployment.check("shop-feed", asset, check)
        assert evaluation is not None, check
        assert evaluation.passed, evaluation.description

    ranges = len(store.ranges.read("shop-feed"))
    shop.execute("INSERT INTO customers VALUES (3, 'Mary')")
    eventually(lambda: ("c", 3) in ops(shop, "shop-feed.customers"), what="new data after idling")
    assert ranges == 2, "the idle phase made no range"
    assert len(store.ranges.read("shop-feed")) == 3
    store.close()

    eventually(lambda: ticks(deployment, "quiet") > before + 4, what="four ticks")
    assert deployment.live_runs("quiet") == []
    shop.execute("INSERT INTO visits (page) VALUES ('x')")
    eventually(lambda: len(shop.entries("quiet.visits")) == 1, what="the captured change")
