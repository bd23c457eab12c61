"""A holder of the lease that is stopped for longer than it, and goes on after another took over."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.pipeline.control.journal_space import ORPHAN_SECONDS, expire
from deltaforge_lab.servers.postgres import PostgresServer
from tests.kills.campaign import Campaign, Run
from tests.kills.cells import cells
from tests.kills.conftest import MakeCampaign

# What it must not do is decided by the lease and by the sink that fences.
pytestmark = cells("stalls", gate={("mysql-kafka", True)})


def stall_and_take_over(campaign: Campaign, run: Run) -> None:
    """Let another run take over from a stopped one, then let that go on to its end."""
    lease = campaign.store.leases.get(campaign.name)
    assert lease is not None
    assert lease.run_id == run.process.name
    other = campaign.begin_and_deliver()
    rows = [row for row in campaign.store.segments.read(campaign.name) if row.epoch == lease.epoch]

    run.send(signal.SIGCONT)

    assert campaign.wait(run, "SIGCONT") == 0
    assert run.outcome["reason"] == "lease lost", campaign.report()
    assert [
        row for row in campaign.store.segments.read(campaign.name) if row.epoch == lease.epoch
    ] == rows
    campaign.end(other)


def orphans(campaign: Campaign) -> list[Path]:
    """Return the journal's files that have no row."""
    root = campaign.settings.home / "journal"
    known = {row.path for row in campaign.store.segments.read(campaign.name)}
    return [path for path in root.rglob("*.parquet") if str(path.relative_to(root)) not in known]


@pytest.mark.postgres
@pytest.mark.parametrize(
    "at_random",
    [
        pytest.param(1, id="short"),
        pytest.param(10, id="long", marks=[pytest.mark.soak("stalls"), pytest.mark.timeout(3600)]),
    ],
)
def test_a_stalled_holder_leaves_no_trace(
    make_campaign: MakeCampaign,
    postgres_server: PostgresServer,
    at_random: int,
) -> None:
    """Stopped at a step or anywhere, for longer than the lease: it writes no row and sends nothing.

    What it would send shows as a repeat out of its turn. A file it leaves is swept. The state is
    in PostgreSQL, which ends the transaction of a stopped process; SQLite's locks are the
    process's own, and nobody takes over while it is stopped amid a write.
    """
    campaign = make_campaign(state_url=postgres_server.create_database())
    of_sink = campaign.destination.steps
    short = ("segment-file-written", of_sink[-1])
    long = ("segment-file-written", "segment-row-written", *of_sink)
    with campaign.under_load():
        for step in short if at_random == 1 else long:
            stall_and_take_over(campaign, campaign.stop_at(step))
        for _ in range(at_random):
            stall_and_take_over(campaign, campaign.stop_at_random())
    campaign.catch_up()
    campaign.check()

    left = orphans(campaign)
    assert left, "the run stopped before the segment's row left its file"
    for path in left:
        os.utime(path, (time.time() - 2 * ORPHAN_SECONDS,) * 2)
    expire(campaign.store, campaign.journal, load_pipeline(campaign.file))
    assert orphans(campaign) == []
    print(campaign.report())  # noqa: T201 - what pytest -s and a failure show
