"""`deltaforge lake view`: the query of a table with its pending changes, from what the state store knows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deltaforge_dagster.cli.main import app
from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.pipeline.control.work import register
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.state.table_commits import TableWrite
from deltaforge_dagster.tables import Column, TableSchema
from tests.state.make import position

PIPELINE = """\
metadata: {name: shop, tenant: acme}
spec:
  source:
    type: postgres
    config: {id: src, dsn: "postgres://u:pw@localhost/db", slot: s, publication: p, tables: [public.t]}
  sinks:
    - type: delta
      config: {id: lake, path: /lake, pending: true, keys: {public.keyless: [a, b]}}
    - {type: iceberg, config: {id: ice, catalog: prod, pending: true}}
    - {type: delta, config: {id: plain, path: /plain}}
"""
COLUMNS = (
    ("id", "bigint"),
    ("na`me", "string"),
    ("df_event_time", "timestamp"),
    ("df_position", "bigint"),
)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StateStore]:
    """A store of a pipeline whose sinks have written two tables."""
    monkeypatch.setenv("DELTAFORGE_PIPELINES", str(tmp_path))
    file = tmp_path / "shop.yaml"
    file.write_text(PIPELINE)
    opened = StateStore.open(f"sqlite:///{tmp_path}/home/state.db")
    register(opened, load_pipeline(file))
    lease = opened.leases.acquire("shop", "run", 60)
    assert lease is not None
    columns = (Column("id", "bigint", None, False, 1), Column("na`me", "text", None, True, 2))
    with opened.fenced(lease) as writer:
        for table in ("orders", "keyless"):
            schema = TableSchema("db", "public", table, columns, columns[0:1] and ("id",))
            writer.schemas.register("acme", schema, position(1))
        for sink in ("lake", "ice"):
            writer.table_commits.restart(sink, 0)
            written = [
                TableWrite(("public", table), ("public", table), COLUMNS, 1, "{}", 0.0)
                for table in ("orders", "keyless")
            ]
            writer.table_commits.advance(sink, 1, (), written)
        writer.lease.release()
    yield opened
    opened.close()


def view(*options: str) -> str:
    """Return what the command prints."""
    result = CliRunner().invoke(app, ["lake", "view", "shop", *options])
    assert result.exit_code in {0, 2}, result.output
    return " ".join((result.stdout or result.output).split())


@pytest.mark.usefixtures("store")
def test_a_query_for_each_engine() -> None:
    """With the columns of the source, the declared key or the primary key, and the places of both tables."""
    spark = view("--sink", "lake", "--table", "public.orders")
    assert "FROM `delta`.`/lake/public/orders_pending` GROUP BY `id`" in spark
    assert " t.`id`, t.`na``me`, t.df_event_time" in spark
    assert "FROM `delta`.`/lake/public/orders` AS t ANTI JOIN df_pending" in spark
    keyless = json.loads(view("--sink", "lake", "--table", "public.keyless", "--json"))["query"]
    assert "GROUP BY `a`, `b`" in keyless
    assert "FROM `prod`.`public`.`orders` AS t" in view("--sink", "ice", "--table", "public.orders")
    duckdb = view("--sink", "lake", "--table", "public.orders", "--for", "duckdb")
    assert "FROM delta_scan('/lake/public/orders_pending') GROUP BY \"id\"" in duckdb


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            ("--table", "public.orders"),
            "--sink must name a sink with the option `pending` (ice, lake)",
        ),
        (("--table", "public.orders", "--sink", "plain"), "(ice, lake)"),
        (("--table", "t", "--sink", "ice"), "(public.keyless, public.orders)"),
        (
            ("--table", "public.orders", "--sink", "ice", "--for", "duckdb"),
            "Delta tables with a `path` only",
        ),
    ],
)
def test_what_has_no_such_query(options: tuple[str, ...], reason: str) -> None:
    """The message says what there is."""
    result = CliRunner().invoke(app, ["lake", "view", "shop", *options])
    assert result.exit_code != 0
    assert reason in " ".join(result.stderr.split())
