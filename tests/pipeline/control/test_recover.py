"""A pipeline that has lost its position gets one snapshot, whatever its file says, and its tables are made again."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltaforge_dagster.config.file.load import LoadedPipeline, load_pipeline
from deltaforge_dagster.pipeline.control.work import register
from deltaforge_dagster.pipeline.snapshots.request import requested_snapshot
from deltaforge_dagster.sources.postgres.position import LsnPosition
from deltaforge_dagster.state.snapshot_records import RECOVERY
from deltaforge_dagster.state.store import StateStore

POSITION = LsnPosition(1).to_json()

FILE = """\
metadata: {{name: shop, tenant: acme}}
spec:
  source:
    type: postgres
    config: {{id: shop, dsn: "postgres://localhost/shop", slot: s, publication: p, tables: [public.orders]{snapshot}}}
  sinks:
    - {{type: redis, config: {{id: redis, uri: "redis://localhost", stream: orders{start}}}}}
    - {{type: postgres, config: {{id: copy, dsn: "postgres://localhost/copy", table: "copied.${{source.table}}"}}}}
"""


def loaded_from(path: Path, snapshot: str, start: str) -> LoadedPipeline:
    """Return a pipeline with this mode of snapshots and this start of its message sink."""
    path.write_text(FILE.format(snapshot=snapshot, start=start))
    return load_pipeline(path)


@pytest.mark.parametrize(
    "snapshot", ["", ", snapshot: {mode: initial}", ", snapshot: {mode: always}"]
)
@pytest.mark.parametrize("start", ["", ", start: tail", ", start: journal", ", start: snapshot"])
def test_one_snapshot_for_all(
    sqlite_store: StateStore, tmp_path: Path, snapshot: str, start: str
) -> None:
    """It is for all tables and sinks; the file asks for no other one, before and after it."""
    store, loaded = sqlite_store, loaded_from(tmp_path / "shop.yaml", snapshot, start)
    register(store, loaded)
    before = store.pipelines.set_start("shop", POSITION)
    requested_snapshot(store, loaded, before)

    row = store.journals.recover("shop", {"copy": {("copied", "orders"): "public.orders"}})
    assert (row.start_position, row.captured_position) == (None, None)
    assert row.uid != before.uid
    (resync,) = store.table_commits.resyncs("shop")
    assert (resync.sink, resync.table_name, resync.begun) == ("copy", "public.orders", True)
    row = store.pipelines.set_start("shop", POSITION)
    (wanted,) = store.snapshots.read("shop")
    assert (wanted.cause, wanted.tables, wanted.sinks) == (RECOVERY, [], [])
    assert requested_snapshot(store, loaded, row) == wanted
    store.snapshots.cancel("shop", wanted.snapshot, "by the test")
    assert requested_snapshot(store, loaded, row) is None
