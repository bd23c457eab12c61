"""Makes a running Dagster reload the pipelines after one was created, changed or removed.

Dagster loads definitions when it loads a code location. Its webserver reloads code locations on
request (GraphQL mutation `reloadWorkspace`); the daemon then detects that a code server has
reloaded.
"""

from __future__ import annotations

import threading

from deltaforge_dagster.config.secrets import mask

_SECONDS = 60.0

_MUTATION = """
mutation {
  reloadWorkspace {
    __typename
    ... on PythonError { message }
    ... on Workspace {
      locationEntries { name locationOrLoadError { __typename ... on PythonError { message } } }
    }
  }
}
"""


class DagsterReload:
    """Reloads the code locations of one webserver, one request at a time.

    Args:
        url: URL of the webserver; None if none is configured.
    """

    def __init__(self, url: str | None) -> None:
        self._url = None if url is None else url.rstrip("/")
        self._lock = threading.Lock()

    def __call__(self) -> str:
        """Reload, and return the result in one sentence, even if the webserver is unreachable."""
        if self._url is None:
            return (
                "no webserver is configured (DELTAFORGE_DAGSTER_URL): Dagster shows the change "
                "once its code location is reloaded"
            )
        import httpx  # noqa: PLC0415 - code servers load this module

        with self._lock:
            try:
                answer = httpx.post(
                    f"{self._url}/graphql", json={"query": _MUTATION}, timeout=_SECONDS
                )
                answer.raise_for_status()
                problem = _problem(answer.json())
            except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
                problem = mask(str(error)) or type(error).__name__
        if problem is None:
            return "Dagster has reloaded its code locations"
        return f"Dagster did not reload; reload its code location manually: {problem}"


def _problem(answer: dict[str, dict[str, dict[str, object]]]) -> str | None:
    """Return the error that the webserver's response reports, None if there is none."""
    reloaded = answer["data"]["reloadWorkspace"]
    if reloaded["__typename"] != "Workspace":
        return str(reloaded.get("message", reloaded["__typename"]))
    code_locations = reloaded["locationEntries"]
    assert isinstance(code_locations, list)
    for code_location in code_locations:
        location = code_location["locationOrLoadError"]
        if location is not None and location["__typename"] == "PythonError":
            return f"{code_location['name']}: {location['message']}"
    return None
