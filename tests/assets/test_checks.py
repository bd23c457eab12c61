"""The checks of a pipeline, over a real state store."""

from __future__ import annotations

from pathlib import Path

import dagster as dg

from deltaforge_dagster.assets.checks import evaluate
from deltaforge_dagster.config.load import load_pipeline
from deltaforge_dagster.sources.findings import Finding
from deltaforge_dagster.state.store import StateStore
from tests.state.make import NAME, capture, deliver, held

FILE = """\
metadata: {name: orders, tenant: acme}
spec:
  source:
    type: postgres
    config: {id: db, dsn: "postgres://u@localhost/d", slot: s, publication: p, tables: [t]}
  sinks:
    - {type: redis, config: {id: redis, uri: "redis://localhost", stream: s}}
"""


def test_delivered(sqlite_store: StateStore, tmp_path: Path) -> None:
    """An error while a sink is behind, a warning when it had lost data and has it again."""
    (tmp_path / "orders.yaml").write_text(FILE)
    loaded = load_pipeline(tmp_path / "orders.yaml")
    lease = held(sqlite_store)
    capture(sqlite_store, lease, 1, 2)

    def delivered() -> tuple[bool, dg.AssetCheckSeverity, str | None]:
        checks = evaluate(dg.DagsterInstance.ephemeral(), sqlite_store, loaded, None, [])
        (one,) = [check for check in checks if check.check_name == "delivered"]
        return one.passed, one.severity, one.description

    error, warning = dg.AssetCheckSeverity.ERROR, dg.AssetCheckSeverity.WARN
    with sqlite_store.fenced(lease) as writer:
        writer.resume_at("redis", 1, 2, True, notice="had lost data")
    assert delivered() == (False, error, "1 segments behind, ranges 1; had lost data")
    deliver(sqlite_store, lease, "redis", 2)
    assert delivered() == (False, warning, "had lost data")
    with sqlite_store.fenced(lease) as writer:
        writer.set_notice("redis", None)
    assert delivered()[0] is True
    assert loaded.name == NAME


def test_preflight(sqlite_store: StateStore, tmp_path: Path) -> None:
    """Errors fail, warnings warn, notes pass, each with its statement."""
    (tmp_path / "orders.yaml").write_text(FILE)
    loaded = load_pipeline(tmp_path / "orders.yaml")
    fine = Finding("slot", "ok", "there")
    known = Finding("keys", "note", "none: t", "ALTER TABLE t")
    odd = Finding("retention", "warning", "60 %", "SET x")
    wrong = Finding("wal_level", "error", "replica")

    def outcome(*found: Finding) -> tuple[bool, dg.AssetCheckSeverity, str | None]:
        checks = evaluate(dg.DagsterInstance.ephemeral(), sqlite_store, loaded, None, found)
        (one,) = [check for check in checks if check.check_name == "preflight"]
        return one.passed, one.severity, one.description

    error, warning = dg.AssetCheckSeverity.ERROR, dg.AssetCheckSeverity.WARN
    assert outcome(fine)[0] is True
    assert outcome(fine, known) == (True, warning, "keys: none: t; run: ALTER TABLE t")
    assert outcome(known, odd)[:2] == (False, warning)
    assert outcome(odd, wrong) == (False, error, "wal_level: replica\nretention: 60 %; run: SET x")
