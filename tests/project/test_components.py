"""Tests of the components as a project loads them."""

from __future__ import annotations

import dagster as dg
import pytest
from dagster.components.core.component_tree import ComponentTreeException

from deltaforge_dagster import PipelineComponent
from deltaforge_dagster.config.file.load import BrokenPipeline, LoadedPipeline
from deltaforge_dagster.sources.postgres.source_type import PostgresSourceConfig
from tests.project.conftest import ORDERS, QUIET, Project, keys, specs

pytestmark = QUIET

OF_ORDERS = {f"orders/{name}" for name in ("changes", "sinks/lines", "schemas", "snapshot")}
HEALTH = "orders/health"
OTHER = """
import dagster as dg


@dg.asset
def other() -> None:
    pass
"""


def shown_problem(definitions: dg.Definitions, key: str = HEALTH) -> str:
    """Return what the asset of a pipeline that cannot be loaded says."""
    spec = specs(definitions)[key]
    assert spec.group_name == "broken_pipeline_files"
    return str(spec.description)


def test_a_component_is_a_pipeline_beside_other_assets(project: Project) -> None:
    """It brings assets, jobs and sensors of its own name, and no executor or resource."""
    project.write("orders/defs.yaml", ORDERS)
    project.write("other.py", OTHER)

    definitions = project.load()

    assert keys(definitions) == OF_ORDERS | {HEALTH, "other"}
    assert definitions.executor is None
    assert not definitions.resources
    repository = definitions.get_repository_def()
    assert {sensor.name for sensor in repository.sensor_defs} == {"orders_work", "orders_files"}
    assert {schedule.name for schedule in repository.schedule_defs} == {"orders_retention_hourly"}


def test_several_components_share_no_name(project: Project) -> None:
    """Two pipelines of two components, and two in one file, fit together."""
    project.write("orders/defs.yaml", ORDERS)
    other = ORDERS.replace("orders", "returns")
    project.write("more/defs.yaml", f"{other}---\n{ORDERS.replace('orders', 'visits')}")

    definitions = project.load()

    assert {"orders/changes", "returns/changes", "visits/changes"} < keys(definitions)


