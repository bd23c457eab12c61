"""A pipeline in somebody's own Dagster project, beside what else it has."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import dagster as dg
import psycopg
import pytest

from deltaforge_dagster.assets.names import partition_key
from deltaforge_dagster.installation.java import find_java
from deltaforge_dagster.installation.process import free_port
from deltaforge_lab.servers.postgres import PostgresServer
from tests.e2e.deployment import Deployment, eventually
from tests.e2e.test_daemon import started
from tests.e2e.webserver import ASSET_JOB, Webserver

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

PYPROJECT = """\
[project]
name = "shop-project"
version = "0.1.0"
requires-python = ">=3.11,<3.14"
dependencies = ["dagster", "deltaforge-dagster"]

[tool.dg]
directory_type = "project"

[tool.dg.project]
root_module = "shop_project"
registry_modules = ["shop_project.components.*"]
"""
DEFINITIONS = """\
from pathlib import Path

from dagster import definitions, load_from_defs_folder


@definitions
def defs():
    return load_from_defs_folder(path_within_project=Path(__file__).parent)
"""
COMPONENT = """\
type: deltaforge_dagster.PipelineComponent
attributes:
  metadata: {{name: orders, tenant: acme}}
  spec:
    source:
      type: postgres
      config:
        id: shop
        dsn: "{{{{ env.SHOP_DSN }}}}"
        slot: project_{unique}
        publication: project_{unique}
        tables: [public.customers]
    sinks:
      - {{type: file, config: {{id: lines, path: "{lines}"}}}}
    engine:
      range: {{max_seconds: 3}}
      run: {{idle_seconds: 4}}
  translation:
    all: {{group_name: ingest}}
    changes: {{key: "cdc/{{{{ pipeline }}}}"}}
    sinks: {{key: "out/{{{{ sink }}}}"}}
"""
ASSET = """\
import dagster as dg


@dg.asset(deps=[dg.AssetKey(["out", "lines"])])
def report() -> None:
    pass
"""
ROOT = Path(__file__).parents[2]
MODULE = "shop_project.definitions"
CHANGES, LINES = dg.AssetKey(["cdc", "orders"]), dg.AssetKey(["out", "lines"])


@pytest.fixture
def dsn(postgres_server: PostgresServer) -> Iterator[str]:
    """A database with one table; its replication slot is dropped at the end."""
    made = postgres_server.create_database()
    with psycopg.connect(made, autocommit=True) as connection:
        connection.execute("CREATE TABLE customers (id bigint PRIMARY KEY, name text)")
    yield made
    with psycopg.connect(made, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots"
            " WHERE database = current_database() AND active"
        )
        connection.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
            " WHERE database = current_database() AND NOT active"
        )


def insert(dsn: str, number: int) -> None:
    """Write a row; it is durable when this returns."""
    with psycopg.connect(dsn) as connection:
        connection.execute("SET LOCAL synchronous_commit = on")
        connection.execute("INSERT INTO customers VALUES (%s, 'Ada')", [number])


def create(folder: Path, dsn: str, lines: Path) -> None:
    """Lay out a project as `create-dagster` does, with a pipeline and an asset of its own."""
    package = folder / "src" / "shop_project"
    component = COMPONENT.format(unique=dsn.rpartition("/")[2].lower()[-20:], lines=lines)
    for path, text in {
        folder / "pyproject.toml": PYPROJECT,
        package / "__init__.py": "",
        package / "definitions.py": DEFINITIONS,
        package / "components" / "__init__.py": "",
        package / "defs" / "__init__.py": "",
        package / "defs" / "report.py": ASSET,
        package / "defs" / "orders" / "defs.yaml": component,
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def delivered(lines: Path) -> list[int]:
    """Return the ids of the rows that the sink has, in order."""
    if not lines.exists():
        return []
    whole = lines.read_text().rpartition("\n")[0].splitlines()
    return [json.loads(line)["after"]["id"] for line in whole]


@pytest.mark.e2e
@pytest.mark.soak("dagster")
@pytest.mark.timeout(3600)
def test_the_commands_of_the_page(dsn: str, deploy: Callable[..., Deployment]) -> None:
    """In an empty folder, as they stand in docs/dagster.md: the first row is delivered.

    Only what differs by machine is replaced: the checkout, the Python, the database and the port.
    """
    page = (ROOT / "docs" / "dagster.md").read_text()
    commands = page.partition("```sh\n")[2].partition("```")[0]
    for written, here in {
        "~/deltaforge_dagster": str(ROOT),
        "--python 3.12": f"--python {sys.executable}",
        "postgres://deltaforge:secret@localhost:5432/shop": dsn,
        "dg dev": f"dg dev --port {free_port()}",
    }.items():
        assert written in commands
        commands = commands.replace(written, here)
    lines = Path("/tmp/orders.jsonl")
    lines.unlink(missing_ok=True)
    deployment = deploy(dagster_yaml="telemetry: {enabled: false}\n")
    environment = {"JAVA_HOME": str(find_java()), "VIRTUAL_ENV": ""}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    deployment.spawn("-ec", commands, more=environment, python="bash")

    eventually(lambda: started(deployment, "orders"), seconds=1800, what="the first tick")
    insert(dsn, 1)
    eventually(lambda: delivered(lines) == [1], seconds=600, what="the row")
    lines.unlink()


@pytest.mark.e2e
def test_dagster_dev_in_a_project(dsn: str, deploy: Callable[..., Deployment]) -> None:
    """`dagster dev` alone, with an instance that has no setting of ours: a row arrives.

    Its range is shown at the keys of the translation, where a Materialize delivers it again under
    Dagster's own executor, with a process for each step.
    """
    deployment = deploy(dagster_yaml="telemetry: {enabled: false}\n")
    lines = deployment.folder / "lines.jsonl"
    create(deployment.folder, dsn, lines)
    port = free_port()
    deployment.spawn(
        *("-m", "dagster", "dev", "-m", MODULE, "--port", str(port)),
        more={"PYTHONPATH": str(deployment.folder / "src"), "SHOP_DSN": dsn},
    )
    eventually(lambda: started(deployment, "orders"), seconds=600, what="the first tick")

    insert(dsn, 1)

    eventually(lambda: delivered(lines) == [1], seconds=600, what="the row")
    for key in (CHANGES, LINES):
        eventually(
            partial(deployment.instance.get_latest_materialization_event, key),
            seconds=600,
            what=f"the range of {key.to_user_string()}",
        )
    webserver = Webserver(f"http://127.0.0.1:{port}", location=MODULE)
    clicked = webserver.run(ASSET_JOB, [CHANGES, LINES], partition_key(1))
    assert webserver.status(clicked) == "SUCCESS"
    assert delivered(lines) == [1]
    assert delivered(lines.with_name(f"{lines.name}.replay-{clicked}")) == [1]
