"""What `docs/ui.md` says one can click, under a running `deltaforge dev`: each ends well, and has its effect."""

from __future__ import annotations

import json
import shlex
from typing import Any

import dagster as dg
import psycopg
import pytest
from deltalake import DeltaTable

from deltaforge_dagster.assets.names import (
    asset_key,
    health_key,
    job_name,
    lake_table_key,
    maintenance_key,
    partition_key,
    partitions_name,
    schemas_key,
    snapshot_key,
    tables_name,
)
from deltaforge_dagster.assets.pipeline import WELL_CHECK
from deltaforge_dagster.assets.reconcile import (
    RECONCILED,
    reconcile_job_name,
    reconcile_op_name,
)
from deltaforge_dagster.pipeline.control.closed_ranges import CHANGES
from deltaforge_dagster.sensors.report import newest_evaluation
from tests.e2e.webserver import ASSET_JOB
from tests.journeys.installation import NAME, ROWS, TABLE, Installation, wait

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.spark,
    pytest.mark.postgres,
    pytest.mark.redis,
    pytest.mark.timeout(1800),
]


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
    comparison(here)
    retention(here)
    ended = {(run.job_name, run.status) for run in here.deployment.instance.get_runs()}
    assert not [job for job, status in ended if status == dg.DagsterRunStatus.FAILURE]
    status = here.deployment.command("status", "--json")
    assert status.wait() == 0, status.output
    assert json.loads(status.last_line)["pipelines"][0]["problems"] == []
    removal(here)


def slots(dsn: str) -> list[str]:
    """Return the names of a database's slots."""
    query = (
        "SELECT slot_name FROM pg_replication_slots WHERE database = current_database() ORDER BY 1"
    )
    with psycopg.connect(dsn) as connection:
        return [str(name) for (name,) in connection.execute(query)]


def removal(here: Installation) -> None:
    """A deleted file is a failed pipeline; what `status` prints then takes it away, and sinks keep what they have."""
    sent, copies = here.events, here.copies()
    (here.deployment.pipelines / f"{NAME}.yaml").unlink()

    def problems() -> list[dict[str, Any]]:
        status = here.deployment.command("status", "--json")
        status.wait()
        (shown,) = json.loads(status.last_line)["pipelines"]
        return list(shown["problems"]) if shown["status"] == "failed" else []

    (problem,) = wait(problems, what="the failure")
    (slot,) = slots(here.shop.dsn)
    assert f"replication slot '{slot}' of " in problem["text"]
    assert " of log (measured " in problem["text"]
    password = psycopg.conninfo.conninfo_to_dict(here.shop.dsn)["password"]
    here.deployment.environment["PGPASSWORD"] = str(password)
    (remedy,) = problem["remedy"]
    removed = here.deployment.command(*shlex.split(remedy)[1:], "--yes")
    assert removed.wait() == 0, removed.output
    assert slots(here.shop.dsn) == []
    wait(lambda: asset_key(NAME, CHANGES) not in here.webserver.assets(), what="the reload")
    instance = here.deployment.instance
    wait(lambda: not instance.get_asset_keys([NAME]), what="the end of its assets")
    assert here.events == sent
    assert here.copies() == copies


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


def comparison(here: Installation) -> None:
    """A row that is gone from a table is missing until the job is told to repair it."""
    table = {
        sink: dg.AssetCheckKey(lake_table_key(NAME, sink, ("public", "customers")), RECONCILED)
        for sink in ("copy", "lake")
    }

    def shown(sink: str) -> tuple[bool, str | None]:
        evaluation = newest_evaluation(here.deployment.instance, table[sink])
        assert evaluation is not None
        return evaluation.passed, evaluation.description

    with psycopg.connect(here.copy) as connection:
        connection.execute("DELETE FROM copied.customers WHERE id = 3")
    here.ends_well(here.webserver.execute(table["copy"]))
    assert shown("copy") == (False, "DIFFERS: 1 missing")
    repairs = {"ops": {reconcile_op_name(NAME): {"config": {"repair": True}}}}
    here.ends_well(here.webserver.run(reconcile_job_name(NAME), config=repairs))
    assert shown("copy") == (True, "repaired: DIFFERS: 1 missing; equal")
    assert shown("lake") == (True, "equal")
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
