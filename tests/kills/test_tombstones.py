"""Runs killed while one change becomes several messages: none of them is missing, divided or repeated."""

from __future__ import annotations

import pytest

from tests.e2e.deployment import eventually
from tests.kills.conftest import MakeCampaign

pytestmark = [
    pytest.mark.spark,
    pytest.mark.mysql,
    pytest.mark.kafka,
    pytest.mark.parametrize("ends", ["mysql-compacted"], indirect=True),
    pytest.mark.parametrize("exactly_once", [True], ids=["exactly-once"], indirect=True),
]


@pytest.mark.soak("kills")
@pytest.mark.timeout(1800)
def test_deletes_and_moves_arrive_whole(make_campaign: MakeCampaign) -> None:
    """Each delete once with its tombstone right behind it, each update of a key as both its halves."""
    campaign = make_campaign(moves=True)
    with campaign.under_load():
        campaign.kill_at(f"sink-sent:{campaign.rng.randint(1, 4)}")
        for _ in range(24):
            campaign.kill_at_random()
        eventually(lambda: campaign.workload.moved > 0, what="a row that moves")
    campaign.catch_up()

    verdict = campaign.check()

    print(f"{verdict}\n{campaign.report()}")  # noqa: T201 - what pytest -s and a failure show
