"""Our Helm chart: what Helm makes of it, and what Kubernetes' schemas say of that.

Helm comes from `PATH`, or is built from its Go module, which takes minutes. The schemas are those of the package
`kubernetes-validate`, of 100 MB, which uv fetches for these tests alone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from deltaforge_dagster.folders import user_cache
from tests.deploy.test_values import DEPLOY
from tests.docker.compose import DOCKER, ROOT, read

pytestmark = [pytest.mark.soak("charts"), pytest.mark.timeout(3000)]

HELM = "helm.sh/helm/v3/cmd/helm@v3.19.5"
VALIDATE = "kubernetes-validate==1.37.0"
KUBERNETES = "1.34"
CHART = DEPLOY / "chart"
VERSION = ("--kube-version", f"{KUBERNETES}.0")
JOURNAL = ("--set", "settings.journalUrl=s3://bucket/folder")
ELSEWHERE = ("--set", "spark.enabled=false", "--set", "settings.sparkRemote=sc://spark:15002")
MONITORED = ("--set", "serviceMonitor.enabled=true", "--set", "serviceMonitor.labels.release=p")


@pytest.fixture(scope="module")
def helm() -> str:
    """The program, built once for this user where none is installed."""
    if installed := shutil.which("helm"):
        return installed
    folder = user_cache() / "helm" / HELM.rpartition("@")[2]
    if not (folder / "helm").exists():
        go = shutil.which("go") or shutil.which("go", path="/usr/local/go/bin")
        assert go is not None, "install Helm 3, or Go 1.24 or newer, from which the test builds it"
        subprocess.run([go, "install", HELM], check=True, env={**os.environ, "GOBIN": str(folder)})
    return str(folder / "helm")


def run(helm: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Helm."""
    return subprocess.run([helm, *arguments], check=False, capture_output=True, text=True)


def rendered(helm: str, *options: str) -> list[dict[str, Any]]:
    """Return what the chart makes with these values."""
    made = run(helm, "template", "deltaforge", str(CHART), *VERSION, *options)
    assert made.returncode == 0, made.stderr
    return [document for document in yaml.safe_load_all(made.stdout) if document]


def validate(path: Path, documents: list[dict[str, Any]]) -> None:
    """Compare objects with Kubernetes' schemas."""
    path.write_text(yaml.safe_dump_all(documents))
    command = ["-m", "uv", "tool", "run", "--from", VALIDATE, "kubernetes-validate"]
    checked = subprocess.run(
        [sys.executable, *command, "--version", KUBERNETES, "--strict", str(path)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_lint(helm: str) -> None:
    """Helm finds nothing that it would warn of."""
    linted = run(helm, "lint", "--strict", str(CHART), *JOURNAL)
    assert linted.returncode == 0, linted.stdout + linted.stderr


@pytest.mark.parametrize("options", [(), ELSEWHERE, MONITORED], ids=["whole", "spark", "monitor"])
def test_kubernetes_accepts_it(helm: str, tmp_path: Path, options: tuple[str, ...]) -> None:
    """Every object is one of its version, without unknown fields; the monitor, of Prometheus' operator, names its token."""
    documents = rendered(helm, *JOURNAL, *options)
    monitors = [one for one in documents if one["kind"] == "ServiceMonitor"]
    validate(tmp_path / "rendered.yaml", [one for one in documents if one not in monitors])
    assert len(monitors) == (options is MONITORED)
    for monitor in monitors:
        (endpoint,) = monitor["spec"]["endpoints"]
        assert endpoint["authorization"]["credentials"] == {
            "name": "deltaforge-api",
            "key": "DELTAFORGE_API_TOKEN",
        }
        assert monitor["metadata"]["labels"]["release"] == "p"


def test_containers_have_what_the_compose_file_gives_them(helm: str) -> None:
    """The same commands; not root, nothing writable but volumes, limits and probes, secrets only by reference."""
    documents = rendered(helm, *JOURNAL)
    (settings,) = [one["data"] for one in documents if one["kind"] == "ConfigMap"]
    assert settings == {
        "DELTAFORGE_JOURNAL_URL": "s3://bucket/folder",
        "DELTAFORGE_SPARK_REMOTE": "sc://deltaforge-spark:15002",
    }
    services = read({"POSTGRES_PASSWORD": "p", "DELTAFORGE_API_TOKEN": "t"}, "compose.yaml")
    deployments = {
        one["metadata"]["name"]: one["spec"]["template"]["spec"]
        for one in documents
        if one["kind"] == "Deployment"
    }
    assert deployments.keys() == {"deltaforge-api", "deltaforge-spark"}
    for name, pod in deployments.items():
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        (container,) = pod["containers"]
        given = container["command"]
        named = services["services"][container["name"]]["command"]
        assert [word for word in named if word not in given] == [], name
        for one in (container, *pod["initContainers"]):
            assert one["securityContext"]["readOnlyRootFilesystem"] is True
            assert one["resources"].keys() == {"requests", "limits"}
        written = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert {"/opt/kernels", "/var/lib/deltaforge", "/opt/dagster/storage", "/tmp"} <= written
        assert {"startupProbe", "livenessProbe", "readinessProbe"} <= container.keys()
        assert all(
            "valueFrom" in one or one["name"] == "SPARK_DAEMON_MEMORY" for one in container["env"]
        )
    image = (DOCKER / "Dockerfile").read_text()
    assert "NUMBA_CACHE_DIR=/opt/kernels" in image
    assert "DELTAFORGE_HOME=/var/lib/deltaforge" in image


def test_a_run_is_a_pod_that_kubernetes_accepts(tmp_path: Path) -> None:
    """The launcher in the image makes a Job of our values: not root, what it writes to in volumes, time to end in order."""
    whole, image = (
        set(
            re.findall(
                r"^[a-z0-9-]+==\S+", (folder / "requirements.lock").read_text(), re.MULTILINE
            )
        )
        for folder in (ROOT, DOCKER)
    )
    packages = tmp_path / "packages"
    install = ["-m", "uv", "pip", "install", "--quiet", "--no-deps", "--target", str(packages)]
    subprocess.run([sys.executable, *install, *sorted(image - whole)], check=True)

    printed = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.deploy.run_job"],
        check=True,
        capture_output=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(packages)},
    ).stdout

    job = json.loads(printed)
    validate(tmp_path / "job.yaml", [job])
    pod = job["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["terminationGracePeriodSeconds"] == 40
    (container,), (kernels,) = pod["containers"], pod["initContainers"]
    for one in (container, kernels):
        assert one["securityContext"]["readOnlyRootFilesystem"] is True
    written = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {"/opt/kernels", "/var/lib/deltaforge", "/opt/dagster/storage", "/tmp"} <= written
    assert {"configMapRef": {"name": "deltaforge-settings"}} in container["envFrom"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ((), "settings.journalUrl is needed"),
        ((*JOURNAL, "--set", "spark.enabled=false"), "settings.sparkRemote is needed"),
        ((*JOURNAL, "--set", "api.replica=2"), "replica"),
        (("--set", "settings.journalUrl=/folder"), "journalUrl"),
    ],
)
def test_what_cannot_work_is_refused(helm: str, options: tuple[str, ...], problem: str) -> None:
    """Before anything is installed, by name."""
    refused = run(helm, "template", "deltaforge", str(CHART), *VERSION, *options)

    assert refused.returncode != 0
    assert problem in refused.stderr
