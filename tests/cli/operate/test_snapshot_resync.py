"""`deltaforge resync`: what is requested."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from deltaforge_dagster.cli.main import app
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.state.table_commits import Rejection
from tests.state.make import position, table

PIPELINE = """\
metadata: {name: shop, tenant: acme}
spec:
  source:
    type: postgres
    config: {id: db, dsn: "postgres://u@localhost/d", slot: s, publication: p, tables: [t]}
  sinks: [{type: delta, config: {id: lake, path: /nowhere}}, {type: file, config: {id: file, path: /nowhere}}]
"""


def test_a_resync_is_requested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tables that are named, or of all that the sink has; a sink without tables has none."""
    monkeypatch.setenv("DELTAFORGE_PIPELINES", str(tmp_path / "shop.yaml"))
    (tmp_path / "shop.yaml").write_text(PIPELINE)

    def resync(*options: str) -> Result:
        return CliRunner().invoke(app, ["resync", "shop", *options])

    nothing = resync("--sink", "lake", "--tables", "public.orders")
    assert nothing.exit_code == 2
    assert "nothing was captured of a table 'public.orders' yet" in nothing.stderr
    store = StateStore.open(f"sqlite:///{tmp_path}/home/state.db")
    lease = store.leases.acquire("shop", "run-1", 600)
    assert lease is not None
    with store.fenced(lease) as writer:
        for name in ("orders", "items"):
            writer.schemas.register("shop", table("id", name=name), position(1))
    none = resync("--sink", "lake")
    assert "sink 'lake' has no tables yet" in none.stderr
    file = resync("--sink", "file")
    assert "sink 'file' writes no tables" in file.stderr

    named = resync("--sink", "lake", "--tables", "public.orders", "--json")

    answer = {"pipeline": "shop", "sink": "lake", "tables": ["public.orders"]}
    assert json.loads(named.stdout.splitlines()[-1]) == answer
    with store.fenced(lease) as writer:
        writer.table_commits.restart("lake", 0)
        writer.table_commits.plan("lake", 1)
        writer.table_commits.advance("lake", 1, [Rejection(("public", "items"), "why", 0)])
    every = resync("--sink", "lake")
    assert every.stdout.startswith("public.items: 1 table of lake will be recreated")
    found = store.table_commits.resyncs("shop")
    assert [one.table_name for one in found] == ["public.items", "public.orders"]
    store.close()
