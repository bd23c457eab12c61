"""Tests of the definitions of one pipeline, which are merged with others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from deltaforge_dagster import DeltaforgeTranslator, PipelineAsset, pipeline_definitions
from deltaforge_dagster.errors import SettingsError, SpecError
from tests.project.conftest import keys
from tests.project.test_scaffolding import VARIABLES
from tests.test_definitions import write

SPEC: dict[str, Any] = {
    "metadata": {"name": "orders", "tenant": "acme"},
    "spec": {
        "source": {
            "type": "postgres",
            "config": {
                "id": "shop",
                "dsn": "{{ env.SHOP_DSN }}",
                "slot": "s",
                "publication": "s",
                "tables": ["public.orders"],
            },
        },
        "sinks": [{"type": "file", "config": {"id": "lines", "path": "/tmp/orders.jsonl"}}],
    },
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test a home of its own."""
    monkeypatch.setenv("DELTAFORGE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SHOP_DSN", "postgres://u:p@localhost:1/shop")
    return tmp_path / "home"


def test_they_merge_with_anything(tmp_path: Path) -> None:
    """Two pipelines, an asset, a resource named as ours were once, and an executor fit together."""
    file = write(tmp_path, "shop")

    @dg.asset
    def other(platform: dg.ResourceParam[str]) -> None:
        pass

    definitions = dg.Definitions.merge(
        pipeline_definitions(file),
        pipeline_definitions(SPEC),
        dg.Definitions(
            [other], resources={"platform": "theirs"}, executor=dg.multiprocess_executor
        ),
    )

    dg.Definitions.validate_loadable(definitions)
    assert {"shop/changes", "orders/changes", "other"} < keys(definitions)


def test_a_translator(tmp_path: Path) -> None:
    """It decides about keys; one that needs more than names is refused, and shown."""

    class Warehouse(DeltaforgeTranslator):
        def get_asset_spec(self, data: PipelineAsset) -> dg.AssetSpec:
            return super().get_asset_spec(data).replace_attributes(key=["w", *data.spec.key.path])

    class Odd(DeltaforgeTranslator):
        def get_asset_spec(self, data: PipelineAsset) -> dg.AssetSpec:
            return data.spec.replace_attributes(key=["odd", data.spec.description or "none"])

    shown = keys(pipeline_definitions(SPEC, translator=Warehouse()))
    assert {"w/orders/changes", "w/orders/sinks/lines", "w/orders/health"} < shown

    assert keys(pipeline_definitions(SPEC, translator=Odd())) == {"orders/health"}
    assert "orders/changes" in keys(pipeline_definitions(SPEC))


def test_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is missing is an asset; when definitions are only checked, it is an error."""
    assert keys(pipeline_definitions(tmp_path / "none.yaml")) == {"none/health"}
    with pytest.raises(SettingsError, match=r"installation\.hme: is not known"):
        pipeline_definitions(SPEC, installation={"hme": "x"})
    monkeypatch.setenv("DAGSTER_IS_DEFS_VALIDATION_CLI", "1")
    with pytest.raises(SpecError, match="cannot be read"):
        pipeline_definitions(tmp_path / "none.yaml")


def test_settings_are_read_when_they_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Definitions load without a variable of `installation`; a tick says which one is missing."""
    monkeypatch.delenv("DELTAFORGE_HOME")
    definitions = pipeline_definitions(
        SPEC, installation={"home": "{{ env.THE_HOME }}"}, folder=tmp_path
    )
    sensor = definitions.resolve_sensor_def("orders_work")
    with dg.DagsterInstance.ephemeral() as instance:
        context = dg.build_sensor_context(instance)
        with pytest.raises(dg.Failure, match="THE_HOME is not set"):
            sensor.evaluate_tick(context)

        monkeypatch.setenv("THE_HOME", "1e5")
        with pytest.raises(dg.Failure, match="connection"):
            sensor.evaluate_tick(context)
    assert (tmp_path / "1e5" / "state.db").exists()


HEAVY = "{'numpy', 'pyarrow', 'sqlalchemy', 'alembic', 'pyspark', 'numba', 'pandas', 'fsspec'}"
"""Packages that take a tenth of a second or more, as a set in Python."""


def printed(code: str) -> list[str]:
    """Return the lines that a program prints in a process of its own."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], check=True, capture_output=True, text=True
    ).stdout.splitlines()


def test_a_pipeline_costs_its_code_location_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its source and sink are, loading it imports no package that only its runs need."""
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    lines = printed(
        "import itertools, sys\n"
        "from deltaforge_dagster import pipeline_definitions\n"
        "from deltaforge_dagster.project.scaffolding import PipelineParams, pipeline_attributes\n"
        "from deltaforge_dagster.sinks.registry import sink_types\n"
        "from deltaforge_dagster.sources.registry import source_types\n"
        "for source, sink in itertools.product(source_types(), sink_types()):\n"
        "    params = PipelineParams(source=source, sink=sink)\n"
        "    spec = pipeline_attributes(f'{source}_{sink}', params)\n"
        "    defs = pipeline_definitions(spec)\n"
        "    keys = {key.path[-1] for key in defs.resolve_all_asset_keys()}\n"
        "    assert 'changes' in keys, (source, sink, keys)\n"
        f"print(*sorted({HEAVY} & {{*sys.modules}}))"
    )
    assert lines == [""]


def test_the_package_costs_other_projects_little() -> None:
    """Dagster imports the package, and every name that `dir` lists, in each project that has it."""
    code = (
        "import sys, deltaforge_dagster as d\n"
        "assert 'dagster' not in sys.modules\n"
        "import dagster\n"
        "[getattr(d, name) for name in dir(d)]\n"
        "d.PipelineComponent.get_model_cls().model_json_schema()\n"
        "print(*sorted(name for name in sys.modules if name.startswith('deltaforge_dagster.')))\n"
        f"print(*{HEAVY} & {{*sys.modules}})"
    )
    said = printed(code)
    assert said[0].split() == [
        "deltaforge_dagster.assets",
        "deltaforge_dagster.assets.translator",
        "deltaforge_dagster.errors",
        "deltaforge_dagster.project",
        "deltaforge_dagster.project.components",
        "deltaforge_dagster.project.definitions",
        "deltaforge_dagster.project.scaffolding",
    ]
    assert not said[1].split()
