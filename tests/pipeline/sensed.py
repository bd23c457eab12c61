"""A pipeline with findings of sensing in a store, without any server."""

from __future__ import annotations

from pathlib import Path

from deltaforge_dagster.config.file.load import LoadedPipeline, load_pipeline
from deltaforge_dagster.config.sensing import SchemaSensing
from deltaforge_dagster.sensing.drift import declared
from deltaforge_dagster.sensing.learning import COLUMNS, SensedTables
from deltaforge_dagster.state.records import Lease
from deltaforge_dagster.state.sensing import Findings
from deltaforge_dagster.state.store import StateStore
from tests.processors.rows import Row, batch, dumps, row
from tests.state.make import held

FILE = """\
metadata: {name: orders, tenant: acme}
spec:
  source:
    type: postgres
    config: {id: db, dsn: "postgres://u@localhost/d", slot: s, publication: p, tables: [t]}
  sinks:
    - {type: redis, config: {id: redis, uri: "redis://localhost", stream: s}}
"""
VERSION = "sha256:00ff"
VERSIONS = {
    "public.orders": {
        VERSION: (
            declared("id", "integer", nullable=False),
            declared("gone", "text", nullable=True),
            declared("doc", "jsonb", nullable=True),
        )
    }
}


def pipeline(
    folder: Path, sensing: str = "enabled: true, sampling: {warmup_events: 30}"
) -> LoadedPipeline:
    """Return the pipeline `orders`, with these fields of `schema_sensing`."""
    path = folder / "orders.yaml"
    path.write_text(FILE + f"  schema_sensing: {{{sensing}}}\n")
    return load_pipeline(path)


def documents(count: int) -> list[Row]:
    """Return so many orders; the last one lacks what all others have, and has no id."""
    images = [
        {"id": n, "doc": {"state": "new" if n % 2 else "paid", "items": [{"n": n}], "at": None}}
        for n in range(count - 1)
    ]
    return [row(after=dumps(one)) for one in [*images, {"id": None, "doc": {"items": []}}]]


def sense(store: StateStore, loaded: LoadedPipeline, rows: list[Row]) -> Lease:
    """Store what sensing finds in these rows, as segment 1; return the lease it was stored under."""
    options = loaded.spec.spec.schema_sensing or SchemaSensing()
    tables = SensedTables(options, VERSIONS, {})
    tables.accept(batch(rows).select(list(COLUMNS)))
    learned = tables.learned()
    lease = held(store, "redis")
    findings = Findings(
        segment=1,
        tables={one.table: one.state for one in learned},
        facts={one.table: one.facts for one in learned},
        evolutions=[evolution for one in learned for evolution in one.evolutions],
    )
    with store.fenced(lease) as writer:
        writer.sensing.note(findings)
    return lease
