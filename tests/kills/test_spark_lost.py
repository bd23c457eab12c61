"""Spark dies in the middle of a run, which goes on by itself."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deltaforge_dagster.installation.spark_server import SparkServer
from tests.fix_spark import SparkAddress, connected
from tests.kills.campaign import Campaign
from tests.kills.cells import POSTGRES_TO_REDIS
from tests.kills.conftest import MakeCampaign

pytestmark = POSTGRES_TO_REDIS

LEASE_SECONDS = 20


@contextmanager
def going_on(campaign: Campaign) -> Iterator[None]:
    """Prove that a run survives what happens in the block, and that all is as it should be."""
    with campaign.under_load():
        run = campaign.begin_and_deliver()
        yield
        for _ in range(5):
            assert campaign.deliver_more(run) is run, campaign.report()
        campaign.end(run)
    campaign.catch_up()
    campaign.check()


def test_a_killed_server(make_campaign: MakeCampaign) -> None:
    """The run starts another server, and delivers on: nothing is lost, nothing repeated."""
    campaign = make_campaign(spark=None, by_spark=True, lease_seconds=LEASE_SECONDS)
    home = campaign.settings.home
    try:
        with going_on(campaign):
            watcher = json.loads((home / "spark" / "server.json").read_bytes())["pid"]
            children = Path(f"/proc/{watcher}/task/{watcher}/children").read_text().split()
            (java,) = [
                int(child)
                for child in children
                if Path(f"/proc/{child}/comm").read_text().strip() == "java"
            ]
            os.kill(java, signal.SIGKILL)
    finally:
        SparkServer.ensure(home).stop()


@pytest.mark.soak("kills")
def test_an_ended_session(make_campaign: MakeCampaign, spark_server: SparkAddress) -> None:
    """The run makes a session of its own, stores it for the next one, and delivers on."""
    campaign = make_campaign(by_spark=True, lease_seconds=LEASE_SECONDS)
    with going_on(campaign):
        lease = campaign.store.leases.get(campaign.name)
        assert lease is not None
        ended = lease.session_id
        url = f"{spark_server.remote};user_id=deltaforge;session_id={ended}"
        session = connected(url)
        session.client.release_session()
        session.client.close()

    lease = campaign.store.leases.get(campaign.name)
    assert lease is not None
    assert lease.session_id not in {None, ended}
