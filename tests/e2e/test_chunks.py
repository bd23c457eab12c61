"""Chunks of a snapshot that are chosen in the UI: as a backfill, one alone, and by re-execution."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, pairwise

import pytest

from deltaforge_dagster.assets.names import snapshot_key
from deltaforge_dagster.state.store import StateStore
from tests.e2e.conftest import Shop
from tests.e2e.deployment import Deployment, eventually
from tests.e2e.webserver import ASSET_JOB, Webserver

pytestmark = [pytest.mark.e2e, pytest.mark.spark, pytest.mark.postgres, pytest.mark.redis]

NAME = "chosen"
ROWS, CHUNK = 25, 10
wait = partial(eventually, seconds=600.0)


@pytest.fixture
def spliced(
    shop: Shop, deploy: Callable[..., Deployment]
) -> Iterator[tuple[Webserver, StateStore]]:
    """A pipeline whose first snapshot is delivered, and whose live run goes on."""
    shop.execute(f"INSERT INTO customers SELECT n, 'name ' || n FROM generate_series(1, {ROWS}) n")
    deployment = deploy()
    text = shop.pipeline(
        NAME,
        tables=f"[public.customers]\n      snapshot: {{mode: initial, chunk_size: {CHUNK}}}",
        run="{idle_seconds: 600, lease_seconds: 20, renew_seconds: 1}",
    )
    deployment.add(NAME, text)
    deployment.start()
    webserver = Webserver.of(deployment)
    store = deployment.store()
    wait(partial(is_over, shop, store, ROWS), what="the snapshot")
    yield webserver, store
    store.pipelines.set_desired_state(
        NAME, "stopped"
    )  # the run ends at once, and not only when it is killed
    store.close()


def is_over(shop: Shop, store: StateStore, count: int) -> bool:
    """Say whether every chunk is in the journal, and that many rows have arrived."""
    return [one.state for one in store.snapshots.read(NAME)] == ["complete"] and len(
        ids(shop)
    ) >= count


def ids(shop: Shop) -> list[int]:
    """Return the keys of the rows that arrived, in order."""
    events = [json.loads(fields["df-event"]) for fields in shop.entries(f"{NAME}.customers")]
    assert {event["op"] for event in events} <= {"r"}
    return [event["after"]["id"] for event in events]


@pytest.mark.soak("snapshots")
@pytest.mark.timeout(3600)
def test_chosen_chunks_are_read_and_delivered_again(
    shop: Shop, spliced: tuple[Webserver, StateStore]
) -> None:
    """Two chunks are one run, one alone is one, a re-execution reads its run's chunks again.

    Each reads just what was chosen, and its rows are delivered once more; nothing else is.
    """
    webserver, store = spliced
    chunks = store.snapshots.chunks(NAME, 1)
    ends = list(accumulate((one.rows or 0 for one in chunks), initial=0))
    assert ends[-1] == ROWS
    rows = {
        one.partition: list(range(before + 1, end + 1))
        for one, (before, end) in zip(chunks, pairwise(ends), strict=True)
    }
    first, second, third = rows
    assert sorted(ids(shop)) == list(range(1, ROWS + 1))
    readings = {one.partition: one.read_at for one in chunks}
    arrived = ROWS

    def expect(run: str, *chosen: str) -> None:
        """Check that a run has succeeded, and what was read and has arrived since the last one."""
        nonlocal arrived, readings
        assert webserver.status(run) == "SUCCESS"
        keys = sorted(key for one in chosen for key in rows[one])
        wait(partial(is_over, shop, store, arrived + len(keys)), what=f"the rows of {chosen}")
        now = {one.partition: one.read_at for one in store.snapshots.chunks(NAME, 1)}
        assert {one for one in now if now[one] != readings[one]} == set(chosen)
        assert sorted(ids(shop)[arrived:]) == keys
        arrived, readings = arrived + len(keys), now

    (run,) = webserver.backfill([snapshot_key(NAME)], [second, first])
    expect(run, first, second)
    (alone,) = webserver.runs(ASSET_JOB, [(snapshot_key(NAME), third)])
    expect(alone, third)
    expect(webserver.again(run), first, second)
