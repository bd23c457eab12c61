"""The values for Dagster's own Helm chart: they fit the chart, the image and each other."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docker.compose import DOCKER, ROOT

DEPLOY = ROOT / "deploy"


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    """The values."""
    read: dict[str, Any] = yaml.safe_load((DEPLOY / "dagster-values.yaml").read_text())
    return read


def sections(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the mappings of the values with their paths; those of a list have the path of the list."""
    if isinstance(value, dict):
        yield ".".join(path), value
        for name, inner in value.items():
            yield from sections(inner, (*path, name))
    elif isinstance(value, list):
        for inner in value:
            yield from sections(inner, path)


def test_dagsters_chart_has_these_names(values: dict[str, Any]) -> None:
    """No section has a name that Dagster's models lack, which the chart would refuse or pass over."""
    accepted = yaml.safe_load((Path(__file__).parent / "dagster_chart.yaml").read_text())
    known = [(path, section) for path, section in sections(values) if path in accepted]
    assert {path for path, _ in known} == accepted.keys()
    for path, section in known:
        assert section.keys() <= set(accepted[path]), path


def test_one_image_and_dagsters_version(values: dict[str, Any]) -> None:
    """Everything runs the same image, of our version; the chart is that of the Dagster in it."""
    (deployment,) = values["dagster-user-deployments"]["deployments"]
    image = deployment["image"]
    for part in ("dagsterDaemon", "dagsterWebserver"):
        assert values[part]["image"] == image
    copied = {init["image"] for init in deployment["initContainers"]}
    assert copied == {f"{image['repository']}:{image['tag']}"}
    chart = yaml.safe_load((DEPLOY / "chart" / "Chart.yaml").read_text())
    assert chart["appVersion"] == image["tag"]
    text = (DEPLOY / "dagster-values.yaml").read_text()
    (named,) = re.findall(r"dagster/dagster --version (\S+)", text)
    assert f"\ndagster=={named} " in (DOCKER / "requirements.lock").read_text()


def test_pods_are_not_root_and_write_to_volumes_only(values: dict[str, Any]) -> None:
    """Each has what the policy `restricted` asks for; what the image writes to is a volume, also in pods of runs."""
    (deployment,) = values["dagster-user-deployments"]["deployments"]
    launcher = values["runLauncher"]["config"]["k8sRunLauncher"]
    pod = launcher["runK8sConfig"]["podSpecConfig"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["terminationGracePeriodSeconds"] > 30
    assert "initContainers" not in pod, (
        "the chart gives runs those of the deployment; twice is refused"
    )
    assert launcher["securityContext"] == deployment["securityContext"]
    assert deployment["includeConfigInLaunchedRuns"]["enabled"] is True
    written = {"/opt/dagster/storage", "/opt/kernels", "/var/lib/deltaforge", "/tmp"}
    assert written <= {mount["mountPath"] for mount in deployment["volumeMounts"]}
    for part in (deployment, values["dagsterDaemon"], values["dagsterWebserver"]):
        assert part["podSecurityContext"]["runAsUser"] == 1000
        assert part["securityContext"] == {
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
        declared = {volume["name"] for volume in part["volumes"]}
        assert {mount["name"] for mount in part["volumeMounts"]} <= declared
        assert part["resources"].keys() == {"requests", "limits"}
    assert "USER 1000:1000" in (DOCKER / "Dockerfile").read_text()
