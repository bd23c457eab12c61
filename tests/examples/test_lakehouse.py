"""The project with a report that follows lake tables: a SQLite file, Iceberg, and an asset on the same Spark server."""

from __future__ import annotations

import importlib.util
import sqlite3
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import dagster as dg
import pytest

from deltaforge_dagster.assets.lake_tables import publish_writes
from deltaforge_dagster.definitions import build_definitions
from tests.examples.stage import EXAMPLES, Example, Stage
from tests.fix_spark import SparkAddress

FOLDER = EXAMPLES / "lakehouse"
REVENUE = dg.AssetKey(["reports", "revenue"])
MODE = "SPARK_CONNECT_MODE_ENABLED"
"""What the resource sets for its process, and so for processes that other tests start with sessions of another kind."""

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(900),  # the first may wait for the compiler
]


def module(name: str) -> ModuleType:
    """Return a module of the project."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_the_report_follows_the_tables(
    stage: Stage,
    spark_server: SparkAddress,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    instance: dg.DagsterInstance,
) -> None:
    """Once both tables have their first rows it is asked for, and says what the shop's file says."""
    shop = tmp_path / "shop.db"
    home = stage.opened.settings.home
    spark_server.use(home, monkeypatch)
    monkeypatch.setenv(MODE, "")  # so that the end of the test undoes what the resource sets
    monkeypatch.delenv(MODE)
    for name, value in {
        "DELTAFORGE_HOME": home,
        "DELTAFORGE_PIPELINES": FOLDER / "shop.yaml",
        "SHOP_DATABASE": shop,
        "LAKE": tmp_path / "lake",
    }.items():
        monkeypatch.setenv(name, str(value))
    sell = module("shop").sell
    sell(str(shop), 0)
    example = Example(stage, FOLDER / "shop.yaml", str(shop), "")
    example.start()
    with closing(sqlite3.connect(shop)) as connection, connection:
        connection.execute("UPDATE customers SET name = name || '!'")
    sell(str(shop), 9)

    reports: dg.Definitions = module("reports").defs
    definitions = dg.Definitions.merge(
        build_definitions(stage.opened.settings, [example.loaded]), reports
    )
    revenue = dg.AssetSelection.assets(REVENUE)
    before = dg.evaluate_automation_conditions(definitions, instance, revenue)

    example.deliver()
    publish_writes(instance, example.store, example.loaded, instance.report_runless_asset_event)

    after = dg.evaluate_automation_conditions(definitions, instance, revenue, cursor=before.cursor)
    assert [one.get_num_requested(REVENUE) for one in (before, after)] == [0, 1]
    made = reports.resolve_implicit_global_asset_job_def().execute_in_process(
        instance=instance, asset_selection=[REVENUE]
    )
    metadata: Any = made.asset_materializations_for_node("reports__revenue")[0].metadata
    query = "SELECT name, count(*), sum(cents) FROM orders JOIN customers c ON c.id = customer GROUP BY 1 ORDER BY 1"
    with closing(sqlite3.connect(shop)) as connection:
        expected = connection.execute(query).fetchall()
    said = [line.strip("| ").split(" | ") for line in metadata["revenue"].value.splitlines()[2:]]
    assert [(name, int(orders), int(cents)) for name, orders, cents in said] == expected
    assert metadata["dagster/row_count"].value == len(expected)
