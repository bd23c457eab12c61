"""Names with hyphens, from the file to every server."""

from __future__ import annotations

import json
from pathlib import Path

import dagster as dg
import pytest
import redis
from typer.testing import CliRunner

from deltaforge_dagster.assets.names import asset_key, partition_key
from deltaforge_dagster.cli.main import app
from deltaforge_dagster.config.file.load import LoadedPipeline, load_pipelines
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.pipeline.control.work import ensure_start, register
from deltaforge_dagster.resources.instance import local_instance
from deltaforge_dagster.resources.platform import build_source
from deltaforge_dagster.state.store import StateStore
from tests.e2e.conftest import Shop
from tests.fix_spark import SparkAddress

pytestmark = [pytest.mark.e2e, pytest.mark.postgres, pytest.mark.redis, pytest.mark.spark]

PIPELINES = ("shop-a", "shop_a")
SINKS = ("out-1", "out_1")

MORE = """\
    - {{type: redis, config: {{id: out-1, uri: "{redis}", stream: "{name}/out-1", exactly_once: true}}}}
    - {{type: redis, config: {{id: out_1, uri: "{redis}", stream: "{name}/out_1", exactly_once: true}}}}
  processors:
    - {{type: filter, id: only-c, ops: [create]}}
    - {{type: flatten, id: only_c}}
"""


def write(shop: Shop, folder: Path) -> None:
    """Write two pipelines whose names, sinks and processors differ only by hyphens."""
    for name in PIPELINES:
        more = MORE.format(name=name, redis=shop.redis_uri)
        (folder / f"{name}.yaml").write_text(shop.pipeline(name, more_sinks=more))


def start(settings: Settings) -> None:
    """Fix where both pipelines begin."""
    store = StateStore.open(settings.state_url)
    for loaded in load_pipelines(settings.pipelines):
        assert isinstance(loaded, LoadedPipeline)
        source = build_source(loaded.spec)
        ensure_start(store, loaded, register(store, loaded), source)
        source.close()
    store.close()


def deltaforge(*arguments: str) -> dict[str, object]:
    """Run a command and return its last line, one JSON object."""
    result = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout.splitlines()[-1]))


def test_names_that_differ_by_a_hyphen(
    shop: Shop,
    spark_server: SparkAddress,
    redis_client: redis.Redis,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pipelines, sinks and processors each have their own data, positions and history."""
    monkeypatch.setenv("DELTAFORGE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DELTAFORGE_PIPELINES", str(tmp_path))
    spark_server.use(tmp_path / "home", monkeypatch)
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    write(shop, tmp_path)
    settings = Settings.from_env()
    start(settings)
    shop.execute("INSERT INTO customers VALUES (1, 'Ada'), (2, 'Zoë')")

    run = deltaforge("run", "shop-a", "--until-caught-up")
    assert (run["captured"], run["delivered"]) == (2, dict.fromkeys(["redis", *SINKS], 2))
    again = deltaforge("replay", "shop-a", "--range", "1", "--sink", "out_1")

    assert again["sent"] == 2
    entries = {
        f"{name}/{sink}": len(shop.entries(f"{name}/{sink}"))
        for name in PIPELINES
        for sink in SINKS
    }
    assert entries == {
        "shop-a/out-1": 2,
        "shop-a/out_1": 4,
        "shop_a/out-1": 0,
        "shop_a/out_1": 0,
    }
    for sink in SINKS:
        assert redis_client.exists(f"deltaforge:position:shop-a:{sink}")
        assert not redis_client.exists(f"deltaforge:position:shop_a:{sink}")
    with local_instance(settings) as instance:
        found = {
            (name, asset): instance.fetch_materializations(
                dg.AssetRecordsFilter(
                    asset_key=asset_key(name, asset), asset_partitions=[partition_key(1)]
                ),
                limit=5,
            ).records
            for name in PIPELINES
            for asset in ("changes", *SINKS)
        }
    assert {key: len(records) for key, records in found.items() if records} == {
        ("shop-a", "changes"): 1,
        ("shop-a", "out-1"): 1,
        ("shop-a", "out_1"): 2,
    }
    newest = found["shop-a", "out-1"][0].asset_materialization
    assert newest is not None
    assert newest.metadata["processor/only-c/events_out"].value == 2
    assert newest.metadata["processor/only_c/events_out"].value == 2
