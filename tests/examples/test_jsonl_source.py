"""A kind of source in a package of its own: everything knows it, as it knows ours, and it keeps a source's promises."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from deltaforge_dagster.sources import registry
from deltaforge_dagster.sources.base import Source
from deltaforge_dagster.testing.sources import Bench, SourceContract
from tests.examples.outside import Run, command, install, running_in
from tests.examples.stage import EXAMPLES
from tests.fix_spark import SparkAddress

PACKAGE = EXAMPLES / "jsonl_source"

PIPELINE = """\
metadata: {{name: shop, tenant: acme}}
spec:
  source:
    type: jsonl
    config: {{id: app, path: "{folder}/shop.jsonl", tables: [orders]}}
  sinks:
    - type: file
      config: {{id: audit, path: "{folder}/${{source.table}}.out"}}
"""

ASSET = """
import json
from deltaforge_dagster.config.file.load import load_pipelines
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.definitions import build_definitions

settings = Settings.from_env()
graph = build_definitions(settings, load_pipelines(settings.pipelines)).resolve_asset_graph()
asset = next(graph.get(key) for key in graph.get_all_asset_keys() if key.path[-1] == "changes")
print(json.dumps([sorted(asset.kinds), asset.metadata["source"], asset.metadata["tables"]]))
"""


def line(table: str, id_: int, value: str | None = None) -> str:
    """Return a line of the file: a new row."""
    row = {"id": id_, "v": str(id_) if value is None else value}
    return json.dumps({"table": table, "ts_ms": 1_767_225_600_000, "row": row}) + "\n"


class JsonlBench(Bench):
    """A file that a test appends to."""

    holds_log = False
    has_transactions = False
    appends_only = True

    def __init__(self, path: Path) -> None:
        self._path = path
        self._away = path.with_suffix(".away")
        self._sources: list[Source] = []
        self.execute(self.insert("orders", 0), self.insert("items", 0), self.insert("other", 0))

    def source(self) -> Source:
        """Return a new source of the file."""
        kind = registry.source_types()["jsonl"]
        fields = {"id": "app", "path": str(self._path), "tables": ("orders", "items")}
        context: Any = None  # this kind does not look at it
        self._sources.append(kind.build(kind.config(**fields), context))
        return self._sources[-1]

    def execute(self, *statements: str) -> None:
        """Append lines; put the file back, if it is away."""
        if self._away.exists():
            self._away.rename(self._path)
        with self._path.open("a") as file:
            file.write("".join(statements))

    def insert(self, table: str, *ids: int) -> str:
        """Return lines."""
        return "".join(line(table, id_) for id_ in ids)

    def insert_large(self, table: str, id_: int, size: int) -> str:
        """Return a long line."""
        return line(table, id_, "x" * size)

    def cut(self) -> None:
        """Take the file away."""
        self._path.rename(self._away)

    def forget(self) -> None:
        """Empty the file."""
        self._path.write_text("")


class TestJsonlSource(SourceContract):
    """The source keeps the promises of every source."""

    @pytest.fixture
    def bench(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
        """Return a bench, while the package is installed."""
        monkeypatch.syspath_prepend(install("jsonl_source", registry.GROUP, tmp_path))
        registry._kinds.cache_clear()
        yield JsonlBench(tmp_path / "shop.jsonl")
        sys.modules.pop("jsonl_source", None)
        monkeypatch.undo()
        registry._kinds.cache_clear()
        assert "jsonl" not in {one.name for one in entry_points(group=registry.GROUP)}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run Python where the package is installed, with a pipeline that has such a source; return what it prints."""
    installed = install("jsonl_source", registry.GROUP, tmp_path)
    (tmp_path / "pipelines").mkdir()
    (tmp_path / "pipelines" / "shop.yaml").write_text(PIPELINE.format(folder=tmp_path))
    (tmp_path / "shop.jsonl").write_text(line("orders", 1))
    return running_in(tmp_path, installed)


