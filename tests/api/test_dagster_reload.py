"""Tests of responses when Dagster cannot reload; `tests/e2e` tests successful reloads with `deltaforge dev`."""

from __future__ import annotations

from collections.abc import Callable

from deltaforge_dagster.installation.process import free_port
from deltaforge_dagster.resources.dagster_reload import DagsterReload
from tests.api.conftest import Api, document


def test_without_a_webserver() -> None:
    """The response names the environment variable for the webserver."""
    assert "DELTAFORGE_DAGSTER_URL" in DagsterReload(None)()


def test_a_webserver_that_is_not_there(serve: Callable[..., Api]) -> None:
    """The pipeline is created anyway; the response says what to do, without the password in the URL."""
    api = serve(dagster_url=f"http://me:geheim@127.0.0.1:{free_port()}")
    made = api.client.post("/pipelines", json=document("orders"))
    assert made.status_code == 200
    assert made.json()["dagster"].startswith("Dagster did not reload")
    assert "geheim" not in made.text


def test_an_address_of_something_else(serve: Callable[..., Api]) -> None:
    """The response reports a server that is not a Dagster webserver."""
    other = serve()
    said = DagsterReload(str(other.client.base_url))()
    assert said.startswith("Dagster did not reload")
    assert "404" in said
