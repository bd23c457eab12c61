"""PostgreSQL cuts connections, crashes and comes back under load, with runs being killed."""

from __future__ import annotations

import psycopg
import pytest

from deltaforge_lab.servers.postgres import PostgresServer
from tests.fix_postgres import StartPostgres
from tests.kills.cells import POSTGRES_TO_REDIS
from tests.kills.conftest import MakeCampaign
from tests.kills.databases import PostgresDatabase

pytestmark = POSTGRES_TO_REDIS

CUT = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"


@pytest.fixture
def server(start_postgres: StartPostgres) -> PostgresServer:
    """A server of the test's own."""
    return start_postgres()


@pytest.fixture
def postgres_end(server: PostgresServer) -> PostgresDatabase:
    """A database that goes with its server."""
    return PostgresDatabase(server.create_database())


@pytest.mark.soak("kills")
def test_connections_are_cut(make_campaign: MakeCampaign, server: PostgresServer) -> None:
    """Readers and writers are thrown out again and again: nothing is lost, nothing forgotten early.

    Also when a run is killed at the same moment.
    """
    campaign = make_campaign()
    with campaign.under_load():
        run = campaign.begin_and_deliver()
        for number in range(6):
            run.process.join(campaign.rng.uniform(0, 1.5))
            with psycopg.connect(server.dsn) as connection:
                connection.execute(f"{CUT} AND backend_type IN ('walsender', 'client backend')")
            if number % 2:
                run.process.kill()
                campaign.wait(run, "SIGKILL")
            run = campaign.deliver_more(run)
        campaign.end(run)
    campaign.catch_up()
    campaign.check()


def test_the_server_crashes(make_campaign: MakeCampaign, server: PostgresServer) -> None:
    """After a crash and its recovery everything committed arrives; twice, one of them with a kill."""
    campaign = make_campaign()
    with campaign.under_load():
        run = campaign.begin_and_deliver()
        for number in range(2):
            run.process.join(campaign.rng.uniform(0, 1.5))
            server.stop(immediate=True)
            if number:
                run.process.kill()
                campaign.wait(run, "SIGKILL")
            server.restart()
            run = campaign.deliver_more(run)
        campaign.end(run)
    campaign.catch_up()
    campaign.check()
