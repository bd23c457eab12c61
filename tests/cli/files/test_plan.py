"""Tests of `deltaforge plan`: what a file means, and what it would change."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deltaforge_dagster.cli.main import app
from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.pipeline.control.work import register
from deltaforge_dagster.state.store import StateStore
from tests.config.conftest import Write, write
from tests.state.make import expire, position

__all__ = ["write"]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StateStore]:
    """The state store of an installation."""
    monkeypatch.setenv("DELTAFORGE_HOME", str(tmp_path / "home"))
    opened = StateStore.open(f"sqlite:///{tmp_path}/home/state.db")
    yield opened
    opened.close()


def planned(path: Path) -> dict[str, Any]:
    """Return what `deltaforge plan --json` prints."""
    result = CliRunner().invoke(app, ["plan", str(path), "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "geheim" not in result.output
    return dict(json.loads(result.output))


def shown(path: Path) -> str:
    """Return what `deltaforge plan` prints."""
    result = CliRunner().invoke(app, ["plan", str(path)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "geheim" not in result.output
    return result.output


def test_hooks_have_a_sensor(write: Write, store: StateStore) -> None:
    """If the file has hooks, the created sensors include the one for alerts."""
    assert store.pipelines.get("orders") is None
    hook = {"type": "webhook", "url": "https://ops.example/hooks"}
    quiet = write({})
    assert "deltaforge_alerts" not in planned(quiet)["creates"]["dagster"]["sensors"]
    told = write({"spec.engine.alerts": [hook]})
    assert "deltaforge_alerts" in planned(told)["creates"]["dagster"]["sensors"]
    assert "deltaforge_alerts" in shown(told)


def test_a_new_pipeline(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan shows every default and every created name; no state store is created."""
    monkeypatch.setenv("DELTAFORGE_HOME", str(tmp_path / "none"))
    kafka = {"brokers": "h:1", "topic": "${source.schema}.${source.table}.${op}"}
    path = write(
        {
            "metadata.name": "or-ders",
            "spec.source.config.tables": ["orders", "shop.items"],
            "spec.sinks.0": {"type": "kafka", "config": {"id": "k", "exactly_once": True, **kafka}},
        }
    )

    plan = planned(path)

    assert plan["known"] == "new"
    assert plan["spec"]["spec"]["engine"]["run"]["max_seconds"] == 900
    assert plan["spec"]["spec"]["source"]["config"]["dsn"] == "postgres://u:***@localhost/app"
    made = plan["creates"]
    assert {"or-ders/changes", "or-ders/sinks/k", "or-ders/sinks/lines"} <= {
        *made["dagster"]["assets"]
    }
    assert "or-ders/ranges" in made["dagster"]["partitions"]
    assert [job.rpartition("_")[2] for job in made["dagster"]["jobs"]] == ["run", "snapshot"]
    assert [one.rpartition("_")[2] for one in made["dagster"]["sensors"]] == ["work"]
    assert made["state store"] == {"pipeline": "or-ders", "checkpoints": ["k", "lines"]}
    assert (made["source"]["slot"], made["source"]["publication"]) == ("orders", "orders")
    assert made["sinks"] == {
        "k": {
            "topics": ["public.orders.${op}", "shop.items.${op}"],
            "transactional id, group": "deltaforge-or-ders:k",
        },
        "lines": {"files": ["/tmp/orders.jsonl", "/tmp/items.jsonl"]},
    }
    assert not (tmp_path / "none").exists()
    assert "or-ders is new" in shown(path)


