"""What `docs/ui.md` says one can click, under a running `deltaforge dev`: each ends well, and has its effect."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import dagster as dg
import psycopg
import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder

from deltaforge_dagster.assets.health import WELL_CHECK
from deltaforge_dagster.assets.names import (
    asset_key,
    health_key,
    job_name,
    maintenance_key,
    partition_key,
    partitions_name,
    schemas_key,
    snapshot_key,
    tables_name,
)
from deltaforge_dagster.pipeline.control.publication import CHANGES
from deltaforge_dagster.processes.process import free_port
from deltaforge_lab.servers.postgres import PostgresServer
from tests.e2e.conftest import Shop
from tests.e2e.deployment import Deployment, eventually
from tests.e2e.webserver import ASSET_JOB, Webserver
from tests.fix_spark import SparkAddress

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.spark,
    pytest.mark.postgres,
    pytest.mark.redis,
    pytest.mark.timeout(1800),
]

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
    store.pipelines.set_desired_state(NAME, "stopped")
    store.close()


def test_what_the_ui_offers(installation: Installation) -> None:
    """Every *Materialize*, backfill, job and reload succeeds, and sinks and sources show what it did."""
    here = installation
    logs = here.deployment.settings.home / "logs"
    for process in ("code-server", "webserver", "daemon"):
        lines = (logs / process / "server.log").read_text().splitlines()
        assert "Stack Trace" not in str(lines[:10]), process
    first = here.change("UPDATE customers SET name = name || '!' WHERE id <= 3")[0]
    second = here.change(
        "DELETE FROM customers WHERE id = 2", "INSERT INTO customers VALUES (99, 'z')"
    )[0]
    ranges(here, first)
    backfills(here, first, second)
    approval(here)
    here.webserver.reload()
    well = dg.AssetCheckKey(health_key(NAME), WELL_CHECK)
    here.ends_well(here.webserver.execute(well))
    maintenance(here)
    retention(here)
    ended = {(run.job_name, run.status) for run in here.deployment.instance.get_runs()}
    assert not [job for job, status in ended if status == dg.DagsterRunStatus.FAILURE]
    status = here.deployment.command("status", "--json")
    assert status.wait() == 0, status.output
    assert json.loads(status.last_line)["pipelines"][0]["problems"] == []


def ranges(here: Installation, first: int) -> None:
    """`changes` is verified; Redis gets a range again, marked; a table has each change once."""
    click, sent = here.webserver, here.events[ROWS:]
    assert [event["op"] for event in sent] == ["u", "u", "u", "d", "c"]
    run = here.ends_well(click.run(ASSET_JOB, [asset_key(NAME, CHANGES)], partition_key(first)))
    shown = here.newest(CHANGES, first)
    assert (shown["verified"], shown["run"]) == (3, run)

    replayed = [{**event, "replay": True} for event in sent[:3]]
    redis = [asset_key(NAME, "redis")]
    here.ends_well(click.run(ASSET_JOB, redis, partition_key(first)))
    assert here.events[ROWS + 5 :] == replayed
    again = {"deltaforge/run": "reprocess"}
    here.ends_well(click.run(job_name(NAME), redis, partition_key(first), tags=again))
    assert here.events[ROWS + 8 :] == replayed

    shown_only = {"deltaforge/run": "preview"}
    changes = [asset_key(NAME, CHANGES)]
    here.ends_well(click.run(job_name(NAME), changes, partition_key(first), tags=shown_only))
    for table in ("copy", "lake"):
        here.ends_well(click.run(ASSET_JOB, [asset_key(NAME, table)], partition_key(first)))
    assert len(here.events) == ROWS + 11
    assert here.equal()


def backfills(here: Installation, first: int, second: int) -> None:
    """Several ranges of every asset, and several chunks of the snapshot, are one run each; so is one chunk alone."""
    click, before = here.webserver, len(here.events)
    one, two, three = (f"{TABLE}/{number:06d}" for number in (1, 2, 3))
    everything = [asset_key(NAME, asset) for asset in (CHANGES, "redis", "copy", "lake")]
    asked = (
        click.begin_backfill(everything, [partition_key(second), partition_key(first)]),
        click.begin_backfill([snapshot_key(NAME)], [two, one]),
    )
    here.ends_well(click.run(ASSET_JOB, [snapshot_key(NAME)], three))
    (replay,), (chunks,) = map(click.backfilled, asked)
    here.ends_well(replay)
    here.ends_well(chunks)
    wait(lambda: len(here.events) == before + 5 + ROWS, what="the rows of the chunks")
    events = here.events[before:]
    replayed = [event for event in events if event["replay"]]
    assert replayed == [{**event, "replay": True} for event in here.events[ROWS : ROWS + 5]]
    read = [event for event in events if not event["replay"]]
    assert {event["op"] for event in read} == {"r"}
    rows = sorted((event["after"] for event in read), key=lambda row: row["id"])
    assert rows == here.rows(here.shop.dsn, "customers")
    wait(here.equal, what="the copies")
    here.ends_well(click.again(replay))
    assert here.events[before + 5 + ROWS :] == replayed


def approval(here: Installation) -> None:
    """Rows of a form that nobody knows wait until its table of `schemas` is materialized."""
    before = len(here.events)
    here.shop.execute(
        "ALTER TABLE customers ADD COLUMN email text",
        "INSERT INTO customers VALUES (200, 'Ada', 'ada@example.com')",
    )
    store = here.deployment.store()
    wait(lambda: store.holds.read(NAME), what="the hold")
    store.close()
    assert len(here.events) == before
    wait(
        lambda: TABLE in here.deployment.instance.get_dynamic_partitions(tables_name(NAME)),
        what="the partition of the table",
    )
    here.ends_well(here.webserver.run(ASSET_JOB, [schemas_key(NAME)], TABLE))
    wait(lambda: len(here.events) == before + 1, what="the row that waited")
    assert here.events[-1]["after"] == {"id": 200, "name": "Ada", "email": "ada@example.com"}
    wait(here.equal, what="the copies")


def maintenance(here: Installation) -> None:
    """The tables of the lake have one file afterwards, and the same rows."""
    folder = here.lake / "public" / "customers"
    assert len(DeltaTable(folder).file_uris()) > 1
    here.ends_well(here.webserver.run(ASSET_JOB, [maintenance_key(NAME, "lake")]))
    assert len(DeltaTable(folder).file_uris()) == 1
    assert here.equal()


def retention(here: Installation) -> None:
    """Once the file says that nothing is kept, the job removes all ranges with their files and partitions."""
    file = here.deployment.pipelines / f"{NAME}.yaml"
    text = file.read_text()
    file.write_text(f"{text}    journal: {{retention_hours: 0}}\n")
    here.change("INSERT INTO customers VALUES (300, 'Grace', NULL)")
    here.ends_well(here.webserver.run("deltaforge_retention"))
    assert here.closed() == []
    journal = here.deployment.folder / "home" / "journal"
    assert list(journal.rglob("*.parquet")) == []
    assert list(here.deployment.instance.get_dynamic_partitions(partitions_name(NAME))) == []
