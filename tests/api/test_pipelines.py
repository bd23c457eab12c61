"""Tests of the pipeline routes: list, create, change and delete, and the resulting state store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.resources.platform import installed_pipelines
from deltaforge_dagster.sinks.lake.config import IcebergSinkConfig
from deltaforge_dagster.sources.postgres.source_type import PostgresSourceConfig
from deltaforge_dagster.state.records import Failure
from tests.api.conftest import Api, document
from tests.state.make import capture, expire, position

FILE = """\
metadata: {name: filed, tenant: acme, labels: {team: billing, "a:b": "c=d"}}
spec:
  source:
    type: postgres
    config: {id: db, dsn: "postgres://u:geheim@localhost/d", slot: s, publication: p, tables: [t]}
  sinks:
    - {type: redis, config: {id: redis, uri: "redis://localhost", stream: s}}
"""


def loaded(api: Api, name: str) -> LoadedPipeline:
    """Return a pipeline as Dagster's definitions would load it."""
    (found,) = [one for one in installed_pipelines(api.context.settings) if one.name == name]
    assert isinstance(found, LoadedPipeline)
    return found


def dsn(pipeline: LoadedPipeline) -> str:
    """Return the connection string of the source, with its password."""
    config = pipeline.spec.spec.source.config
    assert isinstance(config, PostgresSourceConfig)
    return config.dsn.get_secret_value()


def desired(api: Api, name: str) -> str:
    """Return the desired state of a pipeline."""
    row = api.store.pipelines.get(name)
    assert row is not None
    return row.desired_state


def refused(api: Api, method: str, path: str, json: Any = None) -> tuple[int, str]:
    """Return status and code of an error response."""
    answer = api.client.request(method, path, json=json)
    body = answer.json()
    assert body.keys() == {"error", "code", "message"}
    assert body["error"] == body["message"] != ""
    assert "geheim" not in answer.text
    return answer.status_code, body["code"]


def test_a_pipeline_that_is_made_is_kept(api: Api) -> None:
    """A created pipeline starts at once and is loaded with the files; no response has its passwords."""
    made = api.create("orders")
    assert (made["name"], made["status"]) == ("orders", "running")
    assert made["spec"]["metadata"]["tenant"] == "acme"
    assert made["spec"]["spec"]["source"]["config"]["dsn"] == "postgres://app:***@localhost:1/app"
    assert "DELTAFORGE_DAGSTER_URL" in made["dagster"]

    assert "geheim" in dsn(loaded(api, "orders"))
    assert desired(api, "orders") == "running"
    assert [row.sink for row in api.store.checkpoints.read("orders").values()] == ["redis"]

    shown = api.client.get("/pipelines/orders")
    assert "geheim" not in shown.text
    assert {key: shown.json()[key] for key in ("name", "status", "spec")} == {
        key: made[key] for key in ("name", "status", "spec")
    }
    assert shown.json()["ops"] == {
        "lag_seconds": 0.0,
        "dlq_entries": 0,
        "sink_errors": {},
        "source_log": None,
        "confirmed_early": None,
        "verified": [],
        "uptime_seconds": None,
        "checkpoints": shown.json()["ops"]["checkpoints"],
    }
    assert [one["sink_id"] for one in shown.json()["ops"]["checkpoints"]] == ["redis"]


def test_tables_of_a_lake(api: Api) -> None:
    """A created pipeline may write tables; credentials are kept, and are in no response."""
    config = {
        "id": "lake",
        "catalog_properties": {"type": "rest", "uri": "http://c", "token": "geheim"},
        "spark": {"fs.s3a.secret.key": "geheim"},
    }

    made = api.create("orders", sinks=[{"type": "iceberg", "config": config}])

    assert "geheim" not in str(made)
    (sink,) = loaded(api, "orders").spec.spec.sinks
    assert isinstance(sink.config, IcebergSinkConfig)
    kept = (*sink.config.catalog_properties.values(), *sink.config.spark.values())
    assert [one.get_secret_value() for one in kept] == ["rest", "http://c", "geheim", "geheim"]


