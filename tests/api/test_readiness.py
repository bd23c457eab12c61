"""Tests of log lines when the API becomes ready or unready, and when pipelines change status."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from deltaforge_dagster.api.readiness import Readiness
from deltaforge_dagster.state.records import Failure
from tests.api.conftest import Api


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The log records of readiness with level INFO or higher."""
    caplog.set_level(logging.INFO, "deltaforge_dagster.api.readiness")
    return caplog


def said(lines: pytest.LogCaptureFixture, readiness: Readiness) -> list[tuple[str, str]]:
    """Return level and message of the log lines that one check writes."""
    lines.clear()
    readiness.check()
    return [(one.levelname, one.getMessage()) for one in lines.records]


def fields(lines: pytest.LogCaptureFixture) -> dict[str, object]:
    """Return the fields of the last log line."""
    found: dict[str, object] = vars(lines.records[-1])["fields"]
    return found


def test_the_api_turns(api: Api, tmp_path: Path, lines: pytest.LogCaptureFixture) -> None:
    """Becoming ready is one line, becoming unready one line with the reason; nothing is logged in between."""
    readiness = Readiness(api.context)
    assert said(lines, readiness) == [("INFO", "ready")]
    assert said(lines, readiness) == []

    (tmp_path / "pipelines").rmdir()
    assert said(lines, readiness) == [("WARNING", "not ready")]
    assert "DELTAFORGE_PIPELINES" in str(fields(lines)["reason"])
    assert api.client.get("/readyz").status_code == 500
    assert said(lines, readiness) == []

    (tmp_path / "pipelines").mkdir()
    assert said(lines, readiness) == [("INFO", "ready")]
    assert api.client.get("/readyz").status_code == 200


def test_a_pipeline_turns(api: Api, lines: pytest.LogCaptureFixture) -> None:
    """Each change of status is one line with the previous status; a failure is a warning with its reason."""
    readiness = Readiness(api.context)
    readiness.check()
    api.create("orders")
    assert said(lines, readiness) == [("INFO", "the pipeline is running")]
    assert said(lines, readiness) == []

    api.store.pipelines.set_failure(
        "orders", Failure("tick", "checkpoint", "the slot is gone", 1.0)
    )
    assert said(lines, readiness) == [("WARNING", "the pipeline is failed")]
    assert fields(lines) == {
        "pipeline": "orders",
        "tenant": "acme",
        "status": "failed",
        "before": "running",
        "reason": "the slot is gone",
    }
    api.client.post("/pipelines/orders/stop")
    assert said(lines, readiness) == [("INFO", "the pipeline is stopped")]
    assert (fields(lines)["before"], fields(lines)["reason"]) == ("failed", None)

    assert api.client.delete("/pipelines/orders").status_code == 204
    assert said(lines, readiness) == [("INFO", "the pipeline is gone")]
    assert said(lines, readiness) == []


def test_a_file_that_is_broken(api: Api, lines: pytest.LogCaptureFixture) -> None:
    """A broken file makes its pipeline failed; the other pipelines are still logged."""
    readiness = Readiness(api.context)
    api.create("orders")
    api.file("broken", "metadata: {name: broken}")
    messages = said(lines, readiness)
    assert sorted(messages) == [
        ("INFO", "ready"),
        ("INFO", "the pipeline is running"),
        ("WARNING", "the pipeline is failed"),
    ]
