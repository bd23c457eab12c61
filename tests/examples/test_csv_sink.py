"""A kind of sink in a package of its own: everything knows it, as it knows ours, and it keeps a sink's promises."""

from __future__ import annotations

import csv
import importlib.util
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from deltaforge_dagster.installation.java import find_java
from deltaforge_dagster.sinks.registry import GROUP
from deltaforge_dagster.testing.sinks import SinkContract, Subject
from tests.examples.outside import Run, command, install, running_in
from tests.examples.stage import EXAMPLES
from tests.fix_spark import SparkAddress

PACKAGE = EXAMPLES / "csv_sink"

PIPELINE = """\
metadata: {{name: shop, tenant: acme}}
spec:
  source:
    type: turso
    config:
      {{id: s, url: "{folder}/shop.db", tables: [orders], cdc_mode: triggers, auto_create_triggers: true}}
  sinks:
    - type: csv
      config: {{id: audit, path: "{folder}/${{source.table}}.csv"}}
"""

ASSET = """
import json
from pathlib import Path
from deltaforge_dagster.config.file.load import load_pipelines
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.definitions import build_definitions

settings = Settings.from_env()
graph = build_definitions(settings, load_pipelines(settings.pipelines)).resolve_asset_graph()
asset = next(graph.get(key) for key in graph.get_all_asset_keys() if key.path[-1] == "audit")
print(json.dumps([sorted(asset.kinds), asset.metadata["destination"], asset.metadata["delivery"]]))
"""

SPARK_JOB = """
import sys
from pyspark.sql import SparkSession
from deltaforge_dagster.spark import register

spark = (
    SparkSession.builder.master("local[1]")
    .config("spark.ui.enabled", "false")
    .config("spark.driver.host", "127.0.0.1")
    .getOrCreate()
)
register(spark)
rows = spark.range(0, 3, 1, 1).selectExpr("concat('k', id) AS key", "concat('v', id) AS value")
rows.write.format("deltaforge_csv").option("path", sys.argv[1]).option("job", "j").mode("append").save()
"""


def rows_of(path: Path) -> list[list[str]]:
    """Return the rows of a CSV file: event id, key, value and replay."""
    csv.field_size_limit(1 << 30)
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.reader(file))


@pytest.fixture
def csv_sink() -> ModuleType:
    """The package's module, imported here."""
    spec = importlib.util.spec_from_file_location("csv_sink", PACKAGE / "csv_sink.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run Python where the package is installed, with a pipeline that has such a sink; return what it prints."""
    installed = install("csv_sink", GROUP, tmp_path)
    (tmp_path / "pipelines").mkdir()
    (tmp_path / "pipelines" / "shop.yaml").write_text(PIPELINE.format(folder=tmp_path))
    with sqlite3.connect(tmp_path / "shop.db") as shop:
        shop.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY)")
    shop.close()
    return running_in(tmp_path, installed)


class TestCsvSink(SinkContract):
    """The sink keeps the promises of every sink."""

    @pytest.fixture
    def subject(self, csv_sink: ModuleType, tmp_path: Path) -> Iterator[Subject]:
        """An open sink that writes below the test's folder."""

        def read(name: str, replay: str = "") -> list[str]:
            return [row[2] for row in rows_of(tmp_path / f"{name}.csv") if row[3] == replay]

        def make() -> Any:
            return csv_sink.CsvSink("subject", tmp_path)

        sink = make()
        sink.open()
        yield Subject(
            sink=sink,
            another=make,
            destination=lambda name: f"{tmp_path}/{name}.csv",
            delivered=read,
            replayed=lambda name: read(name, "r1"),
        )
        sink.close()


def test_every_command_knows_it(run: Run, tmp_path: Path) -> None:
    """The file is valid, its mistakes are found; plan and check say what they say about our sinks."""
    checked = command(run, "validate", "--json")
    planned = command(run, "plan", "shop", "--json")
    found = command(run, "check", "shop", "--json")

    assert (checked["valid"], checked["pipelines"][0]["warnings"]) == (True, [])
    assert planned["creates"]["sinks"] == {"audit": {"files": [f"{tmp_path}/orders.csv"]}}
    assert planned["spec"]["spec"]["sinks"][0]["type"] == "csv"
    (of_sink,) = [one for one in found["findings"] if one["subject"] == "sink audit"]
    assert (of_sink["level"], of_sink["text"]) == ("ok", f"files in {tmp_path}")

    file = tmp_path / "pipelines" / "shop.yaml"
    file.write_text(file.read_text().replace("path:", "pfad:"))
    wrong = command(run, "validate", "--json", code=1)
    assert [one.split(": ", 1)[1] for one in wrong["pipelines"][0]["problems"]] == [
        "spec.sinks[0].config.path: is required"
    ]


def test_the_schema_has_it(run: Run) -> None:
    """The JSON Schema has the type with its fields, after ours, and ours are as they are without it."""
    schema = json.loads(run("-m", "deltaforge_dagster", "schema"))
    kinds = schema["$defs"]["Spec"]["properties"]["sinks"]["items"]["discriminator"]["mapping"]
    block, config = (schema["$defs"].pop(name) for name in ("CsvSink", "CsvSinkConfig"))

    assert kinds.pop("csv") == "#/$defs/CsvSink"
    assert block["description"] == "A CSV sink: each message is a row of a file."
    assert set(config["properties"]) > {"id", "envelope", "path"}
    schema["$defs"]["Spec"]["properties"]["sinks"]["items"]["oneOf"].pop()
    ours = json.loads((EXAMPLES.parent / "docs" / "pipeline.schema.json").read_text())
    assert schema == ours


def test_dagster_shows_it(run: Run, tmp_path: Path) -> None:
    """The sink's asset has its kind, its destination and its guarantee."""
    kinds, destination, delivery = json.loads(run("-c", ASSET).splitlines()[-1])

    assert kinds == ["csv"]
    assert destination == f"{tmp_path}/${{source.table}}.csv"
    assert delivery == "at least once"


@pytest.mark.spark
def test_a_run_delivers_to_it(
    run: Run, tmp_path: Path, spark_server: SparkAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changes arrive in order, and the status says that the sink has them. Spark's tasks need no package."""
    spark_server.use(tmp_path / "home", monkeypatch)
    command(run, "run", "shop", "--until-caught-up", "--json")
    shop = sqlite3.connect(tmp_path / "shop.db")
    with shop:
        shop.executemany("INSERT INTO orders VALUES (?)", [(1,), (2,), (3,)])
        shop.execute("DELETE FROM orders WHERE id = 2")
    shop.close()

    ended = command(run, "run", "shop", "--until-caught-up", "--json")
    status = command(run, "status", "shop", "--json")

    assert (ended["success"], ended["behind"]) == (True, {})
    events = [json.loads(row[2]) for row in rows_of(tmp_path / "orders.csv")]
    assert [event["op"] for event in events] == ["c", "c", "c", "d"]
    assert [event["after"]["id"] for event in events[:3]] == [1, 2, 3]
    (sink,) = status["pipelines"][0]["sinks"]
    assert (sink["sink"], sink["segments_behind"], sink["last_error"]) == ("audit", 0, None)


@pytest.mark.spark
def test_any_spark_job_writes_to_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kind is a data source as well, with its own fields as options."""
    monkeypatch.setenv("JAVA_HOME", str(find_java()))

    run("-c", SPARK_JOB, str(tmp_path / "job.csv"))

    assert rows_of(tmp_path / "job.csv") == [[f"j-0-{n}", f"k{n}", f"v{n}", ""] for n in range(3)]