def test_names_are_taken_once(api: Api) -> None:
    """A name is refused if a created pipeline or a file has it."""
    api.file("filed", FILE)
    api.create("orders")
    for name in ("orders", "filed"):
        assert refused(api, "POST", "/pipelines", document(name)) == (
            409,
            "PIPELINE_ALREADY_EXISTS",
        )


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "spec"),
        ([], "object"),
        (document("a") | {"metadata": {"name": "no name", "tenant": "a"}}, "metadata.name"),
        (document("a", commit_policy={"mode": "quorum", "quorum": 2}), "quorum"),
        (
            document("a", processors=[{"type": "python", "function": "m:f", "path": "x"}]),
            "absolute",
        ),
    ],
)
def test_a_body_that_is_no_pipeline(api: Api, body: Any, says: str) -> None:
    """Every problem is reported with its place, and nothing is stored; `validate` reports the same."""
    assert refused(api, "POST", "/pipelines", body) == (400, "INVALID_REQUEST")
    assert says in api.client.post("/pipelines", json=body).json()["error"]
    assert api.store.pipelines.documents() == []
    answer = api.client.post("/validate", json=body)
    assert answer.status_code == 400


def test_a_body_that_is_no_json(api: Api) -> None:
    """The error has the place, but not the text, which may contain a secret."""
    answer = api.client.post("/pipelines", content=b'{"dsn": "geheim"')
    assert answer.status_code == 400
    assert answer.json()["code"] == "INVALID_REQUEST"
    assert "geheim" not in answer.text


SCRIPT = {"type": "javascript", "id": "js", "inline": "function processBatch("}


def test_a_pipeline_that_cannot_be_built(api: Api) -> None:
    """A script that does not compile has status 500, and nothing is stored."""
    body = document("orders", processors=[SCRIPT])
    assert refused(api, "POST", "/pipelines", body) == (500, "BUILD_FAILED")
    assert api.store.pipelines.documents() == []
    answer = api.client.post("/validate", json=body)
    assert (answer.status_code, answer.json()["valid"]) == (400, False)
    assert "spec.processors[0]" in answer.json()["error"]


def test_validate_makes_nothing(api: Api) -> None:
    """The response describes the pipeline and warns about unknown fields."""
    answer = api.client.post("/validate", json=document("orders", colour="red"))
    assert answer.status_code == 200
    (warning,) = answer.json().pop("warnings")
    assert warning.startswith("spec.colour")
    assert {key: one for key, one in answer.json().items() if key != "warnings"} == {
        "valid": True,
        "pipeline": "orders",
        "source_type": "postgres",
        "sink_count": 1,
    }
    assert api.store.pipelines.documents() == []
    assert api.client.get("/pipelines").json() == []


def test_labels_choose(api: Api) -> None:
    """Labels are given as `key:value`, `key=value` or `key`; all must match."""
    api.file("filed", FILE)
    api.create("orders")

    def found(*labels: str) -> list[str]:
        answer = api.client.get("/pipelines", params={"label": list(labels)})
        return [one["name"] for one in answer.json()]

    assert found() == ["filed", "orders"]
    for label in ("team", "team:billing", "team=billing", "a:b", "a:b:c=d", "a:b=c=d"):
        assert found(label) == ["filed"], label
    assert found("team", "a:b") == ["filed"]
    assert found("team:other") == found("team", "other") == found("") == []


def test_a_patch_is_laid_over(api: Api) -> None:
    """Objects are merged recursively, arrays by index; null removes; masked secrets stay unchanged."""
    api.create("orders", batch={"max_events": 5, "max_bytes": 900})
    api.client.post("/pipelines/orders/stop")
    shown = api.client.get("/pipelines/orders").json()["spec"]
    second = {
        "type": "redis",
        "config": {"id": "more", "uri": "redis://localhost:1", "stream": "m"},
    }
    shown["spec"]["sinks"].append(second)
    shown["spec"]["batch"] = {"max_events": 7, "max_bytes": None}

    answer = api.client.patch("/pipelines/orders", json=shown)

    assert answer.status_code == 200, answer.text
    assert answer.json()["status"] == "running"
    assert desired(api, "orders") == "running"
    spec = loaded(api, "orders").spec.spec
    assert "geheim" in dsn(loaded(api, "orders"))
    assert [sink.config.id for sink in spec.sinks] == ["redis", "more"]
    assert spec.batch is not None
    assert (spec.batch.max_events, spec.batch.max_bytes) == (7, None)
    assert sorted(api.store.checkpoints.read("orders")) == ["more", "redis"]

    answer = api.client.patch("/pipelines/orders", json={"spec": {"sinks": [None]}})
    assert answer.status_code == 200, answer.text
    assert list(api.store.checkpoints.read("orders")) == [
        "more"
    ]  # the removed sink has no checkpoint


