"""Dagster's webserver of a deployment, asked by GraphQL over HTTP for what its UI asks for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dagster as dg
import httpx

from deltaforge_dagster.installation.process import free_port
from tests.e2e.deployment import Deployment, eventually

MODULE = "deltaforge_dagster.definitions"

ASSET_JOB = "__ASSET_JOB"
"""Dagster's own job of all assets, which the UI launches for a *Materialize* and for a check."""

_BACKFILL = """
mutation ($asked: LaunchBackfillParams!) {
  launchPartitionBackfill(backfillParams: $asked) {
    __typename
    ... on LaunchBackfillSuccess { backfillId }
    ... on PythonError { message }
    ... on PartitionKeysNotFoundError { message }
    ... on UnauthorizedError { message }
  }
}
"""

_RUNS = """
mutation ($asked: [ExecutionParams!]!) {
  launchMultipleRuns(executionParamsList: $asked) {
    __typename
    ... on PythonError { message }
    ... on LaunchMultipleRunsResult {
      launchMultipleRunsResult {
        __typename
        ... on LaunchRunSuccess { run { runId } }
        ... on PythonError { message }
        ... on UnauthorizedError { message }
      }
    }
  }
}
"""

_RELOAD = """
mutation ($location: String!) {
  reloadRepositoryLocation(repositoryLocationName: $location) {
    __typename
    ... on WorkspaceLocationEntry { locationOrLoadError { __typename ... on PythonError { message } } }
    ... on PythonError { message }
  }
}
"""

_REEXECUTION = """
mutation ($asked: ReexecutionParams!) {
  launchPipelineReexecution(reexecutionParams: $asked) {
    __typename
    ... on LaunchRunSuccess { run { runId } }
    ... on PythonError { message }
    ... on UnauthorizedError { message }
  }
}
"""

_OF_A_BACKFILL = """
query ($id: String!) {
  partitionBackfillOrError(backfillId: $id) {
    __typename
    ... on PartitionBackfill { status runs(limit: 100) { runId } error { message } }
    ... on PythonError { message }
  }
}
"""

_OF_A_RUN = """
query ($id: ID!) {
  runOrError(runId: $id) {
    __typename
    ... on Run { status }
  }
}
"""


