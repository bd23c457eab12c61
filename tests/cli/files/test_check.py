"""Tests of `deltaforge check` against a real server."""

from __future__ import annotations

import fcntl
import json
import socket
from pathlib import Path

import psycopg
import pytest
import typer
from typer.testing import CliRunner, Result

from deltaforge_dagster.cli.files.check import check
from deltaforge_dagster.installation.lake_jars import LAKE_JARS
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.state.table_commits import TableWrite
from tests.state.make import held, position

pytestmark = pytest.mark.postgres

FILE = """\
metadata: {{name: orders, tenant: acme}}
spec:
  source:
    type: postgres
    config: {{id: db, dsn: "{dsn}", slot: check_slot, publication: p, tables: [public.orders]}}
  sinks:
    - {sink}
"""

FOLDER = '{{type: file, config: {{id: files, path: "{}/orders.jsonl"}}}}'
NOBODY = '{type: redis, config: {id: redis, uri: "redis://:geheim@127.0.0.1:1", stream: s}}'


def run(*arguments: object) -> Result:
    """Run the command alone, as `deltaforge check` does."""
    app = typer.Typer()
    app.command()(check)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_says_what_is_missing_and_makes_nothing(
    postgres_dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error has exit code 1 and a statement that fixes it; once fixed, the code is 0. No state store is created."""
    monkeypatch.setenv("DELTAFORGE_HOME", str(tmp_path / "home"))
    file = tmp_path / "orders.yaml"
    file.write_text(FILE.format(dsn=postgres_dsn, sink=FOLDER.format(tmp_path)))
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE orders (id int)")
        before = run(file)
        connection.execute("ALTER TABLE orders ADD PRIMARY KEY (id)")
        after = run(file, "--json")

    assert before.exit_code == 1
    assert 'fix: ALTER TABLE "public"."orders" REPLICA IDENTITY FULL' in before.output
    assert after.exit_code == 0, after.output
    answer = json.loads(after.output.splitlines()[-1])
    assert answer["ok"] is True
    assert {"subject": "slot", "level": "ok", "text": "replication slot 'check_slot' will be created", "mend": None} in answer["findings"]  # fmt: skip
    assert not (tmp_path / "home").exists()


def test_tables_need_jars(
    postgres_dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where sinks write tables, Spark's jars are missing or there; another server's are not known."""
    monkeypatch.setenv("DELTAFORGE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DELTAFORGE_LAKE_JARS", str(tmp_path))
    monkeypatch.delenv("DELTAFORGE_SPARK_REMOTE", raising=False)
    lake = f"{{type: delta, config: {{id: lake, path: {tmp_path}/lake}}}}"
    file = tmp_path / "orders.yaml"

    def about_spark(sink: str) -> list[tuple[str, str | None]]:
        file.write_text(FILE.format(dsn=postgres_dsn, sink=sink))
        findings = json.loads(run(file, "--json").output.splitlines()[-1])["findings"]
        return [(one["level"], one["mend"]) for one in findings if one["subject"] == "spark"]

    assert about_spark(FOLDER.format(tmp_path)) == []
    assert about_spark(lake) == [("error", "deltaforge lake install")]
    for jar in LAKE_JARS:
        (tmp_path / jar.file_name).touch()
    assert about_spark(lake) == [("ok", None)]
    # One that was started before they were installed, and that `deltaforge dev` uses.
    folder = tmp_path / "home" / "spark"
    folder.mkdir(parents=True)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        (folder / "watcher.lock").open("w") as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        state = {"port": server.getsockname()[1], "token": "t", "jars": []}
        (folder / "server.json").write_text(json.dumps(state))
        assert about_spark(lake) == [("error", None)]
        assert "`deltaforge dev`, which uses it all the time, is restarted" in run(file).output
    assert about_spark(lake) == [("ok", None)]
    monkeypatch.setenv("DELTAFORGE_SPARK_REMOTE", "sc://spark.example:15002")
    assert about_spark(lake) == [("note", None)]


def test_tables_with_old_timestamps_are_named(
    postgres_dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the state store knows of Delta tables is a warning with the command that helps."""
    monkeypatch.setenv("DELTAFORGE_HOME", str(tmp_path / "home"))
    file = tmp_path / "orders.yaml"
    file.write_text(
        FILE.format(
            dsn=postgres_dsn, sink=f"{{type: delta, config: {{id: lake, path: {tmp_path}}}}}"
        )
    )
    (tmp_path / "home").mkdir()
    store = StateStore.open(f"sqlite:///{tmp_path}/home/state.db")
    with store.fenced(held(store)) as writer:
        writer.table_commits.restart("lake", 0)
        written = TableWrite(("public", "orders"), ("public", "orders"), [("at", "timestamp")], 1, position(1), 0.0, int64_timestamps=False)  # fmt: skip
        writer.table_commits.advance("lake", 1, (), [written])
    store.close()

    findings = json.loads(run(file, "--json").output.splitlines()[-1])["findings"]

    (found,) = [one for one in findings if "INT96" in one["text"]]
    assert found["level"] == "warning"
    assert found["mend"] == "deltaforge resync orders --sink lake --tables public.orders"


def test_a_sink_that_is_not_there(
    postgres_dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unreachable sink is a finding after those of the source, and the exit code is 1."""
    monkeypatch.setenv("DELTAFORGE_HOME", str(tmp_path / "home"))
    file = tmp_path / "orders.yaml"
    file.write_text(FILE.format(dsn=postgres_dsn, sink=NOBODY))
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE orders (id int PRIMARY KEY)")

    result = run(file, "--json")

    assert result.exit_code == 1
    answer = json.loads(result.output.splitlines()[-1])
    bad = [one for one in answer["findings"] if one["level"] == "error"]
    assert [one["subject"] for one in bad] == ["sink redis"]
    assert bad == answer["findings"][-1:]
    assert "redis at 127.0.0.1:1" in bad[0]["text"]
    assert "geheim" not in result.output


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    """An unreachable server is one finding without a stack trace."""
    file = tmp_path / "orders.yaml"
    file.write_text(
        FILE.format(dsn="postgres://u:geheim@127.0.0.1:1/d", sink=FOLDER.format(tmp_path))
    )

    result = run(file)

    assert result.exit_code == 1
    assert result.output.startswith("error   connection: PostgreSQL 127.0.0.1:1")
    assert "geheim" not in result.output
