"""Print the Job with which Dagster's launcher for Kubernetes starts a run, with the values of this repository.

Executed with `dagster-k8s` on the path, which the tests' environment lacks. What the chart makes of the values for the launcher
and for the code location is as in Dagster's chart 1.13.
"""

from __future__ import annotations

import json

import yaml
from dagster_k8s.container_context import K8sContainerContext  # type: ignore[import-not-found]
from dagster_k8s.job import DagsterK8sJobConfig, construct_dagster_k8s_job  # type: ignore[import-not-found]
from kubernetes.client import ApiClient  # type: ignore[import-not-found]

from tests.deploy.test_values import DEPLOY


def main() -> None:
    """Print it as JSON."""
    values = yaml.safe_load((DEPLOY / "dagster-values.yaml").read_text())
    (code,) = values["dagster-user-deployments"]["deployments"]
    launcher = values["runLauncher"]["config"]["k8sRunLauncher"]
    of_launcher = {
        "image_pull_policy": launcher["imagePullPolicy"],
        "security_context": launcher["securityContext"],
        "run_k8s_config": {
            "pod_spec_config": launcher["runK8sConfig"]["podSpecConfig"],
            "job_spec_config": launcher["runK8sConfig"]["jobSpecConfig"],
        },
    }
    of_code = {
        "env_config_maps": [source["name"] for source in code["envConfigMaps"]],
        "env_secrets": [source["name"] for source in code["envSecrets"]],
        "volume_mounts": code["volumeMounts"],
        "volumes": code["volumes"],
        "resources": code["resources"],
        "run_k8s_config": {"pod_spec_config": {"init_containers": code["initContainers"]}},
    }
    merged = K8sContainerContext.create_from_config({"k8s": of_launcher}).merge(
        K8sContainerContext.create_from_config({"k8s": of_code})
    )
    image = code["image"]
    config = DagsterK8sJobConfig(
        job_image=f"{image['repository']}:{image['tag']}",
        dagster_home=values["global"]["dagsterHome"],
        instance_config_map="dagster-instance",
        postgres_password_secret=values["global"]["postgresqlSecretName"],
    )
    command = ["dagster", "api", "execute_run", "{}"]
    job = construct_dagster_k8s_job(config, command, "dagster-run", merged.run_k8s_config)
    described = ApiClient().sanitize_for_serialization(job)
    print(json.dumps({**described, "apiVersion": "batch/v1", "kind": "Job"}))  # noqa: T201 - its job


if __name__ == "__main__":
    main()