def test_tables_of_a_lake(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan names the tables, their mode and where they are; without schemas the database is the schema."""
    monkeypatch.setenv("DELTAFORGE_HOME", str(tmp_path / "none"))
    mysql = {"id": "db", "dsn": "mysql://u@h/shop", "tables": ["shop.orders", "shop.items"]}
    folder = {"type": "hadoop", "warehouse": "/lake", "token": "geheim"}
    path = write(
        {
            "spec.source": {"type": "mysql", "config": mysql},
            "spec.sinks.0": {"type": "delta", "config": {"id": "d", "path": "/delta"}},
            "spec.sinks.1": {
                "type": "iceberg",
                "config": {
                    "id": "i",
                    "mode": "history",
                    "table": "raw.${source.db}_${source.table}",
                    "catalog_properties": folder,
                },
            },
        }
    )

    assert planned(path)["creates"]["sinks"] == {
        "d": {"tables": ["shop.orders", "shop.items"], "mode": "current", "path": "/delta"},
        "i": {
            "tables": ["raw.shop_orders", "raw.shop_items"],
            "mode": "history",
            "catalog": "lake",
            "warehouse": "/lake",
        },
    }


def test_a_changed_pipeline(store: StateStore, write: Write) -> None:
    """The plan shows what differs from the file that the pipeline ran with, and the consequences."""
    register(store, load_pipeline(write()))
    assert planned(write())["known"] == "the same"
    assert "Nothing: orders runs with the same file." in shown(write())

    path = write({"spec.sinks.1.config.path": "/tmp/x", "spec.engine.range.max_seconds": 7})

    plan = planned(path)
    assert plan["known"] == "another"
    assert [(one["path"], one["before"], one["after"]) for one in plan["changes"]] == [
        ("spec.engine.range.max_seconds", 60, 7),
        ("spec.sinks[lines].config.path", "/tmp/${source.table}.jsonl", "/tmp/x"),
    ]
    text = shown(path)
    assert "changed spec.engine.range.max_seconds: 60.0 -> 7.0" in text
    assert "messages after the checkpoint go there" in text
    assert planned(path) == plan  # looking changes nothing


def test_a_change_waits_for_the_run_at_work(store: StateStore, write: Write) -> None:
    """If a live run uses an older file than the sensor has seen, the plan compares with the run's file and says so."""
    before = load_pipeline(write())
    register(store, before)
    store.pipelines.set_start("orders", position(0))
    lease = store.leases.acquire("orders", "run-7", 60)
    assert lease is not None
    with store.fenced(lease) as writer:
        writer.ranges.open(position(0), before.hash, 1)
    changed = {"spec.engine.range.max_seconds": 7}
    path = write(changed)
    register(store, load_pipeline(path))

    assert [one["path"] for one in planned(path)["changes"]] == ["spec.engine.range.max_seconds"]
    assert "Waits: run run-7 uses the old file; within seconds" in shown(path)
    assert planned(write())["known"] == "the same"

    expire(store)

    after = planned(write(changed))
    assert (after["known"], after["waits"]) == ("the same", None)


def test_a_snapshot_that_starts_by_itself(store: StateStore, write: Write) -> None:
    """The plan announces the snapshot of a new pipeline and, with `always`, of each changed file."""

    def due(mode: str) -> str | None:
        found: str | None = planned(write({"spec.source.config.snapshot": {"mode": mode}}))[
            "snapshot"
        ]
        return found

    assert "(snapshot: initial)" in str(due("initial"))
    assert "(snapshot: always)" in str(due("always"))
    register(store, load_pipeline(write()))
    assert [due("initial"), due("never")] == [None, None]
    assert "(snapshot: always)" in str(due("always"))


def test_a_store_of_an_older_version(store: StateStore, write: Write) -> None:
    """If the store has no spec to compare with, the plan says so instead of showing no changes."""
    store.pipelines.register("orders", "hash of then", ["cache", "lines"])

    assert "Not known: orders ran with another, of a version that kept no specs" in shown(write())


def test_where_a_mysql_pipeline_writes(store: StateStore, write: Write) -> None:
    """Template variables that the file does not determine stay variables."""
    config = {"id": "db", "dsn": "mysql://u:geheim@h/d", "tables": ["shop.orders", "items"]}
    path = write(
        {
            "spec.source": {"type": "mysql", "config": config},
            "spec.sinks.0.config.stream": "${source.db}:${source.table}",
            "spec.engine": {"dagster": {"schedule": "0 4 * * *"}},
        }
    )

    made = planned(path)["creates"]

    assert made["sinks"]["cache"]["streams"] == ["shop:orders", "${source.db}:items"]
    assert made["source"]["server id of the reader"] > 0
    assert made["dagster"]["schedules"] == ["orders_schedule (0 4 * * *)"]
    assert made["dagster"]["sensors"] == ["orders_snapshots"]
