"""A kind of sink that keeps tables, in a package of its own: it keeps the promises, and tables equal the source's."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import sqlite3
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import duckdb
import psycopg
import pytest

from deltaforge_dagster.pipeline.failpoints import VARIABLE
from deltaforge_dagster.sinks import registry
from deltaforge_dagster.sinks.registry import DatabaseSinkType
from deltaforge_dagster.sinks.tables.staged import StagedTable
from deltaforge_dagster.testing.table_sinks import OWNER, Staged, TableSinkContract, TableSubject
from tests.e2e.conftest import Shop, shop
from tests.e2e.deployment import eventually
from tests.examples.outside import Run, command, install, running_in
from tests.fix_spark import SparkAddress
from tests.kills.campaign import lease_seconds

__all__ = ["shop"]

SINK = '    - {{type: duckdb, config: {{id: copy, path: "{path}", commit_seconds: 0.1}}}}\n'

PIPELINE = f"""\
metadata: {{{{name: shop, tenant: acme}}}}
spec:
  source:
    type: turso
    config:
      {{{{id: s, url: "{{path}}.db", tables: [orders], cdc_mode: triggers, auto_create_triggers: true}}}}
  sinks:
{SINK}"""


def rows_of(path: Path, query: str) -> list[tuple[Any, ...]]:
    """Return what a file answers to a reader."""
    with duckdb.connect(str(path), read_only=True) as connection:
        return connection.execute(query).fetchall()


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DatabaseSinkType[Any]]:
    """The kind, while its package is installed."""
    monkeypatch.syspath_prepend(install("duckdb_sink", registry.GROUP, tmp_path))
    registry._kinds.cache_clear()
    kind = registry.sink_types()["duckdb"]
    assert isinstance(kind, DatabaseSinkType)
    yield kind
    for name in ("duckdb_sink", "duckdb_writer"):
        sys.modules.pop(name, None)
    monkeypatch.undo()
    registry._kinds.cache_clear()


class TestDuckdbTables(TableSinkContract):
    """The sink keeps the promises of every sink that keeps tables."""

    @pytest.fixture
    def subject(self, installed: DatabaseSinkType[Any], tmp_path: Path) -> TableSubject:
        """Tables in a file of the test's folder."""
        path = tmp_path / "copy.duckdb"
        config = installed.config(id="copy", path=str(path))

        def rows() -> list[dict[str, Any]]:
            if not path.exists():
                return []
            with duckdb.connect(str(path), read_only=True) as connection:
                try:
                    return connection.sql("FROM public.orders").to_arrow_table().to_pylist()
                except duckdb.CatalogException:
                    return []

        return TableSubject(lambda owner: installed.build_writer(config, owner), rows, tmp_path)

    def test_a_kill_between_the_rows_and_the_record(self, subject: TableSubject) -> None:
        """The table has neither; the process after it repeats the commit."""
        staged = Staged(subject)
        changes = staged.changes(staged.upsert({"id": 1, "name": "a", "note": None}))
        killed = multiprocessing.get_context("spawn").Process(
            target=_die_before_the_end, args=(subject.folder / "copy.duckdb", changes)
        )
        killed.start()
        killed.join(60)
        lost = list(subject.rows())
        subject.commit(changes)

        assert (killed.exitcode, lost) == (-signal.SIGKILL, [])
        assert subject.table("id", "name") == [(1, "a")]


def _die_before_the_end(path: Path, changes: StagedTable) -> None:
    """Commit changes in a process that is killed when their rows are written."""
    calls = itertools.count(1)

    def guard() -> None:
        if next(calls) > 1:  # the last moment before the transaction is committed
            os.kill(os.getpid(), signal.SIGKILL)

    writer = import_module("duckdb_writer").DuckdbWriter(str(path), OWNER)
    writer.commit(changes, 0, guard)


CHANGES: tuple[tuple[str, ...], ...] = (
    (
        "INSERT INTO customers SELECT n, 'c' || n FROM generate_series(1, 200) n",
        "INSERT INTO orders VALUES (1, 1, 10.50), (2, 2, 0.10), (4, 4, 4)",
    ),
    (
        "UPDATE customers SET name = 'changed' WHERE id % 3 = 0",
        "DELETE FROM customers WHERE id % 5 = 0",
        "UPDATE orders SET id = 3, total = total + 1 WHERE id = 2",
    ),
    (
        "ALTER TABLE customers ADD COLUMN note text DEFAULT 'it''s'",
        "UPDATE customers SET id = 1000 WHERE id = 1",
        "INSERT INTO customers VALUES (1001, NULL, NULL)",
    ),
    ("TRUNCATE orders", "INSERT INTO orders VALUES (1, 9, 99999999.99), (7, NULL, NULL)"),
)
"""Transactions: inserts, updates, deletes, changed keys, an added column and a truncate."""