def test_every_command_knows_it(run: Run, tmp_path: Path) -> None:
    """The file is valid, its mistakes are found; plan and check say what they say about our sources."""
    checked = command(run, "validate", "--json")
    planned = command(run, "plan", "shop", "--json")
    found = command(run, "check", "shop", "--json")

    assert (checked["valid"], checked["pipelines"][0]["warnings"]) == (True, [])
    path = f"{tmp_path}/shop.jsonl"
    assert planned["creates"]["source"] == {"file": path, "tables": ["orders"]}
    assert planned["creates"]["sinks"] == {"audit": {"files": [f"{tmp_path}/orders.out"]}}
    assert planned["spec"]["spec"]["source"]["type"] == "jsonl"
    (of_source,) = [one for one in found["findings"] if one["subject"] == "connection"]
    assert (of_source["level"], of_source["text"]) == ("ok", f"{path} can be read")

    file = tmp_path / "pipelines" / "shop.yaml"
    good = file.read_text()
    file.write_text(good.replace("path: ", "pfad: ", 1))
    wrong = command(run, "validate", "--json", code=1)
    assert [one.split(": ", 1)[1] for one in wrong["pipelines"][0]["problems"]] == [
        "spec.source.config.path: is required"
    ]
    seed = "engine: {checkpoint: {seed: {type: position, position: {lsn: 0/1}}}}"
    file.write_text(good + f"  {seed}\n")
    wrong = command(run, "validate", "--json", code=1)
    (problem,) = wrong["pipelines"][0]["problems"]
    assert problem.endswith("is the position of another kind of source")


def test_the_schema_has_it(run: Run) -> None:
    """The JSON Schema has the type with its fields, after ours, and ours are as they are without it."""
    schema = json.loads(run("-m", "deltaforge_dagster", "schema"))
    choice = schema["$defs"]["Spec"]["properties"]["source"]
    block, config = (schema["$defs"].pop(name) for name in ("JsonlSource", "JsonlSourceConfig"))

    assert choice["discriminator"]["mapping"].pop("jsonl") == "#/$defs/JsonlSource"
    assert block["description"] == "A file of JSON lines, to which an application appends."
    assert set(config["properties"]) > {"id", "path", "key", "tables"}
    choice["oneOf"].pop()
    ours = json.loads((EXAMPLES.parent / "docs" / "pipeline.schema.json").read_text())
    assert schema == ours


def test_dagster_shows_it(run: Run) -> None:
    """The asset of its changes has its kind, its id and its tables."""
    assert json.loads(run("-c", ASSET).splitlines()[-1]) == [["jsonl"], "app", "orders"]


@pytest.mark.spark
def test_a_run_captures_from_it(
    run: Run, tmp_path: Path, spark_server: SparkAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New lines arrive in order, the status says so, and their journal equals the file. Spark needs no package."""
    spark_server.use(tmp_path / "home", monkeypatch)
    command(run, "run", "shop", "--until-caught-up", "--json")
    with (tmp_path / "shop.jsonl").open("a") as file:
        file.write(line("orders", 2) + line("other", 3) + line("orders", 4))

    ended = command(run, "run", "shop", "--until-caught-up", "--json")
    status = command(run, "status", "shop", "--json")
    verified = command(run, "verify", "shop", "--from-source", "--json")

    assert (ended["success"], ended["behind"]) == (True, {})
    events = [json.loads(one) for one in (tmp_path / "orders.out").read_text().splitlines()]
    assert [event["after"]["id"] for event in events] == [2, 4]
    source = events[-1]["source"]
    assert (source["connector"], source["name"], source["table"]) == ("jsonl", "app", "orders")
    assert source["pos"] == (tmp_path / "shop.jsonl").stat().st_size
    (sink,) = status["pipelines"][0]["sinks"]
    assert (sink["sink"], sink["segments_behind"], sink["last_error"]) == ("audit", 0, None)
    assert (verified["ok"], [one["again"] for one in verified["segments"]]) == (True, [2])
