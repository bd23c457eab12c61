"""Tests that hooks get one message when a problem begins and one when it is over, with a real server."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from deltaforge_dagster.assets.lake_tables import KnownTable
from deltaforge_dagster.assets.names import PIPELINE_TAG, RUN_TAG, SharedNames, asset_key
from deltaforge_dagster.assets.reconcile import reconciled_key
from deltaforge_dagster.config.file.load import LoadedPipeline, load_pipeline
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.definitions import build_definitions
from deltaforge_dagster.errors import SpecError
from deltaforge_dagster.sensors import alerts
from deltaforge_dagster.sensors.alerts import AlertProblem, notify, problems
from deltaforge_dagster.state.store import StateStore

SECRET = "T0k3n-of-the-hook"

PIPELINE = """\
metadata: {{name: orders, tenant: acme}}
spec:
  source: {{type: postgres, config: {{id: db, dsn: "postgres://app:pw@localhost:1/app", slot: s, publication: p, tables: [public.orders]}}}}
  sinks: [{{type: redis, config: {{id: redis, uri: "redis://localhost:1", stream: orders}}}}]
  engine:
    alerts: {hooks}
"""


class Hooks:
    """A server that records what was posted, and responds as configured.

    Attributes:
        heard: Path and body of each accepted request.
        refusals: How many requests it will answer with an error.
    """

    def __init__(self) -> None:
        self.heard: list[tuple[str, dict[str, Any]]] = []
        self.refusals = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if outer.refusals:
                    outer.refusals -= 1
                    self.send_error(503)
                    return
                outer.heard.append((self.path, json.loads(body)))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def taken(self) -> list[tuple[str, dict[str, Any]]]:
        """Return and forget the requests received so far."""
        heard, self.heard = self.heard, []
        return heard

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hooks]:
    """A server for hooks; the pause between attempts is short."""
    monkeypatch.setattr(alerts, "_PAUSE_SECONDS", 0.01)
    server = Hooks()
    yield server
    server.close()


@pytest.fixture
def loaded(tmp_path: Path, hooks: Hooks) -> LoadedPipeline:
    """A pipeline with two hooks."""
    both = json.dumps(
        [
            {"type": "webhook", "url": f"{hooks.url}/json/{SECRET}"},
            {"type": "slack", "url": f"{hooks.url}/slack/{SECRET}"},
        ]
    )
    path = tmp_path / "pipelines" / "orders.yaml"
    path.parent.mkdir()
    path.write_text(PIPELINE.format(hooks=both))
    return load_pipeline(path)


DOWN = AlertProblem("orders/sinks/redis", "delivered", "ERROR")


def test_once_when_it_begins_and_once_when_it_ends(
    sqlite_store: StateStore, loaded: LoadedPipeline, hooks: Hooks
) -> None:
    """Each hook gets one message for a problem, however long it lasts, and one when it is over."""
    assert notify(sqlite_store, loaded, []) == []
    assert hooks.taken() == []
    for _ in range(3):
        assert notify(sqlite_store, loaded, [DOWN]) == []
    (json_path, body), (slack_path, text) = hooks.taken()
    assert (json_path, slack_path) == (f"/json/{SECRET}", f"/slack/{SECRET}")
    since = body.pop("since")
    what = {
        "pipeline": "orders",
        "tenant": "acme",
        "asset": "orders/sinks/redis",
        "check": "delivered",
    }
    assert body == {"event": "problem", **what, "severity": "ERROR"}
    assert text["text"].startswith(
        ":red_circle: *orders*: `delivered` of `orders/sinks/redis` fails"
    )

    for _ in range(2):
        assert notify(sqlite_store, loaded, []) == []
    (_, body), (_, text) = hooks.taken()
    assert (body["event"], body["since"], body["check"]) == ("recovered", since, "delivered")
    assert "has recovered" in text["text"]

    notify(sqlite_store, loaded, [DOWN])
    assert [body.get("event") for _, body in hooks.taken()] == ["problem", None]


def test_what_could_not_be_sent_is_sent_later(
    sqlite_store: StateStore, loaded: LoadedPipeline, hooks: Hooks
) -> None:
    """A hook that refuses is retried at once and at the next tick; the others are not delayed."""
    hooks.refusals = 2
    assert notify(sqlite_store, loaded, [DOWN]) == []
    assert len(hooks.taken()) == 2

    other = AlertProblem("orders", "run", "ERROR")
    hooks.refusals = 3
    (deaf,) = notify(sqlite_store, loaded, [DOWN, other])
    assert deaf == "engine.alerts[0] (webhook)"
    assert [path for path, _ in hooks.taken()] == [f"/slack/{SECRET}"]
    assert notify(sqlite_store, loaded, [DOWN, other]) == []
    ((path, body),) = hooks.taken()
    assert (path, body["check"]) == (f"/json/{SECRET}", "run")


def test_secrets_stay_secret(
    sqlite_store: StateStore, loaded: LoadedPipeline, hooks: Hooks, caplog: pytest.LogCaptureFixture
) -> None:
    """A hook's URL is in no message, log, store or displayed file; a message quotes no error."""
    hooks.refusals = 100
    with caplog.at_level(0):
        deaf = notify(sqlite_store, loaded, [DOWN])
    assert len(deaf) == 2
    assert "status 503" in str([record.__dict__ for record in caplog.records])
    with sqlite_store.database.read() as connection:
        stored = str(connection.exec_driver_sql("SELECT * FROM df_kv").fetchall())
    shown = loaded.spec.model_dump_json()
    said = str([record.__dict__ for record in caplog.records])
    for text in (str(deaf), said, stored, shown, repr(loaded.spec)):
        assert SECRET not in text


