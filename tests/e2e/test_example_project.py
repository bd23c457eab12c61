"""The example `dagster_project`: rows change in PostgreSQL, and a dbt model and a Python asset follow.

Its dependencies that are not ours are installed from PyPI, into an environment that falls back to
the packages of this one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import dagster as dg
import duckdb
import psycopg
import pytest

from deltaforge_dagster.installation.process import free_port
from deltaforge_lab.servers.postgres import PostgresServer
from tests.e2e.deployment import Deployment, eventually
from tests.e2e.test_daemon import started
from tests.journeys.browser import Browser

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.spark,
    pytest.mark.postgres,
    pytest.mark.soak("dagster"),
    pytest.mark.timeout(3600),
]

EXAMPLE = Path(__file__).parents[2] / "examples" / "dagster_project"
REVENUE, LARGEST = dg.AssetKey(["revenue"]), dg.AssetKey(["largest_order"])


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the example's dependencies."""
    environment = tmp_path_factory.mktemp("environment")
    python = environment / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    # Our package is installed there by a file of `site`, too.
    path = sysconfig.get_path("purelib")
    (packages / "locked.pth").write_text(f"import site; site.addsitedir({path!r})\n")
    dbt = version("dagster").replace("1.13.", "0.29.")
    needed = [f"dagster-dbt=={dbt}", "dbt-core>=1.10,<1.11", "dbt-duckdb>=1.10,<1.11"]
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--no-warn-conflicts", *needed], check=True
    )
    for program in ("dg", "dagster"):  # of this environment's packages, with that Python
        text = (Path(sys.executable).parent / program).read_text()
        (python.parent / program).write_text(f"#!{python}\n{text.partition(chr(10))[2]}")
        (python.parent / program).chmod(0o755)
    return python


@pytest.fixture
def dsn(postgres_server: PostgresServer) -> Iterator[str]:
    """A database with the example's two tables; its replication slot is dropped at the end."""
    dsn = postgres_server.create_database()
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE customers (id bigint PRIMARY KEY, name text)")
        connection.execute(
            "CREATE TABLE orders (id bigint PRIMARY KEY, customer bigint, cents bigint)"
        )
    yield dsn
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots"
            " WHERE database = current_database() AND active"
        )
        connection.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
            " WHERE database = current_database() AND NOT active"
        )


def test_a_model_and_an_asset_follow_the_rows(
    python: Path, dsn: str, deploy: Callable[..., Deployment]
) -> None:
    """Each change is in the model's rows and in the asset's metadata, without a click.

    The tests of the example pass. The instance has no setting but where it is.
    """
    deployment = deploy(dagster_yaml="telemetry: {enabled: false}\n")
    project, lake = deployment.folder / "project", deployment.folder / "lake"
    shutil.copytree(EXAMPLE, project)
    environment = {
        "LAKE": str(lake),
        "PATH": f"{python.parent}:/usr/bin:/bin",
        "POSTGRES_DSN": dsn,
        "PYTHONPATH": str(project / "src"),
        "VIRTUAL_ENV": str(python.parents[1]),
    }
    tests = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"],
        check=False, capture_output=True, text=True, cwd=project,
        env={**deployment.variables, **environment},
    )  # fmt: skip
    assert tests.returncode == 0, tests.stdout[-9000:]

    def rows() -> list[tuple[str, int, int]]:
        try:
            return duckdb.sql(
                f"SELECT name, orders, cents FROM '{lake}/reports/revenue.parquet' ORDER BY name"
            ).fetchall()
        except duckdb.Error:  # not made yet, or just being made
            return []

    def largest() -> tuple[object, ...]:
        event = deployment.instance.get_latest_materialization_event(LARGEST)
        metadata = (
            {}
            if event is None or event.asset_materialization is None
            else event.asset_materialization.metadata
        )
        return tuple(value.value for _, value in sorted(metadata.items()))

    port = free_port()
    deployment.spawn(
        "-m", "dagster", "dev", "-m", "shop.definitions", "-d", str(project), "--port", str(port),
        more=environment, python=python,
    )  # fmt: skip
    eventually(lambda: started(deployment, "shop-raw"), seconds=900, what="the first tick")
    for statements, revenue, order in (
        (
            ["INSERT INTO customers VALUES (1, 'Ada'), (2, 'Grace')",
             "INSERT INTO orders VALUES (1, 1, 1200), (2, 1, 800), (3, 2, 500)"],
            [("Ada", 2, 2000), ("Grace", 1, 500)], (1200, 1),
        ),
        (
            ["UPDATE orders SET cents = 9000 WHERE id = 3", "DELETE FROM orders WHERE id = 2",
             "UPDATE customers SET name = 'Ada L' WHERE id = 1"],
            [("Ada L", 1, 1200), ("Grace", 1, 9000)], (9000, 3),
        ),
    ):  # fmt: skip
        with psycopg.connect(dsn) as connection:
            for statement in statements:
                connection.execute(statement)
        eventually(lambda: rows() == revenue, seconds=900, what=f"the model of {revenue}")  # noqa: B023
        eventually(lambda: largest() == order, seconds=900, what=f"the order {order}")  # noqa: B023
        assert deployment.instance.get_latest_materialization_event(REVENUE) is not None
    if pictures := os.environ.get("DELTAFORGE_PICTURES"):  # with `make pictures`
        with Browser.started(deployment.folder / "profile") as browser:
            page = "assets/revenue?view=lineage&lineageScope=upstream&lineageDepth=5"
            browser.open(f"http://127.0.0.1:{port}/{page}")
            browser.click("Skip")  # Dagster's invitation
            browser.shows("revenue", "customers", "orders")
            browser.picture(Path(pictures) / "project-lineage.png")
