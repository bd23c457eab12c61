"""Materialize of closed ranges from the UI: sinks get them again, and `changes` is verified."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial

import dagster as dg
import pytest

from deltaforge_dagster.assets.names import asset_key, job_name, partition_key
from deltaforge_dagster.definitions import build_definitions
from deltaforge_dagster.pipeline.control.closed_ranges import CHANGES
from tests.e2e.conftest import Shop
from tests.e2e.deployment import Deployment, eventually
from tests.e2e.test_daemon import started
from tests.e2e.webserver import Webserver

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.spark,
    pytest.mark.postgres,
    pytest.mark.redis,
    pytest.mark.soak("dagster"),
]

ASSETS = (CHANGES, "redis")


@pytest.fixture
def fed(shop: Shop, deploy: Callable[..., Deployment]) -> Iterator[Deployment]:
    """A pipeline `again` whose live run goes on: ranges 1 and 2 are closed, range 3 is open."""
    deployment = deploy()
    text = shop.pipeline(
        "again",
        run="{idle_seconds: 600, lease_seconds: 20, renew_seconds: 1}",
        range_="{max_seconds: 600, max_events: 3}",
    )
    deployment.add("again", text)
    deployment.start()
    eventually(lambda: started(deployment, "again"), what="the first tick")
    for count, change in enumerate(
        (
            "INSERT INTO customers VALUES (1, 'Ada'), (2, 'Grace'), (3, 'Mary \"é\"')",
            "UPDATE customers SET name = name || '!'",
            "DELETE FROM customers WHERE id = 2",
        ),
        start=1,
    ):
        shop.execute(change)
        eventually(partial(arrived, shop, min(3 * count, 7)), what=f"delivery {count}")
    for asset in ASSETS:
        eventually(partial(deployment.materializations, "again", asset, 2), what=asset)
    store = deployment.store()
    # What follows an event in Dagster, and an entry in Redis: the rows that say so.
    eventually(
        lambda: len(store.ranges.published("again", 1, 9)) == 4, what="the rows of publication"
    )
    eventually(
        lambda: store.checkpoints.read("again")["redis"].whole_segment == 3, what="the checkpoint"
    )
    yield deployment
    store.pipelines.set_desired_state(
        "again", "stopped"
    )  # the run ends at once, and not only when it is killed
    store.close()


def arrived(shop: Shop, count: int) -> bool:
    """Say whether that many changes have arrived."""
    return len(shop.entries("again.customers")) == count


def materialize(deployment: Deployment, asset: str, number: int) -> dg.ExecuteInProcessResult:
    """Materialize one range of one asset in this process."""
    job = build_definitions(deployment.settings).resolve_job_def(job_name("again"))
    return job.execute_in_process(
        instance=deployment.instance,
        asset_selection=[asset_key("again", asset)],
        partition_key=partition_key(number),
        raise_on_error=False,
    )


def failure(result: dg.ExecuteInProcessResult) -> str:
    """Return why the step failed, in our words."""
    (event,) = [event for event in result.all_events if event.is_step_failure]
    described = event.step_failure_data.user_failure_data
    assert described is not None
    return str(described.description)


def test_ranges_are_replayed_and_verified(shop: Shop, fed: Deployment) -> None:
    """A backfill, launched as the UI does, is one run, `deltaforge replay` another: same values, marked.

    Nothing moves. Both work beside the live run, in log order, and leave true metadata on every partition. An
    open range is refused. A damaged journal file is found by materializing `changes`.
    """
    store = fed.store()
    first = shop.entries("again.customers")
    before = (
        store.ranges.read("again"),
        store.segments.read("again"),
        store.checkpoints.read("again"),
        store.ranges.published("again", 1, 9),
    )
    true = {
        (asset, n): fed.materializations("again", asset, n)[0] for asset in ASSETS for n in (1, 2)
    }

    webserver = Webserver.of(fed)
    keys = [asset_key("again", asset) for asset in ASSETS]
    (run_id,) = webserver.backfill(keys, [partition_key(2), partition_key(1)])

    assert webserver.status(run_id) == "SUCCESS"
    again = shop.entries("again.customers")[7:]
    assert again == [{**fields, "df-replay": run_id} for fields in first[:6]]
    for (asset, number), metadata in true.items():
        newest, *_ = fed.materializations("again", asset, number)
        done = {"verified" if asset == CHANGES else "replayed": 3, "run": run_id}
        assert {key: newest[key] for key in done} == done
        moving = ("checkpoint_", "lag_", "events_per", "bytes_per", "run")
        unmoved = {name for name in metadata if not name.startswith(moving)}
        assert {name: newest[name] for name in unmoved} == {
            name: metadata[name] for name in unmoved
        }

    command = fed.command("replay", "again", "--range", "1-2", "--sink", "redis", "--json")
    assert command.wait() == 0, command.output
    assert json.loads(command.last_line)["sent"] == 6
    third = shop.entries("again.customers")[13:]
    marks = {fields.pop("df-replay") for fields in third}
    assert third == first[:6]
    assert len(marks) == 1
    assert marks != {run_id}

    refused = fed.command("replay", "again", "--range", "3", "--sink", "redis")
    assert refused.wait() == 2
    expected = "again: range 3 is still open; wait until it is closed"
    assert refused.output.strip() == f"error: {expected}"
    assert failure(materialize(fed, CHANGES, 3)) == expected

    assert before == (
        store.ranges.read("again"),
        store.segments.read("again"),
        store.checkpoints.read("again"),
        store.ranges.published("again", 1, 9),
    )
    assert len(fed.live_runs("again")) == 1
    assert len(shop.entries("again.customers")) == 19

    (damaged, *_) = store.segments.read("again")
    store.close()
    file = fed.folder / "home" / "journal" / damaged.path
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert damaged.path in failure(materialize(fed, CHANGES, 1))
    assert materialize(fed, CHANGES, 2).success