def test_a_hook_that_comes_later_hears_of_what_fails(
    sqlite_store: StateStore, loaded: LoadedPipeline, hooks: Hooks, tmp_path: Path
) -> None:
    """Each hook has its own record, and the record of a removed hook is deleted."""
    path = tmp_path / "one.yaml"
    path.write_text(PIPELINE.format(hooks=json.dumps([{"type": "slack", "url": hooks.url}])))
    notify(sqlite_store, loaded, [DOWN])
    hooks.taken()
    notify(sqlite_store, load_pipeline(path), [DOWN])
    assert len(hooks.taken()) == 1
    notify(sqlite_store, loaded, [DOWN])
    assert len(hooks.taken()) == 2


def evaluation(*, passed: bool) -> dg.AssetCheckEvaluation:
    """Return a result of a sink's check."""
    return dg.AssetCheckEvaluation(
        check_name="delivered",
        passed=passed,
        metadata={},
        target_materialization_data=None,
        severity=dg.AssetCheckSeverity.WARN,
        description="password=geheim and a row's value",
        asset_key=asset_key("orders", "redis"),
        blocking=False,
    )


@dg.op
def _work(context: dg.OpExecutionContext) -> None:
    if context.run.tags["fails"] == "yes":
        raise dg.Failure("it failed", allow_retries=False)


@dg.job(executor_def=dg.in_process_executor)
def _live() -> None:
    _work()


def run(instance: dg.DagsterInstance, *, fails: str) -> None:
    """Create an ended live run of the pipeline."""
    tags = {PIPELINE_TAG: "orders", RUN_TAG: "live", "fails": fails}
    _live.execute_in_process(instance=instance, tags=tags, raise_on_error=False)


def test_the_sensor(
    loaded: LoadedPipeline, hooks: Hooks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The sensor finds failing checks and failed runs in Dagster, and sends messages as they change."""
    monkeypatch.setenv("DELTAFORGE_PIPELINES", str(tmp_path / "pipelines"))
    settings = Settings.from_env()
    definitions = build_definitions(settings)
    sensor = definitions.resolve_sensor_def(SharedNames().alerts)
    with dg.DagsterInstance.ephemeral() as instance:

        def ticks() -> list[str]:
            with dg.build_sensor_context(instance=instance) as context:
                sensor(context)
            return [f"{one['event']} {one['check']}" for _, one in hooks.taken() if "event" in one]

        assert ticks() == []
        instance.report_runless_asset_event(evaluation(passed=False))
        run(instance, fails="yes")
        assert problems(instance, loaded) == [
            AlertProblem("orders/sinks/redis", "delivered", "WARN"),
            AlertProblem("orders", "run", "ERROR"),
        ]
        assert ticks() == ["problem delivered", "problem run"]
        assert ticks() == []
        run(instance, fails="no")
        assert ticks() == ["recovered run"]
        instance.report_runless_asset_event(evaluation(passed=True))
        assert ticks() == ["recovered delivered"]


def test_nobody_to_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without hooks there is no sensor."""
    (tmp_path / "orders.yaml").write_text(PIPELINE.format(hooks="[]"))
    monkeypatch.setenv("DELTAFORGE_PIPELINES", str(tmp_path))
    names = {one.name for one in build_definitions(Settings.from_env()).sensors or []}
    assert SharedNames().alerts not in names


@pytest.mark.parametrize(
    "url", ["", "ftp://host/x", "hooks.example.com", "${NO_SUCH_VARIABLE_SET}"]
)
def test_an_address_that_is_none(url: str, tmp_path: Path) -> None:
    """An invalid URL is a problem of the file, whose message does not quote it."""
    path = tmp_path / "orders.yaml"
    path.write_text(PIPELINE.format(hooks=json.dumps([{"type": "webhook", "url": url}])))
    with pytest.raises(SpecError, match=r"engine\.alerts") as raised:
        load_pipeline(path)
    assert not url or url.startswith("$") or url not in str(raised.value)


def test_a_table_that_differs(tmp_path: Path, instance: dg.DagsterInstance) -> None:
    """Its check counts like the pipeline's own ones."""
    path = tmp_path / "orders.yaml"
    path.write_text(PIPELINE.format(hooks="[]"))
    loaded = load_pipeline(path)
    table = KnownTable("copy", ("public", "orders"))
    key = reconciled_key("orders", table)
    instance.report_runless_asset_event(
        dg.AssetCheckEvaluation(
            asset_key=key.asset_key,
            check_name=key.name,
            passed=False,
            severity=dg.AssetCheckSeverity.ERROR,
        )
    )

    assert problems(instance, loaded) == []
    assert problems(instance, loaded, [table]) == [
        AlertProblem("orders/copy/public/orders_copy", "reconciled", "ERROR")
    ]
