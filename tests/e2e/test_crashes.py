"""Whatever is killed, the pipeline goes on by itself, from where the store says."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable

import pytest

from deltaforge_dagster.state.store import StateStore
from tests.e2e.conftest import Shop
from tests.e2e.deployment import Deployment, eventually
from tests.e2e.test_daemon import ops, started

pytestmark = [pytest.mark.e2e, pytest.mark.spark, pytest.mark.postgres, pytest.mark.redis]


def test_whatever_is_killed_the_pipeline_goes_on(
    shop: Shop, deploy: Callable[..., Deployment]
) -> None:
    """A run killed with a range open: the next tick starts another one, which closes the range.

    Code server, daemon and run killed together, and the first two started again: the pipeline goes on. Nothing is lost, and repeats are only of what was in flight. While a run works,
    another start writes nothing. SIGTERM, also if it comes again and again, closes the range and ends the run.
    """
    deployment = deploy()
    deployment.add(
        "sturdy",
        shop.pipeline(
            "sturdy",
            run="{idle_seconds: 600, lease_seconds: 8, renew_seconds: 1}",
            range_="{max_seconds: 600}",
        ),
    )
    deployment.start()
    eventually(lambda: started(deployment, "sturdy"), what="the first tick")
    store = deployment.store()

    shop.execute("INSERT INTO customers VALUES (1, 'Ada')")
    eventually(lambda: len(shop.entries("sturdy.customers")) == 1, what="the first delivery")
    assert [row.state for row in store.ranges.read("sturdy")] == ["open"]
    os.kill(eventually(lambda: deployment.run_pid("sturdy"), what="the run"), signal.SIGKILL)
    shop.execute("INSERT INTO customers VALUES (2, 'Grace')")
    eventually(
        lambda: ("c", 2) in ops(shop, "sturdy.customers"),
        what="the delivery after the run was killed",
    )
    first = store.ranges.get("sturdy", 1)
    assert first is not None
    assert (first.state, first.close_reason) == ("closed", "recovered")
    reasons = [one.dagster_run.tags["deltaforge/reason"] for one in deployment.live_runs("sturdy")]
    assert reasons == ["changes", "range open"]

    eventually(lambda: deployment.run_pid("sturdy"), what="the second run")
    deployment.kill()
    shop.execute("INSERT INTO customers VALUES (3, 'Mary')")
    deployment.start()
    eventually(
        lambda: ("c", 3) in ops(shop, "sturdy.customers"),
        what="the delivery after the host crashed",
    )

    seen = list(dict.fromkeys(ops(shop, "sturdy.customers")))
    assert seen == [("c", 1), ("c", 2), ("c", 3)]
    start_a_second(deployment, store)
    terminate(deployment, store)
    store.close()


@pytest.mark.soak("kills")
def test_the_daemon_is_killed_alone(shop: Shop, deploy: Callable[..., Deployment]) -> None:
    """The run goes on meanwhile, and ends in order; another daemon then starts the next one."""
    deployment = deploy()
    run = "{idle_seconds: 20, lease_seconds: 20, renew_seconds: 1}"
    deployment.add("sturdy", shop.pipeline("sturdy", run=run))
    deployment.start()
    eventually(lambda: started(deployment, "sturdy"), what="the first tick")
    shop.execute("INSERT INTO customers VALUES (1, 'Ada')")
    eventually(lambda: len(shop.entries("sturdy.customers")) == 1, what="the first delivery")

    deployment.processes[-1].kill()
    shop.execute("UPDATE customers SET name = 'Ada L' WHERE id = 1")
    eventually(lambda: ("u", 1) in ops(shop, "sturdy.customers"), what="the run's delivery")
    eventually(lambda: deployment.run_pid("sturdy") is None, what="the run's end")
    shop.execute("INSERT INTO customers VALUES (2, 'Grace')")
    deployment.start()
    eventually(lambda: ("c", 2) in ops(shop, "sturdy.customers"), what="the next run's delivery")

    assert ops(shop, "sturdy.customers") == [("c", 1), ("u", 1), ("c", 2)]


@pytest.mark.soak("kills")
@pytest.mark.parametrize("step", ["range-closed", "range-published"])
def test_a_run_killed_before_it_has_published_is_published_once(
    shop: Shop, deploy: Callable[..., Deployment], step: str
) -> None:
    """Killed after closing, or between the event and its row: a tick publishes, once."""
    name = step.replace("range-", "killed-")
    deployment = deploy(environment={"DELTAFORGE_FAILPOINT": step})
    deployment.add(
        name,
        shop.pipeline(
            name,
            run="{idle_seconds: 2, lease_seconds: 8, renew_seconds: 1}",
            range_="{max_seconds: 600}",
        ),
    )
    deployment.start()
    eventually(lambda: started(deployment, name), what="the first tick")

    shop.execute("INSERT INTO customers VALUES (1, 'Ada')")
    store = deployment.store()
    eventually(lambda: store.ranges.published(name, 1, 1) == {(1, "changes"), (1, "redis")})

    assert len(deployment.materializations(name, "changes", 1)) == 1
    assert len(deployment.materializations(name, "redis", 1)) == 1
    eventually(lambda: deployment.live_runs(name)[0].dagster_run.is_failure, what="the failed run")
    store.close()


def written(store: StateStore) -> tuple[object, ...]:
    """Return what a second run could have written, and the first does not write while idle."""
    row, lease = store.pipelines.get("sturdy"), store.leases.get("sturdy")
    assert row is not None
    assert lease is not None
    return (
        (row.uid, row.spec_hash, row.next_segment, row.next_range),
        (lease.epoch, lease.run_id, lease.session_id),
        store.ranges.read("sturdy"),
        store.segments.read("sturdy"),
        store.checkpoints.read("sturdy"),
    )


def start_a_second(deployment: Deployment, store: StateStore) -> None:
    """Start another run beside the one that works: it says so, and writes nothing."""
    eventually(lambda: deployment.run_pid("sturdy"), what="a run that works")
    row = store.pipelines.get("sturdy")
    assert row is not None
    eventually(
        lambda: store.checkpoints.read("sturdy")["redis"].whole_segment == row.next_segment - 1,
        what="the checkpoint",
    )
    before = written(store)

    second = deployment.command("run", "sturdy", "--json")

    assert second.wait() == 1
    assert json.loads(second.last_line)["reason"] == "held elsewhere"
    assert written(store) == before


def terminate(deployment: Deployment, store: StateStore) -> None:
    """End the run by signals; its range is closed and published."""
    pid = deployment.run_pid("sturdy")
    assert pid is not None

    def ended() -> bool:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        return deployment.run_pid("sturdy") is None

    eventually(ended, what="the end of the run")
    last = store.ranges.read("sturdy")[-1]
    assert (last.state, last.close_reason) == ("closed", "run ended")
    eventually(
        lambda: deployment.materializations("sturdy", "redis", last.range), what="publication"
    )
