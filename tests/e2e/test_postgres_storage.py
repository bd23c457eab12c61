"""Many machines: Dagster's storage and the state store in PostgreSQL, as in `docker/`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import psycopg
import pytest

from deltaforge_dagster.servers.postgres import PostgresServer
from tests.e2e.conftest import Shop
from tests.e2e.deployment import Deployment, eventually
from tests.e2e.test_daemon import ops, started

pytestmark = [pytest.mark.e2e, pytest.mark.spark, pytest.mark.postgres, pytest.mark.redis]

DAGSTER_YAML = Path(__file__).parents[2] / "docker" / "dagster.yaml"


def table_rows(dsn: str, table: str) -> int:
    """Count a table's rows."""
    with psycopg.connect(dsn) as connection:
        (count,) = connection.execute(f"SELECT count(*) FROM {table}").fetchone() or (0,)
    return int(count)


@pytest.mark.timeout(900)
def test_everything_in_postgresql(
    shop: Shop, postgres_server: PostgresServer, deploy: Callable[..., Deployment]
) -> None:
    """Rows arrive, ranges are published, checks pass, and nothing is kept in SQLite."""
    dagster = postgres_server.create_database()
    state = postgres_server.create_database()
    deployment = deploy(
        dagster_yaml=DAGSTER_YAML.read_text(),
        state_url=state,
        environment={"DAGSTER_POSTGRES_URL": dagster.replace("postgres", "postgresql+psycopg2", 1)},
    )
    deployment.add("central", shop.pipeline("central"))
    deployment.start()
    eventually(lambda: started(deployment, "central"), what="the first tick")

    shop.execute(
        "INSERT INTO customers VALUES (1, 'Ada'), (2, 'Grace')",
        "UPDATE customers SET name = 'Grace H' WHERE id = 2",
    )
    eventually(lambda: len(ops(shop, "central.customers")) == 3, what="the delivery")
    (changes,) = eventually(lambda: deployment.materializations("central", "changes", 1))
    eventually(lambda: deployment.materializations("central", "redis", 1), what="publication")
    delivered = eventually(lambda: deployment.check("central", "redis", "delivered"))

    assert ops(shop, "central.customers") == [("c", 1), ("c", 2), ("u", 2)]
    assert (changes["events"], changes["events/u"]) == (3, 1)
    assert delivered.passed
    for check in ("contiguity", "agreement", "source"):  # one event after the other
        shown = eventually(partial(deployment.check, "central", "changes", check), what=check)
        assert shown.passed, shown.description
    assert table_rows(dagster, "runs") >= 1
    assert table_rows(state, "range") == 1
    assert [path for path in deployment.folder.rglob("*.db") if path.is_file()] == []
