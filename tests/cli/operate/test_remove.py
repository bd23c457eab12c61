"""Tests of a pipeline whose file was deleted, and of `remove`, with real databases."""

from __future__ import annotations

import functools
import json
import re
import shlex
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from typer.testing import CliRunner, Result

from deltaforge_dagster.cli.main import app
from deltaforge_dagster.cli.operate import remove
from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.errors import SpecError
from deltaforge_dagster.pipeline.control import user_requests
from deltaforge_dagster.pipeline.control.unread_log import note_unread_log
from deltaforge_dagster.pipeline.control.work import begin
from deltaforge_dagster.pipeline.health.recorded import note_tick
from deltaforge_dagster.resources.platform import build_source
from deltaforge_dagster.state.store import StateStore
from tests.sensors.test_tick_postgres import FILE
from tests.sources.postgres.bench import PostgresBench

TURSO = """\
metadata: {{name: filed, tenant: acme}}
spec:
  source:
    type: turso
    config: {{id: s, url: "{folder}/shop.db", tables: [t], cdc_mode: triggers, auto_create_triggers: true}}
  sinks: [{{type: redis, config: {{id: redis, uri: "redis://localhost:1", stream: s}}}}]
"""


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StateStore]:
    """The state store of the installation, whose files are in the folder `pipelines`."""
    monkeypatch.setenv("COLUMNS", "500")
    monkeypatch.setenv("DELTAFORGE_PIPELINES", str(tmp_path / "pipelines"))
    (tmp_path / "pipelines").mkdir()
    opened = StateStore.open(f"sqlite:///{tmp_path}/home/state.db")
    yield opened
    opened.close()


@pytest.fixture
def added(store: StateStore, tmp_path: Path) -> Callable[[str], Path]:
    """Add a file to the folder of pipelines, and begin the pipeline; return the file."""

    def add(text: str) -> Path:
        path = tmp_path / "pipelines" / f"{len(list((tmp_path / 'pipelines').iterdir()))}.yaml"
        path.write_text(text)
        loaded = load_pipeline(path)
        begin(store, loaded, lambda: build_source(loaded.spec))
        source = build_source(loaded.spec)
        note_unread_log(store, loaded.name, source)
        source.close()
        return path

    return add