def test_a_patch_that_is_refused_changes_nothing(api: Api) -> None:
    """Refused are another name, an invalid value, a pipeline of a file, and an unknown pipeline."""
    api.file("filed", FILE)
    api.create("orders")
    before = api.store.pipelines.document("orders")
    rename = {"metadata": {"name": "other"}}
    wrong = {"spec": {"batch": {"max_events": "many"}}}
    assert refused(api, "PATCH", "/pipelines/orders", rename) == (400, "PIPELINE_NAME_MISMATCH")
    assert refused(api, "PATCH", "/pipelines/orders", wrong) == (400, "INVALID_REQUEST")
    assert refused(api, "PATCH", "/pipelines/filed", {}) == (409, "PIPELINE_HAS_FILE")
    assert refused(api, "PATCH", "/pipelines/none", {}) == (404, "PIPELINE_NOT_FOUND")
    assert api.store.pipelines.document("orders") == before


def test_a_pipeline_is_removed(api: Api) -> None:
    """Checkpoints, journal and dead letters are deleted; a new pipeline of the same name is independent."""
    api.create("orders")
    api.store.pipelines.set_start("orders", position(0))
    before = api.store.pipelines.get("orders")
    lease = api.store.leases.acquire("orders", "run", 60)
    assert before is not None
    assert lease is not None
    # The pipeline of `make` has the same name.
    capture(api.store, lease, 1)
    expire(api.store)

    assert api.client.delete("/pipelines/orders").status_code == 204

    assert refused(api, "GET", "/pipelines/orders") == (404, "PIPELINE_NOT_FOUND")
    assert refused(api, "DELETE", "/pipelines/orders") == (404, "PIPELINE_NOT_FOUND")
    assert api.store.pipelines.read() == []
    assert (api.store.checkpoints.read("orders"), api.store.segments.read("orders")) == ({}, [])
    assert installed_pipelines(api.context.settings) == []

    api.create("orders")
    again = api.store.pipelines.get("orders")
    assert again is not None
    assert again.uid != before.uid
    assert (again.next_segment, again.next_range, again.start_position) == (2, 2, None)
    new = api.store.leases.acquire("orders", "run", 60)
    assert new is not None
    assert new.epoch > lease.epoch, "the old run could write for the new pipeline"


