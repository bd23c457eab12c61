"""A sink that joins with `start: snapshot` while writers write, and runs and readers are killed."""

from __future__ import annotations

import pytest

from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.pipeline.control.work import register
from deltaforge_dagster.pipeline.snapshots.request import requested_snapshot
from deltaforge_dagster.state.snapshot_records import SnapshotRow
from tests.kills.campaign import Campaign
from tests.kills.conftest import MakeCampaign
from tests.kills.destinations import RedisDestination
from tests.kills.test_snapshots import STEPS, Fold, finish

pytestmark = [pytest.mark.spark, pytest.mark.redis]

LATE = "late"


def join(campaign: Campaign) -> RedisDestination:
    """Add a sink to the pipeline file, on the first one's server."""
    assert isinstance(campaign.destination, RedisDestination)
    late = RedisDestination(campaign.destination.uri)
    late.stream = LATE
    once = late.sink(exactly_once=campaign.exactly_once)
    sink = once.replace("id: sink,", f"id: {LATE}, start: snapshot,")
    text = campaign.file.read_text()
    campaign.file.write_text(text.replace("\n  engine:", f"\n    - {sink}\n  engine:"))
    return late


def ask(campaign: Campaign) -> SnapshotRow | None:
    """Do what a tick does: make the file known, and want the snapshot that it asks for."""
    loaded = load_pipeline(campaign.file)
    return requested_snapshot(campaign.store, loaded, register(campaign.store, loaded))


@pytest.mark.parametrize(
    ("ends", "exactly_once", "kills"),
    [
        pytest.param(
            f"{source}-redis",
            True,
            kills,
            marks=[mark, pytest.mark.soak("snapshots"), pytest.mark.timeout(3600)],
            id=f"{source}-{kills}",
        )
        for kills in (2, 15)
        for source, mark in (("postgres", pytest.mark.postgres), ("mysql", pytest.mark.mysql))
    ],
    indirect=["ends", "exactly_once"],
)
def test_it_has_every_row_in_the_end_and_the_others_only_changes(
    make_campaign: MakeCampaign, kills: int
) -> None:
    """The new sink's rows are the source's, nothing older over newer, nothing twice.

    The sink that was there gets each change once, in order, and no row of the snapshot.
    """
    campaign = make_campaign(moves=True, chunk_rows=40, lease_seconds=10)
    with campaign.under_load():
        campaign.end(campaign.begin_and_deliver())
        late = join(campaign)
        asked = ask(campaign)
        assert asked is not None
        assert (asked.cause, asked.sinks) == ("sink", [LATE])
        for number in range(kills):
            reader = campaign.begin_reader(f"chunk-noted:{campaign.rng.randint(1, 4)}")
            campaign.kill_at(f"{campaign.rng.choice(STEPS)}:{campaign.rng.randint(1, 4)}")
            reader.join(campaign.rng.uniform(0, 1) if number % 2 else 60)
            reader.kill()
    finish(campaign)

    rows = campaign.database.rows()
    for destination, read in ((late, True), (campaign.destination, False)):
        fold = Fold(destination.values())
        assert fold.rows == rows, campaign.report()
        assert (fold.read > 0) == read
        assert fold.repeats == 0
    late.close()
    assert ask(campaign) is None, "it is asked for once"
