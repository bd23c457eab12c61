"""A sink that was down catches up in order, while its sibling has everything already.

Dagster's storage and the state store are in PostgreSQL, as in `docker/`: that of many machines.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import dagster as dg
import psycopg
import pytest

from deltaforge_lab.servers.postgres import PostgresServer
from tests.e2e.conftest import Shop
from tests.e2e.deployment import Deployment, eventually
from tests.e2e.test_daemon import ops, started
from tests.fix_redis import StartRedis

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.spark,
    pytest.mark.postgres,
    pytest.mark.redis,
    pytest.mark.soak("dagster"),
]

DAGSTER_YAML = Path(__file__).parents[2] / "docker" / "dagster.yaml"
QUICK = "{idle_seconds: 4, lease_seconds: 20, renew_seconds: 1}"


def ids(path: Path) -> list[tuple[str, object]]:
    """Return (op, id) of each line of a file sink."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    events = [json.loads(line) for line in lines if line.endswith("\n")]  # the rest is coming
    return [(event["op"], (event["after"] or event["before"])["id"]) for event in events]


def ended_runs(deployment: Deployment, pipeline: str) -> list[dg.DagsterRun]:
    """Return the live runs that have ended, oldest first."""
    runs = [record.dagster_run for record in deployment.live_runs(pipeline)]
    return [run for run in runs if run.is_finished]


def table_rows(dsn: str, table: str) -> int:
    """Count a table's rows."""
    with psycopg.connect(dsn) as connection:
        (count,) = connection.execute(f"SELECT count(*) FROM {table}").fetchone() or (0,)
    return int(count)


def test_a_sink_that_was_down_catches_up(
    shop: Shop,
    start_redis: StartRedis,
    postgres_server: PostgresServer,
    deploy: Callable[..., Deployment],
    tmp_path: Path,
) -> None:
    """While Redis is down the file has everything, and the run counts as a success.

    The source is idle when Redis comes back: the sensor starts a run because a sink is behind,
    which delivers every change in order, publishes its ranges, and lets its check pass again. All that both
    know is in PostgreSQL, and nothing in SQLite.
    """
    server = start_redis({"appendonly": "yes"})
    own = Shop(shop.dsn, server.uri)
    lines = tmp_path / "lines.jsonl"
    dagster, state = postgres_server.create_database(), postgres_server.create_database()
    deployment = deploy(
        dagster_yaml=DAGSTER_YAML.read_text(),
        state_url=state,
        environment={"DAGSTER_POSTGRES_URL": dagster.replace("postgres", "postgresql+psycopg2", 1)},
    )
    more = f"    - {{type: file, config: {{id: lines, path: {lines}}}}}\n"
    deployment.add("pair", own.pipeline("pair", run=QUICK, more_sinks=more))
    deployment.start()
    eventually(lambda: started(deployment, "pair"), what="the first tick")
    store = deployment.store()

    own.execute("INSERT INTO customers VALUES (1, 'Ada')")
    eventually(lambda: ops(own, "pair.customers") == [("c", 1)], what="the first delivery")
    server.stop()
    own.execute("INSERT INTO customers VALUES (2, 'Grace')")
    eventually(lambda: ("c", 2) in ids(lines), what="the delivery to the file")
    own.execute("UPDATE customers SET name = 'Grace H' WHERE id = 2", "DELETE FROM customers")
    expected = [("c", 1), ("c", 2), ("u", 2), ("d", 1), ("d", 2)]
    eventually(lambda: ids(lines) == expected, what="everything in the file")
    failing = eventually(
        lambda: (
            (shown := deployment.check("pair", "redis", "delivered")) and not shown.passed and shown
        ),
        what="the failing check",
    )
    assert "behind, range" in str(failing.description)
    eventually(lambda: ended_runs(deployment, "pair"), what="the end of the run")
    assert ended_runs(deployment, "pair")[0].is_success, "one sink of two is no failed run"
    sibling = deployment.check("pair", "lines", "delivered")
    assert sibling is not None
    assert sibling.passed
    last = max(row.range for row in store.ranges.read("pair"))
    assert deployment.materializations("pair", "lines", last)
    assert not deployment.materializations("pair", "redis", last)
    behind = store.checkpoints.read("pair")["redis"]
    assert behind.failures > 0
    assert behind.last_error

    server.restart()
    eventually(lambda: ops(own, "pair.customers") == expected, what="the catch-up")
    eventually(lambda: deployment.materializations("pair", "redis", last), what="publication")
    eventually(
        lambda: (shown := deployment.check("pair", "redis", "delivered")) and shown.passed,
        what="the check",
    )

    assert ids(lines) == expected, "the sibling got nothing twice"
    reasons = [
        record.dagster_run.tags["deltaforge/reason"] for record in deployment.live_runs("pair")
    ]
    assert set(reasons) == {"changes", "sink behind"}
    assert reasons == sorted(reasons), "once the source is idle, every run is for the sink"
    assert [row.range for row in store.ranges.read("pair")] == [*range(1, last + 1)], (
        "no range for it"
    )
    checkpoint = store.checkpoints.read("pair")["redis"]
    assert (checkpoint.failures, checkpoint.last_error) == (0, None)
    for check in ("contiguity", "agreement", "source"):
        shown = deployment.check("pair", "changes", check)
        assert shown is not None, check
        assert shown.passed, shown.description
    store.close()
    assert table_rows(dagster, "runs") == len(reasons)
    assert table_rows(state, "range") == last
    assert [path for path in deployment.folder.rglob("*.db") if path.is_file()] == []
