"""A pipeline begins while a transaction is open on the server, which a new replication slot waits for."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import psycopg
import pytest
from psycopg import conninfo

from deltaforge_dagster.installation.process import free_port
from tests.e2e.conftest import Shop
from tests.e2e.deployment import Deployment, eventually

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.postgres,
    pytest.mark.redis,
    pytest.mark.timeout(1800),
]

NAME = "shop"
RUN = ("run", NAME, "--until-caught-up")


def ended(deployment: Deployment, *arguments: str) -> tuple[int, str]:
    """Execute a command; return its exit code and what it printed, with a blank for each line break."""
    process = deployment.spawn("-m", "deltaforge_dagster", *arguments)
    return process.wait(600), " ".join(deployment.output(process).split())


def held(*, seconds: list[int]) -> list[object]:
    """Return parameters: as long as it takes to be said, and for so many seconds, by `run` and under `dev`."""
    soak = pytest.mark.soak("faults")
    parts: list[object] = [pytest.param("run", None, False)]
    for how in ("run", "dev"):
        parts += [
            pytest.param(how, number, here, marks=soak)
            for number in seconds
            for here in (True, False)
        ]
    return parts


@pytest.mark.parametrize(("how", "seconds", "here"), held(seconds=[1, 3, 30]))
def test_a_pipeline_begins_while_a_transaction_is_open(
    deploy: Callable[..., Deployment], shop: Shop, how: str, seconds: int | None, here: bool
) -> None:
    """It says what it waits for, begins where its slot does, and captures what is committed from then on."""
    deployment = deploy()
    deployment.add(NAME, shop.pipeline(NAME))
    dsn = shop.dsn if here else conninfo.make_conninfo(shop.dsn, dbname="postgres")
    store = deployment.store()

    def start() -> str | None:
        row = store.pipelines.get(NAME)
        return None if row is None else row.start_position

    with psycopg.connect(dsn) as other, psycopg.connect(shop.dsn, autocommit=True) as admin:
        other.execute("SELECT txid_current()")
        arguments = RUN if how == "run" else ("dev", "--port", str(free_port()))
        process = deployment.spawn("-m", "deltaforge_dagster", *arguments)
        slots = "SELECT FROM pg_replication_slots WHERE database = current_database()"
        eventually(lambda: admin.execute(slots).rowcount, what="the slot that is being made")
        if seconds is None:
            waits = f"process {other.info.backend_pid} (database {other.info.dbname}"
            eventually(lambda: waits in deployment.output(process), what="the message")
            # A slot waits for one transaction after the other, and other tests use this server, too.
            eventually(lambda: waits in ended(deployment, "status", NAME)[1], what="the warning")
        else:
            time.sleep(seconds)
        assert start() is None
        other.rollback()
        eventually(start, what="the start")
        if how == "run":
            assert process.wait(600) == 0, deployment.output(process)

    shop.execute("INSERT INTO customers VALUES (1, 'a')")
    if how == "run":
        code, output = ended(deployment, *RUN)
        assert code == 0, output
    eventually(lambda: shop.entries(f"{NAME}.customers"), what="the change")
    (entry,) = shop.entries(f"{NAME}.customers")
    assert json.loads(entry["df-event"])["after"] == {"id": 1, "name": "a"}
    store.close()