def test_a_run_that_does_not_end_keeps_its_pipeline(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deletion and reset are refused, and the pipeline's desired state is stopped."""
    monkeypatch.setattr("deltaforge_dagster.pipeline.control.user_requests._END_SECONDS", 0.0)
    api.create("orders")
    assert api.store.leases.acquire("orders", "run", 600) is not None
    assert refused(api, "DELETE", "/pipelines/orders/checkpoint") == (409, "CONFLICT")
    assert refused(api, "DELETE", "/pipelines/orders") == (409, "PIPELINE_BUSY")
    assert desired(api, "orders") == "stopped"
    assert api.client.get("/pipelines/orders").json()["status"] == "stopped"


def test_a_file_and_a_document_of_one_name(api: Api) -> None:
    """Both are broken until one is removed; removing the document keeps the state of the file."""
    api.create("filed")
    api.file("filed", FILE)
    (only,) = api.client.get("/pipelines").json()
    assert (only["status"], only["spec"]) == ("failed", None)
    assert "also used by a pipeline that the state store keeps" in only["error"]
    assert refused(api, "POST", "/pipelines/filed/pause") == (409, "PIPELINE_BROKEN")
    assert refused(api, "PATCH", "/pipelines/filed", {}) == (409, "PIPELINE_BROKEN")

    assert api.client.delete("/pipelines/filed").status_code == 204

    assert api.client.get("/pipelines/filed").json()["status"] == "running"
    assert desired(api, "filed") == "running"
    assert refused(api, "DELETE", "/pipelines/filed") == (409, "PIPELINE_HAS_FILE")


def test_a_file_is_read_again_when_it_changes(api: Api) -> None:
    """Responses show the file as it is now, even if it is broken or removed."""
    path = api.file("filed", FILE)
    assert api.client.get("/pipelines/filed").json()["status"] == "running"
    path.write_text(FILE.replace("slot: s,", ""))
    broken = api.client.get("/pipelines/filed").json()
    assert (broken["status"], broken["spec"], broken["ops"]) == ("failed", None, None)
    assert f"{path}:5: spec.source.config.slot: is required" in broken["error"]
    path.unlink()
    assert refused(api, "GET", "/pipelines/filed") == (404, "PIPELINE_NOT_FOUND")


def test_pause_stop_and_resume(api: Api) -> None:
    """Each route sets the desired state, even for a file that has never run."""
    api.file("filed", FILE)
    for call, status in (("pause", "paused"), ("stop", "stopped"), ("resume", "running")):
        answer = api.client.post(f"/pipelines/filed/{call}")
        assert (answer.status_code, answer.json()["status"]) == (200, status)
        assert desired(api, "filed") == status
        assert refused(api, "POST", f"/pipelines/none/{call}") == (404, "PIPELINE_NOT_FOUND")


def test_a_failed_pipeline(api: Api) -> None:
    """A failed pipeline is unhealthy, with its problems, until it is fixed or stopped."""
    api.create("good")
    assert api.client.get("/health").json() == {"status": "healthy", "pipelines": 1}
    api.create("orders")
    problem = "the slot is gone; postgres://app:geheim@host/db"
    api.store.pipelines.set_failure("orders", Failure("tick", "checkpoint", problem, 1.0))

    answer = api.client.get("/health")
    assert answer.status_code == 503
    (wrong,) = answer.json().pop("problems")["orders"]
    assert (wrong["subject"], wrong["severity"], wrong["since"]) == ("source", "error", 1.0)
    assert "geheim" not in answer.text
    assert answer.json()["failed_pipelines"] == ["orders"]
    shown = api.client.get("/pipelines/orders").json()
    assert shown["status"] == "failed"
    assert shown["error"] == "the slot is gone; postgres://app:***@host/db"
    for path in ("/readyz", "/ready"):
        ready = api.client.get(path).json()
        assert [one["status"] for one in ready["pipelines"]] == ["running", "failed"]

    api.client.post("/pipelines/orders/stop")
    assert api.client.get("/health").status_code == 200


def test_the_server_itself(api: Api) -> None:
    """Liveness, version, log filter and the OpenAPI document are served; errors have one shape."""
    assert api.client.get("/healthz").text == "ok"
    assert api.client.get("/version").json().keys() == {"version"}
    assert api.client.get("/log-level").json()["level"]
    assert "/pipelines/{name}/pause" in api.client.get("/openapi.json").json()["paths"]
    assert refused(api, "GET", "/nothing") == (404, "NOT_FOUND")
    assert refused(api, "PUT", "/pipelines") == (405, "METHOD_NOT_ALLOWED")


def test_without_the_directory_of_files(api: Api, tmp_path: Path) -> None:
    """A missing directory is an error; it does not look as if pipelines had been removed."""
    (tmp_path / "pipelines").rmdir()
    assert refused(api, "GET", "/pipelines") == (500, "INTERNAL_ERROR")
    assert "DELTAFORGE_PIPELINES" in api.client.get("/readyz").json()["error"]


def test_environment_variables_are_not_expanded(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable is a problem where a value is needed or in a template, elsewhere a warning."""
    monkeypatch.setenv("SHOP", "geheim")
    said = "holds ${SHOP}, which stays as it is: environment variables are expanded in pipeline files only"
    for place, change in (
        ("spec.source.config.dsn", {"dsn": "postgres://app@${SHOP}/app"}),
        ("spec.source.config.publication", {"publication": "${SHOP:-api}"}),
    ):
        wrong = document("orders")
        wrong["spec"]["source"]["config"] |= change
        answer = api.client.post("/pipelines", json=wrong)
        assert answer.status_code == 400
        assert answer.json()["error"].startswith(f"{place}: {said}")
        assert "which is not set" not in answer.json()["error"]
    wrong = document("orders")
    wrong["spec"]["sinks"][0]["config"]["key"] = "${SHOP}"
    assert said in api.client.post("/validate", json=wrong).json()["error"]

    api.create("orders")
    patched = api.client.patch(
        "/pipelines/orders", json={"metadata": {"labels": {"team": "${SHOP}"}}}
    )
    assert patched.status_code == 200, patched.text
    (warning,) = patched.json()["warnings"]
    assert warning.startswith(f"metadata.labels.team: {said}")
    assert "geheim" not in warning
    patched = api.client.patch(
        "/pipelines/orders",
        json={"metadata": {"labels": None}, "spec": {"sinks": [{"config": {"key": "${key.id}"}}]}},
    )
    assert patched.json()["warnings"] == []