@pytest.mark.spark
@pytest.mark.postgres
@pytest.mark.redis
def test_tables_equal_those_of_the_source(
    shop: Shop, spark_server: SparkAddress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the source does, also if a run dies between a table's commit and its record in the state store."""
    spark_server.use(tmp_path / "home", monkeypatch)
    run = running_in(tmp_path, install("duckdb_sink", registry.GROUP, tmp_path))
    (tmp_path / "pipelines").mkdir()
    path, lease = (
        tmp_path / "copy.duckdb",
        f"{{lease_seconds: {lease_seconds()}, renew_seconds: 0.5}}",
    )
    text = shop.pipeline("feed", run=lease, more_sinks=SINK.format(path=path))
    lines = [line for line in text.splitlines() if "type: redis" not in line]
    (tmp_path / "pipelines" / "feed.yaml").write_text("\n".join(lines))
    deliver = ("run", "feed", "--until-caught-up", "--json")
    command(run, *deliver)

    shop.execute(*CHANGES[0])
    assert command(run, *deliver)["behind"] == {}
    begun = differences(shop, path)
    committed = "SELECT max(through) FROM deltaforge.commits"
    before = rows_of(path, committed)
    for transaction in CHANGES[1:]:
        shop.execute(*transaction)
    with monkeypatch.context() as patch:
        patch.setenv(VARIABLE, "table-committed")
        run("-m", "deltaforge_dagster", *deliver, code=-signal.SIGKILL)
    killed = rows_of(path, committed)
    torn = differences(shop, path)
    eventually(lambda: caught_up(run, *deliver))  # once the lease of the dead run has expired

    assert begun == []
    assert killed > before  # one table has the commit, and no run knows it
    assert torn != []
    assert differences(shop, path) == []
    notes = rows_of(path, "SELECT note, count(*) FROM public.customers GROUP BY 1 ORDER BY 2")
    assert notes == [(None, 1), ("it's", 160)]


def caught_up(run: Run, *arguments: str) -> bool:
    """Return whether a run has delivered everything; another one may still have the lease."""
    try:
        ended = command(run, *arguments)
    except AssertionError:
        return False
    return bool(ended["success"]) and not ended["behind"]


def differences(shop: Shop, path: Path) -> list[Any]:
    """Return the rows that only the source or only the file has."""
    found: list[Any] = []
    with psycopg.connect(shop.dsn) as connection:
        for table in ("customers", "orders"):
            query = f"SELECT * FROM public.{table}"
            found += set(connection.execute(query).fetchall()) ^ set(rows_of(path, query))
    return found


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run Python where the package is installed, with a pipeline that has such a sink; return what it prints."""
    installed = install("duckdb_sink", registry.GROUP, tmp_path)
    (tmp_path / "pipelines").mkdir()
    text = PIPELINE.format(path=tmp_path / "copy.duckdb")
    (tmp_path / "pipelines" / "shop.yaml").write_text(text)
    with sqlite3.connect(tmp_path / "copy.duckdb.db") as source:
        source.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY)")
    source.close()
    return running_in(tmp_path, installed)


def test_commands_know_it(run: Run, tmp_path: Path) -> None:
    """The file is valid and its mistakes are found; plan and check say what they say about our sinks."""
    planned = command(run, "plan", "shop", "--json")
    found = command(run, "check", "shop", "--json")
    file = tmp_path / "pipelines" / "shop.yaml"
    good, problems = file.read_text(), []
    for wrong in ("mode: history", "table: a.b.c"):
        file.write_text(good.replace("commit_seconds: 0.1", wrong))
        (found_wrong,) = command(run, "validate", "--json", code=1)["pipelines"]
        problems += [text.split(": ", 1)[1] for text in found_wrong["problems"]]

    assert planned["creates"]["sinks"]["copy"]["tables"] == ["main.orders"]
    (of_sink,) = [finding for finding in found["findings"] if finding["subject"] == "sink copy"]
    assert (of_sink["level"], of_sink["text"]) == ("ok", f"the DuckDB file in {tmp_path}")
    assert problems[0] == "spec.sinks[0].config.mode: must be 'current'"
    assert problems[1].startswith("spec.sinks[0].config: table has 3 parts, and DuckDB's names")