@pytest.fixture
def password(postgres_dsn: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The source's password, which is in the environment."""
    given = str(psycopg.conninfo.conninfo_to_dict(postgres_dsn)["password"])
    monkeypatch.setenv("PGPASSWORD", given)
    return given


def call(*words: str, answer: str = "", code: int = 0) -> Result:
    """Call a command, and check its exit code."""
    result = CliRunner().invoke(app, words, input=answer)
    assert result.exit_code == code, result.output
    return result


def only_problem(code: int = 1) -> dict[str, str]:
    """Return the one problem of the one pipeline."""
    (shown,) = json.loads(call("status", "--json", code=code).stdout)["pipelines"]
    assert shown["status"] == ("failed" if code else "running")
    (problem,) = shown["problems"]
    return dict(problem)


def kept(bench: PostgresBench) -> list[str]:
    """Return the names of the database's slots and publications."""
    names = bench.value(
        "SELECT array_agg(name) FROM (SELECT pubname AS name FROM pg_publication UNION ALL "
        "SELECT slot_name FROM pg_replication_slots WHERE database = current_database()) AS names"
    )
    return sorted(map(str, names or []))


@pytest.mark.postgres
def test_a_pipeline_without_its_file(
    store: StateStore,
    added: Callable[[str], Path],
    postgres_dsn: str,
    password: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is failed, with what the slot retains; the remedy that `status` prints drops everything, and a file starts anew."""
    with PostgresBench(postgres_dsn) as bench:
        path = added(FILE.format(dsn=bench.dsn, slot=bench.slot))
        text = path.read_text()
        assert "still has its file" in call("remove", "orders", code=2).stderr
        path.unlink()
        problem = only_problem()
        assert problem["subject"] == "file"
        assert problem["text"].startswith(
            f"its file {path} is gone; replication slot '{bench.slot}' of "
        )
        assert re.search(
            r" still retains ([\d,]+ bytes|[\d.]+ MB) of log \(measured \d+ s ago\)\. Restore the file, ",
            problem["text"],
        )
        words = shlex.split(problem["remedy"][0])[1:]

        monkeypatch.delenv("PGPASSWORD")
        assert "If the server wants a password: set PGPASSWORD" in call(*words, code=1).stderr
        monkeypatch.setattr(remove, "on_terminal", lambda: True)
        shown = call(*words, answer=f"{password}\nn\n", code=1).stderr
        for listed in (
            f"replication slot '{bench.slot}'",
            "publication 'p'",
            "the journal of orders (0 B), its ranges and positions",
        ):
            assert f"\n  {listed}\n" in shown
        assert kept(bench) == ["p", bench.slot]

        said = call(*words, answer=f"{password}\ny\n").stdout
        assert f"orders is removed. Dropped: replication slot '{bench.slot}'; " in said
        assert kept(bench) == []
        assert call("status").stdout == "No pipeline has run yet.\n"

        path.write_text(text)
        begin(store, load_pipeline(path), bench.source)
        assert kept(bench) == ["p", bench.slot]


@pytest.mark.postgres
@pytest.mark.usefixtures("password")
def test_a_run_that_does_not_end(
    store: StateStore,
    added: Callable[[str], Path],
    postgres_dsn: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is dropped while a run reads, however long one waits for its end."""
    impatient = functools.partial(user_requests.end_run, seconds=0.0)
    monkeypatch.setattr(user_requests, "end_run", impatient)
    with PostgresBench(postgres_dsn) as bench:
        added(FILE.format(dsn=bench.dsn, slot=bench.slot)).unlink()
        lease = store.leases.acquire("orders", "busy", 60)
        assert lease is not None

        refused = call("remove", "orders", "--yes", code=2).stderr
        assert "pipeline 'orders' is held by run busy, which does not end" in refused
        assert kept(bench) == ["p", bench.slot]

        with store.fenced(lease) as writer:
            writer.lease.release()
        call("remove", "orders", "--yes")
        assert kept(bench) == []


@pytest.mark.postgres
@pytest.mark.usefixtures("password")
def test_what_others_need_stays(
    store: StateStore, added: Callable[[str], Path], postgres_dsn: str
) -> None:
    """Whatever another pipeline names stays, and so does a publication that somebody else made."""
    with PostgresBench(postgres_dsn) as bench:
        text = FILE.format(dsn=bench.dsn, slot=bench.slot)
        first = added(text)
        copy = text.replace("orders, ", "copied, ", 1)
        with pytest.raises(SpecError, match=r"replication slot .* is used by pipeline orders"):
            added(copy)
        first.unlink()
        call("remove", "orders", "--yes")
        assert kept(bench) == ["p", bench.slot]
        second = added(copy)
        second.unlink()
        bench.execute("DROP PUBLICATION p", "CREATE PUBLICATION p FOR TABLE orders")
        call("remove", "copied", "--yes")
        assert kept(bench) == ["p"]
        assert store.pipelines.read() == []


@pytest.mark.postgres
def test_a_server_that_cannot_be_reached(
    store: StateStore, added: Callable[[str], Path], postgres_dsn: str, tmp_path: Path
) -> None:
    """Nothing is removed; with a copy of the file the server is reached, and without it the state alone can be removed."""
    with PostgresBench(postgres_dsn) as bench:
        path = added(FILE.format(dsn=bench.dsn, slot=bench.slot))
        dead = path.read_text().replace(bench.dsn, "postgres://app@127.0.0.1:1/shop")
        path.rename(tmp_path / "moved.yaml")
        (tmp_path / "dead.yaml").write_text(dead)
        refused = call("remove", str(tmp_path / "dead.yaml"), "--yes", code=1).stderr
        assert "Nothing was removed. If the server wants a password: set PGPASSWORD" in refused
        assert [row.name for row in store.pipelines.read()] == ["orders"]
        call("remove", str(tmp_path / "moved.yaml"), "--yes")
        assert kept(bench) == []
        path.write_text(FILE.format(dsn=bench.dsn, slot=bench.slot))
        begin(store, load_pipeline(path), bench.source)
        path.unlink()
        call("remove", "orders", "--yes", "--keep-source")
        assert kept(bench) == ["p", bench.slot]
        assert store.pipelines.read() == []


def test_triggers(store: StateStore, added: Callable[[str], Path], tmp_path: Path) -> None:
    """Change table and triggers go with the pipeline; the table itself stays as it is."""
    database = sqlite3.connect(tmp_path / "shop.db")
    database.execute("CREATE TABLE t (id INTEGER PRIMARY KEY)")
    added(TURSO.format(folder=tmp_path)).unlink()
    problem = only_problem()
    assert (
        f"triggers still write every change into table _df_cdc_changes of {tmp_path}"
        in (problem["text"])
    )
    call(*shlex.split(problem["remedy"][0])[1:], answer="y\n")
    database.execute("INSERT INTO t VALUES (1)")
    assert (
        database.execute("SELECT name FROM sqlite_schema WHERE name LIKE '%df%'").fetchall() == []
    )
    assert store.pipelines.read() == []
    database.close()


def test_a_file_that_only_another_machine_has(
    store: StateStore, added: Callable[[str], Path], tmp_path: Path
) -> None:
    """What the process there reports is shown, with a note, for as long as its sensor ticks."""
    sqlite3.connect(tmp_path / "shop.db").execute("CREATE TABLE t (id INTEGER PRIMARY KEY)")
    path = added(TURSO.format(folder=tmp_path))
    path.unlink()
    note_tick(store, "filed")
    problem = only_problem(code=0)
    assert (problem["severity"], problem["text"]) == (
        "warning",
        f"its file {path} is gone, seen from here; what the process that works on it reports is shown",
    )
    store.pipelines.note_since("filed", "file broken")
    assert only_problem()["severity"] == "error"
