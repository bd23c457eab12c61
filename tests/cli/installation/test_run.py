"""Tests of `deltaforge run` and `replay`, mainly of their error messages."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dagster as dg
import pytest
from sqlalchemy import update
from typer.testing import CliRunner

from deltaforge_dagster.cli.installation import run
from deltaforge_dagster.cli.main import app
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.pipeline.health.health import Health, HealthProblem
from deltaforge_dagster.resources.instance import local_instance
from deltaforge_dagster.resources.platform import Platform
from deltaforge_dagster.state.database.tables import leases
from deltaforge_dagster.state.metric_families import SCHEMA_EVENTS
from deltaforge_dagster.state.store import StateStore
from tests.fix_spark import SparkAddress
from tests.state.make import NAME, capture, deliver, held

PIPELINE = """\
metadata: {name: shop, tenant: acme}
spec:
  source:
    type: postgres
    config: {id: s, dsn: "postgres://u:sekret@127.0.0.1:1/db", slot: s, publication: p, tables: [public.t]}
  sinks: [{type: file, config: {id: out, path: out.jsonl}}]
"""

TWO_SINKS = """\
metadata: {{name: shop, tenant: acme}}
spec:
  source:
    type: turso
    config:
      {{id: s, url: "{folder}/shop.db", tables: [t], cdc_mode: triggers, auto_create_triggers: true,
        snapshot: {{mode: initial}}}}
  sinks:
    - {{type: file, config: {{id: good, path: "{folder}/good.jsonl"}}}}
    - {{type: file, config: {{id: lost, path: "{folder}/lost.jsonl", required: false}}}}
"""


@pytest.fixture(autouse=True)
def pipelines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory with one pipeline whose source is unreachable."""
    folder = tmp_path / "pipelines"
    folder.mkdir()
    (folder / "shop.yaml").write_text(PIPELINE)
    monkeypatch.setenv("DELTAFORGE_PIPELINES", str(folder))
    monkeypatch.delenv("DAGSTER_HOME", raising=False)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["run", "nope"], 2, "no pipeline 'nope' in "),
        (["run", "nope.yaml"], 2, "no file nope.yaml, and no pipeline 'nope.yaml' in "),
        (["replay", "shop", "--range", "1", "--sink", "out"], 2, "there is no range 1"),
        (["replay", "shop", "--range", "3-2", "--sink", "out"], 2, "write a number N, or N-M"),
        (["replay", "nope", "--range", "1", "--sink", "out"], 2, "no pipeline 'nope' in "),
    ],
)
def test_wrong_use_is_one_message(arguments: list[str], code: int, message: str) -> None:
    """An unknown pipeline, an unknown range and an invalid range are each one message."""
    result = CliRunner().invoke(app, arguments)

    assert result.exit_code == code
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


LAKE = f"""
metadata: {{name: {NAME}, tenant: acme}}
spec:
  source:
    type: postgres
    config: {{id: db, dsn: "postgres://u:sekret@127.0.0.1:1/x", slot: s, publication: p, tables: [public.orders]}}
  sinks: [{{type: delta, config: {{id: lake, path: /nowhere}}}}]
"""