@dataclass(frozen=True)
class Webserver:
    """A webserver that answers.

    Attributes:
        url: Its address.
        seconds: How long something that was asked for may take.
        location: The code location of the definitions.
    """

    url: str
    seconds: float = 600.0
    location: str = MODULE

    @classmethod
    def of(cls, deployment: Deployment) -> Webserver:
        """Start the webserver of a deployment, and wait until it has loaded the pipelines."""
        port = str(free_port())
        deployment.spawn("-m", "dagster_webserver", "-h", "127.0.0.1", "-p", port, "-m", MODULE)
        made = cls(f"http://127.0.0.1:{port}")
        eventually(made._answers, seconds=made.seconds, what="the webserver", every=0.3)
        return made

    def backfill(self, assets: Iterable[dg.AssetKey], partitions: Iterable[str]) -> list[str]:
        """Launch a backfill, and return the ids of its runs once it has ended."""
        return self.backfilled(self.begin_backfill(assets, partitions))

    def begin_backfill(self, assets: Iterable[dg.AssetKey], partitions: Iterable[str]) -> str:
        """Launch a backfill, which Dagster begins within half a minute, and return its id."""
        asked = {
            "assetSelection": [{"path": list(key.path)} for key in assets],
            "partitionNames": list(partitions),
            "tags": [],
        }
        made = self._ask(_BACKFILL, asked=asked)["launchPartitionBackfill"]
        assert made["__typename"] == "LaunchBackfillSuccess", made
        return str(made["backfillId"])

    def backfilled(self, backfill: str) -> list[str]:
        """Return the ids of a backfill's runs once it has ended."""

        def ended() -> list[str]:
            found = self._ask(_OF_A_BACKFILL, id=backfill)["partitionBackfillOrError"]
            assert found["__typename"] == "PartitionBackfill", found
            if found["status"] in {"REQUESTED", "FAILING", "CANCELING"}:
                return []
            assert found["runs"], found
            return [run["runId"] for run in found["runs"]]

        runs: list[str] = eventually(ended, seconds=self.seconds, what="the end of the backfill")
        return runs

    def runs(self, job: str, chosen: Sequence[tuple[dg.AssetKey, str]]) -> list[str]:
        """Launch a run for each asset and partition, and return their ids once they have ended."""
        return self._launch([self._params(job, [asset], partition) for asset, partition in chosen])

    def run(
        self,
        job: str,
        assets: Sequence[dg.AssetKey] = (),
        partition: str | None = None,
        *,
        tags: Mapping[str, str] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> str:
        """Launch one run, as *Materialize* and the launchpad do, and return its id once it has ended."""
        params = self._params(job, assets, partition, tags)
        params["runConfigData"] = json.dumps(config or {})
        return self._launch([params])[0]

    def execute(self, check: dg.AssetCheckKey) -> str:
        """Launch the run of one check, as its *Execute* does, and return its id once it has ended."""
        params = self._params(ASSET_JOB, [])
        params["selector"] |= {
            "assetSelection": [],
            "assetCheckSelection": [
                {"assetKey": {"path": list(check.asset_key.path)}, "name": check.name}
            ],
        }
        return self._launch([params])[0]

    def _params(
        self,
        job: str,
        assets: Sequence[dg.AssetKey],
        partition: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        all_tags = {**(tags or {}), **({"dagster/partition": partition} if partition else {})}
        chosen = [{"path": list(asset.path)} for asset in assets]
        return {
            "mode": "default",
            "executionMetadata": {
                "tags": [{"key": key, "value": value} for key, value in all_tags.items()]
            },
            "runConfigData": "{}",
            "selector": {
                "repositoryLocationName": self.location,
                "repositoryName": "__repository__",
                "pipelineName": job,
                **({"assetSelection": chosen, "assetCheckSelection": []} if chosen else {}),
            },
        }

    def _launch(self, asked: Sequence[dict[str, Any]]) -> list[str]:
        made = self._ask(_RUNS, asked=asked)["launchMultipleRuns"]
        assert made["__typename"] == "LaunchMultipleRunsResult", made
        results = made["launchMultipleRunsResult"]
        assert {one["__typename"] for one in results} == {"LaunchRunSuccess"}, results
        return [self._ended(one["run"]["runId"]) for one in results]

    def reload(self) -> None:
        """Reload the code location, as the UI's *Reload* does."""
        answer = self._ask(_RELOAD, location=self.location)["reloadRepositoryLocation"]
        assert answer["__typename"] == "WorkspaceLocationEntry", answer
        assert answer["locationOrLoadError"]["__typename"] == "RepositoryLocation", answer

    def again(self, run_id: str) -> str:
        """Re-execute a run, all of its steps, and return the new one's id once it has ended."""
        asked = {"parentRunId": run_id, "strategy": "ALL_STEPS"}
        made = self._ask(_REEXECUTION, asked=asked)["launchPipelineReexecution"]
        assert made["__typename"] == "LaunchRunSuccess", made
        return self._ended(made["run"]["runId"])

    def assets(self) -> list[dg.AssetKey]:
        """Return the keys of the assets that the UI shows."""
        nodes = self._ask("{ assetNodes { assetKey { path } } }")["assetNodes"]
        return [dg.AssetKey(node["assetKey"]["path"]) for node in nodes]

    def status(self, run_id: str) -> str:
        """Return the status of a run."""
        return str(self._ask(_OF_A_RUN, id=run_id)["runOrError"]["status"])

    def _ended(self, run_id: str) -> str:
        def ended() -> bool:
            return self.status(run_id) in {"SUCCESS", "FAILURE", "CANCELED"}

        eventually(ended, seconds=self.seconds, what=f"the end of run {run_id}")
        return run_id

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/server_info", timeout=30).status_code == 200
        except httpx.HTTPError:
            return False

    def _ask(self, query: str, **variables: object) -> dict[str, Any]:
        answer = httpx.post(
            f"{self.url}/graphql",
            json={"query": query, "variables": variables},
            timeout=self.seconds,
        )
        found: dict[str, Any] = answer.json()
        assert "errors" not in found, found["errors"]
        data: dict[str, Any] = found["data"]
        return data