def test_a_variable_stays_text(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """What looks like a number is the text that it is, unlike in Dagster's own templates."""
    monkeypatch.setenv("SLOT", "1e5")
    project.write("orders/defs.yaml", ORDERS.replace("slot: orders", 'slot: "{{ env.SLOT }}"'))

    with project.sandbox.build_component_tree() as tree:
        (component,) = tree.get_all_components(PipelineComponent)

    (pipeline,) = component.pipelines
    assert isinstance(pipeline, LoadedPipeline)
    config = pipeline.spec.spec.source.config
    assert isinstance(config, PostgresSourceConfig)
    assert config.slot == "1e5"


@pytest.mark.parametrize(
    ("wrong", "line", "text"),
    [
        (("slot: orders", "slott: orders"), 10, "spec.source.config.slott: is not a known field"),
        (("  spec:", "  installation: {hme: x}\n  spec:"), 4, "installation.hme: is not known"),
        (("  spec:", "  events: x\n  spec:"), 4, "events: is not a known attribute"),
        (("  spec:", "  translation: {sinks: {ky: x}}\n  spec:"), 4, "translation.sinks.ky"),
        (
            ("{{ env.SHOP_DSN }}", "{{ env.NO_DSN }}"),
            9,
            "environment variable NO_DSN, which is not set",
        ),
    ],
)
def test_a_mistake_is_shown_with_its_line(
    project: Project, wrong: tuple[str, str], line: int, text: str
) -> None:
    """It is an asset that says where and what; the rest of the project loads."""
    file = project.write("orders/defs.yaml", ORDERS.replace(*wrong))
    project.write("other.py", OTHER)

    definitions = project.load()

    assert keys(definitions) == {HEALTH, "other"}
    problem = shown_problem(definitions)
    assert f"{file}:{line}: " in problem
    assert text in problem


def test_a_mistake_fails_a_check_of_definitions(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`dg check defs` sets this variable; a variable that is missing there is no mistake."""
    project.write("orders/defs.yaml", ORDERS.replace("slot: orders", "slott: orders"))
    monkeypatch.setenv("DAGSTER_IS_DEFS_VALIDATION_CLI", "1")

    with pytest.raises(ComponentTreeException) as raised:
        project.load()
    assert "slott: is not a known field" in str(raised.value.__cause__)

    project.write("orders/defs.yaml", ORDERS)
    monkeypatch.delenv("SHOP_DSN")
    assert keys(project.load()) == {HEALTH}


def test_two_components_with_one_pipeline(project: Project) -> None:
    """They are one asset, which names both."""
    first = project.write("a/defs.yaml", ORDERS)
    second = project.write("b/defs.yaml", ORDERS)

    definitions = project.load()

    assert keys(definitions) == {HEALTH}
    problem = shown_problem(definitions)
    assert f"{first}:1" in problem
    assert f"{second}:1" in problem


@pytest.mark.parametrize("attributes", ["{}", "{path: x.yaml, metadata: {name: x}, spec: {}}"])
def test_a_component_is_a_file_or_its_content(project: Project, attributes: str) -> None:
    """Neither and both are mistakes."""
    project.write(
        "orders/defs.yaml",
        f"type: deltaforge_dagster.PipelineComponent\nattributes: {attributes}\n",
    )

    (key,) = keys(project.load())
    assert key in {"orders/health", "x/health"}


def test_files(project: Project) -> None:
    """A component may name a file beside it, or a folder of them."""
    attributes = ORDERS.partition("attributes:\n")[2].replace("\n  ", "\n").removeprefix("  ")
    text = attributes.replace("{{ env.SHOP_DSN }}", "${SHOP_DSN}")
    project.write("orders/orders.yml", text)
    project.write(
        "orders/defs.yaml",
        "type: deltaforge_dagster.PipelineComponent\nattributes: {path: orders.yml}\n",
    )
    project.write("many/pipelines/returns.yml", text.replace("orders", "returns"))
    project.write("many/pipelines/broken.yml", "metadata: {name: broken}")
    project.write(
        "many/defs.yaml",
        "type: deltaforge_dagster.PipelinesComponent\nattributes: {path: pipelines}\n",
    )

    definitions = project.load()

    assert {"orders/changes", "returns/changes", "broken/health"} < keys(definitions)


def test_translation(project: Project) -> None:
    """Keys and attributes are those of the file, wherever the product names an asset."""
    translation = """
  translation:
    all: {group_name: ingest, tags: {team: shop}}
    changes: {key: "cdc/{{ pipeline }}"}
    sinks:
      key: "out/{{ sink }}"
      owners: ["team:data"]
      automation_condition: "{{ dg.AutomationCondition.eager() }}"
"""
    project.write("orders/defs.yaml", ORDERS.rstrip() + translation)

    definitions = project.load()

    shown = specs(definitions)
    assert {"cdc/orders", "out/lines", "orders/health"} <= shown.keys()
    assert {spec.group_name for spec in shown.values()} == {"ingest"}
    sink = shown["out/lines"]
    assert [dep.asset_key.to_user_string() for dep in sink.deps] == ["cdc/orders"]
    assert sink.owners == ["team:data"]
    assert sink.tags["team"] == "shop"
    assert sink.automation_condition is not None
    checks = {
        check.asset_key.to_user_string()
        for check in definitions.resolve_asset_graph().asset_check_keys
    }
    assert checks == {"cdc/orders", "out/lines", "orders/health"}
    job = definitions.resolve_job_def("orders_run")
    assert {key.to_user_string() for key in job.asset_layer.selected_asset_keys} == {
        "cdc/orders",
        "out/lines",
    }


@pytest.mark.parametrize(
    ("translation", "text"),
    [
        ('{sinks: {key: "{{ tabel }}"}}', "translation.sinks (line 15): UndefinedError: 'tabel'"),
        ("{sinks: {owners: [nobody known]}}", "translation.sinks (line 15): Invalid owner"),
        ('{changes: {key: "2024"}}', "translation.changes (line 15): "),
        ("[]", ":15: translation: must be a mapping"),
    ],
)
def test_a_translation_that_dagster_refuses(project: Project, translation: str, text: str) -> None:
    """It breaks its own pipeline only, and says in which line it is."""
    file = project.write("orders/defs.yaml", f"{ORDERS.rstrip()}\n  translation: {translation}\n")
    project.write("other.py", OTHER)

    definitions = project.load()

    assert keys(definitions) == {HEALTH, "other"}
    problem = shown_problem(definitions)
    assert str(file) in problem
    assert text in problem


def test_two_assets_with_one_key(project: Project) -> None:
    """A translation that gives one key twice is a mistake that names both assets."""
    file = project.write(
        "orders/defs.yaml",
        ORDERS.rstrip() + "\n  translation: {changes: {key: same}, sinks: {key: same}}\n",
    )

    definitions = project.load()

    assert keys(definitions) == {HEALTH}
    problem = shown_problem(definitions)
    assert str(file) in problem
    assert "orders/changes and orders/sinks/lines get the same key, same" in problem


def test_a_class_of_the_projects_own(project: Project) -> None:
    """It may say what assets look like; `translation` is applied on top."""
    project.write(
        "own.py",
        """
        from deltaforge_dagster import PipelineComponent


        class OwnComponent(PipelineComponent):
            def get_asset_spec(self, data):
                spec = super().get_asset_spec(data)
                return spec.replace_attributes(kinds={"own"})
        """,
    )
    module = f"{project.sandbox.project_name}.defs.own.OwnComponent"
    text = ORDERS.replace("deltaforge_dagster.PipelineComponent", module).rstrip()
    project.write("orders/defs.yaml", f"{text}\n  translation: {{all: {{group_name: g}}}}\n")

    shown = specs(project.load())

    assert shown["orders/changes"].kinds == {"own"}
    assert shown["orders/changes"].group_name == "g"


def test_without_a_file() -> None:
    """A component that a program makes says what is wrong, too."""
    component = PipelineComponent.from_attributes_dict(attributes={"spec": {}})

    (pipeline,) = component.pipelines
    assert isinstance(pipeline, BrokenPipeline)
    assert "metadata" in str(pipeline.error)
