"""What journeys under `deltaforge dev` share: one installation with one pipeline to three kinds of sinks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder

from deltaforge_dagster.assets.names import asset_key
from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.installation.process import free_port
from deltaforge_dagster.pipeline.control.closed_ranges import CHANGES
from deltaforge_lab.servers.postgres import PostgresServer
from tests.e2e.conftest import Shop
from tests.e2e.deployment import Deployment, eventually
from tests.e2e.webserver import Webserver
from tests.fix_spark import SparkAddress

NAME = "shop"
STREAM = f"{NAME}.customers"
TABLE = "public.customers"
CHUNK = 10
ROWS = 25

SINKS = """\
    - {{type: postgres, config: {{id: copy, dsn: "{copy}", table: "copied.${{source.table}}", commit_seconds: 0.5}}}}
    - {{type: delta, config: {{id: lake, path: "{lake}", commit_seconds: 0.5, maintenance: {{small_files: 2}}}}}}
"""

wait = partial(eventually, seconds=600.0)


@dataclass
class Installation:
    """A running `deltaforge dev` with one pipeline, from a table with rows to Redis, PostgreSQL and Delta.

    Attributes:
        shop: The source and Redis.
        deployment: Its folder.
        webserver: Its UI.
        copy: The database with the sink's tables.
        lake: The folder with the sink's tables.
    """

    shop: Shop
    deployment: Deployment
    webserver: Webserver
    copy: str
    lake: Path

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events in Redis, in order; `replay` says that one is marked as such."""
        return [
            {**json.loads(fields["df-event"]), "replay": "df-replay" in fields}
            for fields in self.shop.entries(STREAM)
        ]

    def rows(self, dsn: str, table: str) -> list[dict[str, Any]]:
        """Return the rows of a table in PostgreSQL, without the sink's own columns."""
        with psycopg.connect(dsn, row_factory=psycopg.rows.dict_row) as connection:
            found = connection.execute(f"SELECT * FROM {table} ORDER BY id").fetchall()
        return [plain(row) for row in found]

    def copies(self) -> dict[str, list[dict[str, Any]]]:
        """Return what the tables of each sink have now; nothing of one that does not exist yet."""
        made: dict[str, list[dict[str, Any]]] = {"copy": [], "lake": []}
        with suppress(psycopg.errors.UndefinedTable):
            made["copy"] = self.rows(self.copy, "copied.customers")
        folder = self.lake / "public" / "customers"
        if DeltaTable.is_deltatable(str(folder)):
            query = (
                QueryBuilder()
                .register("t", DeltaTable(folder))
                .execute("SELECT * FROM t ORDER BY id")
            )
            made["lake"] = [plain(row) for row in pa.table(query.read_all()).to_pylist()]
        return made

    def equal(self) -> bool:
        """Return whether both copies equal the source."""
        source = self.rows(self.shop.dsn, "customers")
        return all(rows == source for rows in self.copies().values())

    def closed(self) -> list[int]:
        """Return the numbers of the ranges that are closed."""
        store = self.deployment.store()
        try:
            return [row.range for row in store.ranges.read(NAME, state="closed")]
        finally:
            store.close()

    def change(self, *statements: str) -> list[int]:
        """Change rows; return once all sinks have them and their ranges are closed and shown, with those ranges."""
        before = self.closed()
        self.shop.execute(*statements)
        wait(self.equal, what=f"the copies after {statements}")
        ranges = wait(
            lambda: sorted({*self.closed()} - {*before}), what=f"the range of {statements}"
        )
        for number in ranges:
            for asset in (CHANGES, "redis", "copy", "lake"):
                wait(
                    partial(self.deployment.materializations, NAME, asset, number),
                    what=f"range {number} of {asset}",
                )
        return list(ranges)

    def newest(self, asset: str, number: int) -> dict[str, Any]:
        """Return the metadata of the newest materialization of a range."""
        return self.deployment.materializations(NAME, asset, number)[0]

    def ends_well(self, run_id: str) -> str:
        """Check that a run has succeeded; return its id."""
        status = self.webserver.status(run_id)
        said = [entry.message for entry in self.deployment.instance.all_logs(run_id)]
        assert status == "SUCCESS", "\n".join(said)
        return run_id


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row without the columns that sinks add."""
    return {name: value for name, value in row.items() if not name.startswith("df_")}


@pytest.fixture
def installation(
    shop: Shop,
    deploy: Callable[..., Deployment],
    spark_server: SparkAddress,
    postgres_server: PostgresServer,
) -> Iterator[Installation]:
    """One whose first snapshot every sink has, and whose live run goes on."""
    shop.execute(f"INSERT INTO customers SELECT n, 'name ' || n FROM generate_series(1, {ROWS}) n")
    # `dev` would end a Spark server of its own; the tests' one is named to it.
    deployment = deploy(SparkAddress(spark_server.remote, None))
    copy, lake = postgres_server.create_database(), deployment.folder / "lake"
    text = shop.pipeline(
        NAME,
        tables=f"[{TABLE}]\n      snapshot: {{mode: initial, chunk_size: {CHUNK}}}",
        more_sinks=SINKS.format(copy=copy, lake=lake),
        run="{idle_seconds: 600, lease_seconds: 20, renew_seconds: 1}",
        range_="{max_seconds: 2}",
        dagster="{sensor_interval_seconds: 5}",  # a tick is work, and the run is there
    )
    deployment.add(NAME, f"{text}    schemas: {{on_schema_change: pause_table}}\n")
    port = free_port()
    process = deployment.spawn("-m", "deltaforge_dagster", "dev", "--port", str(port))
    wait(lambda: "Press Ctrl-C" in deployment.output(process), what="the UI")
    webserver = Webserver(f"http://127.0.0.1:{port}", location="deltaforge_dagster")
    assert asset_key(NAME, CHANGES) in webserver.assets()  # as soon as `dev` says so
    made = Installation(shop, deployment, webserver, copy, lake)
    wait(lambda: len(made.events) == ROWS and made.equal(), what="the snapshot")
    yield made
    store = deployment.store()
    with suppress(NotAllowed):  # a journey may have removed it
        store.pipelines.set_desired_state(NAME, "stopped")
    store.close()
