"""Runs are killed at every step and at random, under load: what the sink must and must not have."""

from __future__ import annotations

import pytest

from deltaforge_dagster.pipeline.failpoints import FAILPOINTS
from tests.kills.cells import cells
from tests.kills.conftest import MakeCampaign

pytestmark = cells("kills")

STEPS = (
    "segment-file-written",
    "segment-row-written",
    "checkpoint-written",
    "source-confirmed",
    "range-closed",
    "range-published",
)
"""What every run passes; beyond that, here no message is refused, and there are no processors, snapshots or holds."""


def test_killed_at_every_step(make_campaign: MakeCampaign) -> None:
    """Everything arrives, in order; what repeats is what was sent since the last checkpoint.

    With exactly once nothing repeats. PostgreSQL forgets nothing that the sink does not have.
    """
    campaign = make_campaign()
    passed = {*STEPS, *campaign.destination.steps}
    steps = [step for step in FAILPOINTS if step in passed]
    assert len(steps) == len(passed)
    campaign.rng.shuffle(steps)
    with campaign.under_load():
        for step in steps:
            campaign.kill_at(f"{step}:{campaign.rng.randint(1, 4)}")
        campaign.kill_at_random()
    campaign.catch_up()

    verdict = campaign.check()
    print(f"{verdict}\n{campaign.report()}")  # noqa: T201 - what pytest -s and a failure show


@pytest.mark.soak("kills")
@pytest.mark.timeout(3600)
def test_killed_fifty_times(make_campaign: MakeCampaign) -> None:
    """The same for fifty kills at random moments."""
    campaign = make_campaign()
    with campaign.under_load():
        for _ in range(50):
            campaign.kill_at_random()
    campaign.catch_up()

    verdict = campaign.check()
    print(f"{verdict}\n{campaign.report()}")  # noqa: T201 - what pytest -s and a failure show