def test_tables_keep_what_they_have(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A replay to them needs no Spark, and says so; they cannot be reprocessed."""
    (tmp_path / "lake").mkdir()
    (tmp_path / "lake" / f"{NAME}.yaml").write_text(LAKE)
    monkeypatch.setenv("DELTAFORGE_PIPELINES", str(tmp_path / "lake"))
    store = StateStore.open(Settings.from_env().state_url)
    lease = held(store, "lake")
    capture(store, lease, 1, 2)
    deliver(store, lease, "lake", 2)
    with store.fenced(lease) as writer:
        writer.lease.release()
    store.close()
    replay = ["replay", NAME, "--range", "1", "--sink", "lake"]

    result = CliRunner().invoke(app, replay)
    assert result.exit_code == 0
    assert result.stdout == (
        "The tables of lake have 1 range of 1, and keep what they have: nothing was written again, "
        "0 changes for the first time.\n"
    )
    result = CliRunner().invoke(app, [*replay, "--reprocess"])
    assert result.exit_code == 1
    assert "the tables of sink lake keep what they have" in result.stderr


def test_an_unreachable_source_is_one_message_without_its_password() -> None:
    """A run with an unreachable source exits with code 1 and one message, which `status` then shows, too."""
    result = CliRunner().invoke(app, ["run", "shop"])

    assert result.exit_code == 1
    assert "127.0.0.1:1" in result.stderr
    assert "sekret" not in result.stderr + result.stdout
    assert "Traceback" not in result.stderr
    status = CliRunner().invoke(app, ["status"])
    assert status.exit_code == 1
    assert "127.0.0.1:1" in status.stdout


def test_a_pipeline_that_another_run_holds() -> None:
    """The exit code is 1, as text and as JSON."""
    store = StateStore.open(Settings.from_env().state_url)
    store.pipelines.register("shop", "hash", ["out"])
    assert store.leases.acquire("shop", "somebody", 900.0) is not None
    store.close()

    result = CliRunner().invoke(app, ["run", "shop"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: another run is working on pipeline shop\n"
    result = CliRunner().invoke(app, ["run", "shop", "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout) == {
        "pipeline": "shop",
        "success": False,
        "reason": "held elsewhere",
    }


def test_an_interrupt_where_nothing_catches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dagster turns an interrupt into a failure with a stack trace; the command exits with 130 and prints nothing."""

    def interrupted(_platform: Platform) -> None:
        raise dg.DagsterExecutionInterruptedError

    monkeypatch.setattr(Platform, "open", interrupted)

    result = CliRunner().invoke(app, ["run", "shop"])

    assert (result.exit_code, result.stderr) == (130, "")
    result = CliRunner().invoke(app, ["run", "shop", "--json"])
    assert result.exit_code == 130
    assert json.loads(result.stdout) == {
        "pipeline": "shop",
        "success": False,
        "reason": "interrupted",
    }


@pytest.mark.spark
def test_a_sink_that_fails_is_named(
    spark_server: SparkAddress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the required sinks have everything, the exit code is 0 and the output names the failing sink.

    It is tried at once, however long the wait after its last failure would be. The first run reads the initial snapshot that the file requests. A failing required sink makes the code 1, and
    so does anything else that `status` calls an error.
    """
    spark_server.use(tmp_path / "home", monkeypatch)
    monkeypatch.setenv("COLUMNS", "60")
    shop = sqlite3.connect(tmp_path / "shop.db", isolation_level=None)
    shop.execute("CREATE TABLE t (id INTEGER PRIMARY KEY)")
    shop.execute("INSERT INTO t VALUES (10), (20), (30)")
    text = TWO_SINKS.format(folder=tmp_path)
    (tmp_path / "pipelines" / "shop.yaml").write_text(text)
    first = CliRunner().invoke(app, ["run", "shop", "--until-caught-up"])
    assert first.exit_code == 0
    assert first.stdout == "Ended (caught up): 3 changes captured, sent 3 to good, 3 to lost.\n"
    assert (tmp_path / "lost.jsonl").read_text().count('"op":"r"') == 3
    unsent = Health(
        "failed", (HealthProblem("publication", "error", "t is not sent", ("ALTER x",)),)
    )
    with monkeypatch.context() as patch:
        patch.setattr(run, "health", lambda *_: unsent)
        uncaptured = CliRunner().invoke(app, ["run", "shop", "--until-caught-up"])
    assert uncaptured.exit_code == 1
    assert "error: publication: t is not sent; run: ALTER x" in uncaptured.stderr
    (tmp_path / "lost.jsonl").unlink()
    (tmp_path / "lost.jsonl").mkdir()
    shop.execute("INSERT INTO t VALUES (1)")
    shop.close()

    result = CliRunner().invoke(app, ["run", "shop", "--until-caught-up"])

    assert result.exit_code == 0
    ended, failing = result.stdout.splitlines()  # lines are not folded, however narrow the terminal
    assert ended == "Ended (caught up): 1 change captured, sent 1 to good, 0 to lost."
    assert failing.startswith("lost is behind and fails: ")
    assert "lost.jsonl" in failing

    (tmp_path / "pipelines" / "shop.yaml").write_text(text.replace(", required: false", ""))
    with contextlib.closing(sqlite3.connect(tmp_path / "home" / "state.db")) as store, store:
        store.execute("UPDATE checkpoint SET next_attempt_at = 1e12 WHERE sink = 'lost'")
    required = CliRunner().invoke(app, ["run", "shop", "--until-caught-up", "--json"])
    assert required.exit_code == 1
    answer = json.loads(required.stdout.splitlines()[-1])
    assert (answer["success"], answer["reason"], answer["behind"]) == (
        False,
        "caught up",
        {"lost": 1},
    )
    assert "lost.jsonl" in answer["sink_errors"]["lost"]
    shown = CliRunner().invoke(app, ["status", "--json"])
    (status,) = json.loads(shown.stdout)["pipelines"]
    assert [problem["subject"] for problem in answer["problems"]] == ["sink lost"]
    assert answer["problems"] == status["problems"]


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_a_run_that_loses_its_lease_fails(tmp_path: Path, as_json: bool) -> None:
    """Another run takes over: the command exits with code 1, and Dagster's run has failed, with the reason."""
    with contextlib.closing(sqlite3.connect(tmp_path / "shop.db")) as shop:
        shop.execute("CREATE TABLE t (id INTEGER PRIMARY KEY)")
    text = TWO_SINKS.format(folder=tmp_path).replace(",\n        snapshot: {mode: initial}", "")
    text += "  engine: {run: {lease_seconds: 30, renew_seconds: 0.2}}\n"
    (tmp_path / "pipelines" / "shop.yaml").write_text(text)
    store = StateStore.open(Settings.from_env().state_url)

    def take_over() -> None:
        while (lease := store.leases.get("shop")) is None or lease.run_id is None:
            time.sleep(0.05)
        with store.database.write() as connection:
            connection.execute(update(leases).values(expires_at=0.0))
        assert store.leases.acquire("shop", "another run", 900.0) is not None

    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(take_over)
        result = CliRunner().invoke(app, ["run", "shop", *(["--json"] if as_json else [])])
        taken.result()
    lease = store.leases.get("shop")
    store.close()

    assert result.exit_code == 1
    lost = "the lease was lost: the state store could not be reached, or another run has taken over"
    if as_json:
        answer = json.loads(result.stdout.splitlines()[-1])
        assert answer == {"pipeline": "shop", "success": False, "error": lost, "problems": []}
    else:
        assert f"error: {lost}\n" in result.stderr
    assert lease is not None
    assert lease.run_id == "another run", "it must not release what it does not hold"
    with local_instance(Settings.from_env()) as instance:
        (run,) = instance.get_runs()
        assert run.status == dg.DagsterRunStatus.FAILURE
        (failed,) = instance.all_logs(run.run_id, of_type=dg.DagsterEventType.STEP_FAILURE)
        event = failed.dagster_event
    assert event is not None
    assert event.step_failure_data.user_failure_data is not None
    assert event.step_failure_data.user_failure_data.description == lost


def test_ctrl_c_on_a_terminal(tmp_path: Path) -> None:
    """The run's log lines are text on a terminal and stored with the run; no process prints a stack trace."""
    home, file = tmp_path / "home", tmp_path / "pipelines" / "shop.yaml"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        file.write_text(PIPELINE.replace("127.0.0.1:1/", f"127.0.0.1:{silent.getsockname()[1]}/"))
        terminal, theirs = os.openpty()
        run = subprocess.Popen(
            [sys.executable, "-m", "deltaforge_dagster", "run", "shop", "--json"],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env={**os.environ, "DELTAFORGE_HOME": str(home), "COLUMNS": "300"},
        )
        os.close(theirs)
        shown = b""
        while b"run begins" not in shown:
            shown += os.read(terminal, 4096)
        os.killpg(run.pid, signal.SIGINT)
        with contextlib.suppress(OSError):  # how the end of a terminal is reported
            while piece := os.read(terminal, 4096):
                shown += piece
        os.close(terminal)

    assert run.wait() == 130
    assert b"Traceback" not in shown
    said = re.search(r'{"pipeline".*}', shown.decode())
    assert said is not None, shown
    answer = json.loads(said.group())
    assert (answer["success"], answer["reason"]) == (False, "interrupted"), shown
    (kept,) = home.glob("dagster/storage/*/compute_logs/*.err")
    (line,) = kept.read_text().splitlines()
    assert re.match(r"^[0-9T:.-]+Z INFO  run begins pipeline=shop tenant=acme run=", line)


AMID_IMPORTS = """
import json, os, signal, sys
work = "deltaforge_dagster.pipeline.run.leased_work"
class Finder:
    def find_spec(self, name, path, target=None):
        if name == work:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from deltaforge_dagster.cli.main import app
try: app(["run", "shop", "--json"])
finally: print(json.dumps(work in sys.modules))
"""
"""`deltaforge run`, which gets a Ctrl-C when it begins to import its work, and then says whether it has imported it."""


def test_ctrl_c_amid_imports() -> None:
    """The import is completed first: Python may keep its lock, and other threads that import would wait for ever."""
    command = [sys.executable, "-c", AMID_IMPORTS]
    run = subprocess.run(command, capture_output=True, text=True, check=False)

    assert run.returncode == 130, run.stderr
    answer, imported = map(json.loads, run.stdout.splitlines())
    assert (answer["success"], answer["reason"]) == (False, "interrupted")
    assert imported is True


NOTE = """
import gc, json, linecache, os, sys
from deltaforge_dagster.pipeline.run_context import ActiveLease
imported = lambda: sorted({"numba", "pandas", "pyspark", "grpc"} & set(sys.modules))
sources = lambda: sorted(file for file in linecache.cache if "deltaforge_dagster" in file)
notes = {}
take = ActiveLease.acquire
def acquire(*arguments, **options):
    notes["before the lease"] = [*imported(), *sources()]
    notes["frozen"] = gc.isenabled() and gc.get_freeze_count() > 100_000
    return take(*arguments, **options)
ActiveLease.acquire = acquire
from deltaforge_dagster.cli.main import app
try: app(["run", sys.argv[1], "--until-caught-up"])
finally: print(json.dumps(notes | {"in the end": imported()}))
"""
"""`deltaforge run`, which then says which of the large libraries, and the source of which of our modules,
it had loaded by when."""


@pytest.mark.spark
def test_what_a_run_imports(
    tmp_path: Path, spark_server: SparkAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run takes its lease before it imports Spark and the compiler of kernels; it delivers without pandas.

    It does not read the source of models for the descriptions of their fields, and does not look for
    garbage among what it imported.
    """
    spark_server.use(tmp_path / "home", monkeypatch)
    with contextlib.closing(sqlite3.connect(tmp_path / "shop.db")) as shop:
        shop.execute("CREATE TABLE t (id INTEGER PRIMARY KEY)")
        shop.execute("INSERT INTO t VALUES (7)")
        shop.commit()
    file = tmp_path / "shop.yaml"
    file.write_text(TWO_SINKS.format(folder=tmp_path))
    command = [sys.executable, "-c", NOTE, str(file)]

    done = subprocess.run(command, capture_output=True, text=True, check=False)

    *_, notes = done.stdout.splitlines()
    assert json.loads(notes) == {
        "before the lease": [],
        "frozen": True,
        "in the end": ["grpc", "numba", "pyspark"],
    }, done.stderr
    assert '{"id":7}' in (tmp_path / "good.jsonl").read_text()


def test_few_rows_are_sensed_without_spark(tmp_path: Path) -> None:
    """A short run knows all that it has captured when it ends; `status` says nothing of it, and no Spark was started."""
    with contextlib.closing(sqlite3.connect(tmp_path / "shop.db", isolation_level=None)) as shop:
        shop.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, doc TEXT)")
        text = TWO_SINKS.format(folder=tmp_path).replace(",\n        snapshot: {mode: initial}", "")
        sensing = "  schema_sensing: {enabled: true, sampling: {warmup_events: 20}}\n"
        (tmp_path / "pipelines" / "shop.yaml").write_text(text + sensing)
        for count in (0, 1, 2):
            shop.executemany("INSERT INTO t VALUES (NULL, '{}')", [()] * count)
            assert CliRunner().invoke(app, ["run", "shop", "--until-caught-up"]).exit_code == 0
    store = StateStore.open(Settings.from_env().state_url)
    sensed = sum(one.value for one in store.metrics.read() if one.name == SCHEMA_EVENTS.name)
    assert sensed == 3
    progress, row = store.sensing.progress("shop"), store.pipelines.get("shop")
    store.close()
    assert progress is not None
    assert row is not None
    assert progress.segment == row.next_segment - 1
    (status,) = json.loads(CliRunner().invoke(app, ["status", "--json"]).stdout)["pipelines"]
    assert status["unsensed_segments"] == 0
    assert not (Settings.from_env().home / "spark").exists()
