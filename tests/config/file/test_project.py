"""Tests of the pipelines of a Dagster project, as commands find them."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltaforge_dagster.config.file.load import LoadedPipeline, load_files, load_pipelines
from deltaforge_dagster.config.file.project import is_project, project_installation
from deltaforge_dagster.config.settings import Settings, project_environment, project_settings
from deltaforge_dagster.errors import SettingsError

PYPROJECT = '[tool.dg.project]\nroot_module = "shop"\n'
PIPELINE = """\
metadata: {name: returns, tenant: acme}
spec:
  source: {type: turso, config: {id: s, url: /shop.db, tables: ["*"]}}
  sinks: [{type: file, config: {id: lines, path: /tmp/lines.jsonl}}]
"""
INLINE = "type: deltaforge_dagster.PipelineComponent\nattributes:\n" + "".join(
    f"  {line}\n" for line in PIPELINE.replace("returns", "orders").splitlines()
)
NAMED = """\
type: deltaforge_dagster.PipelineComponent
attributes: {path: ../../returns.yaml}
---
type: other.Component
attributes: {metadata: x}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a project with a pipeline in a component, one that a component names, and other files."""
    project = tmp_path / "project"
    defs = project / "src" / "shop" / "defs"
    for path, text in {
        project / "pyproject.toml": PYPROJECT,
        defs / "orders" / "defs.yaml": INLINE,
        defs / "returns" / "defs.yaml": NAMED,
        defs.parent / "returns.yaml": PIPELINE,
        defs / "dbt" / "dbt_project.yml": "name: shop\n",
        defs / "dbt" / "defs.yaml": "type: dagster_dbt.DbtProjectComponent\nattributes: {}\n",
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return project


def test_a_project_is_a_directory_of_pipelines(folder: Path) -> None:
    """Its pipelines are those of its components; its other files are none."""
    pipelines = load_pipelines(folder)

    assert [pipeline.name for pipeline in pipelines] == ["orders", "returns"]
    assert all(isinstance(pipeline, LoadedPipeline) for pipeline in pipelines)
    (orders, returns) = (pipeline.path for pipeline in pipelines)
    assert orders == folder / "src" / "shop" / "defs" / "orders" / "defs.yaml"
    assert returns == folder / "src" / "shop" / "returns.yaml"
    assert is_project(folder)
    assert not is_project(folder / "src")


def test_a_project_among_pipeline_files(folder: Path) -> None:
    """Below a folder of pipeline files, a project has its components' pipelines, and no others."""
    (folder.parent / "visits.yaml").write_text(PIPELINE.replace("returns", "visits"))

    names = [pipeline.name for pipeline in load_pipelines(folder.parent)]

    assert sorted(names) == ["orders", "returns", "visits"]


def test_several_pipelines_in_one_file(tmp_path: Path) -> None:
    """Each document is a pipeline; a mistake in one has its own line."""
    file = tmp_path / "defs.yaml"
    second = INLINE.replace("orders", "visits").replace("url:", "urll:")
    file.write_text(f"{INLINE}---\n{second}")

    orders, visits = load_files([file])

    assert isinstance(orders, LoadedPipeline)
    assert not isinstance(visits, LoadedPipeline)
    assert f"{file}:12: spec.source.config.urll" in str(visits.error)


def test_where_its_state_is(folder: Path) -> None:
    """The components say it; they must agree, and variables win."""
    defs = folder / "src" / "shop" / "defs"
    assert project_installation(folder) == {}
    for name in ("orders", "returns"):
        file = defs / name / "defs.yaml"
        file.write_text(INLINE.replace("orders", name) + "  installation: {home: state}\n")
    given = project_installation(folder)
    assert given == {"home": "state"}
    assert project_settings(given, folder, {}).home == folder / "state"
    assert project_settings(given, folder, {"DELTAFORGE_HOME": "/other"}).home == Path("/other")
    assert project_environment({}, folder, {}) == {"DELTAFORGE_HOME": str(folder / ".deltaforge")}

    file.write_text(INLINE + "  installation: {home: elsewhere}\n")
    with pytest.raises(SettingsError, match="have different `installation`"):
        project_installation(folder)
    with pytest.raises(SettingsError, match="is no Dagster project"):
        project_installation(defs)


def test_settings_of_a_project() -> None:
    """Relative paths are relative to the project; a variable's value keeps its text."""
    settings = project_settings(
        {
            "state_url": "sqlite:///df/state.db",
            "journal_url": "df/journal",
            "spark_remote": "{{ env.SPARK }}",
        },
        Path("/project"),
        {"SPARK": "sc://spark:1e5"},
    )

    assert settings == Settings(
        pipelines=Path.cwd() / "pipelines",
        home=Path("/project/.deltaforge"),
        state_url="sqlite:////project/df/state.db",
        journal_url="file:///project/df/journal",
        spark_remote="sc://spark:1e5",
        lake_jars=Path("/project/.deltaforge/jars"),
    )
    with pytest.raises(SettingsError, match="SPARK is not set"):
        project_settings({"spark_remote": "{{ env.SPARK }}"}, Path("/project"), {})
