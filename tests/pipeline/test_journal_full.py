"""Who decides whether a full journal pauses capture, over a real store, without a run."""

from __future__ import annotations

from pathlib import Path

from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.control.journal_space import BackPressure
from deltaforge_dagster.pipeline.run_context import ActiveLease, LeasedRun
from deltaforge_dagster.state.store import StateStore
from tests.state.make import NAME, new_segment, position

PIPELINE = f"""
metadata: {{name: {NAME}, tenant: acme}}
spec:
  source: {{type: postgres, config: {{id: s, dsn: "postgres://u@localhost/x", slot: s,
    publication: p, tables: [public.orders]}}}}
  sinks: [{{type: redis, config: {{id: redis, uri: "redis://localhost", stream: x}}}}]
  engine: {{journal: {{max_bytes: 150}}}}
"""


def test_a_sink_that_awaits_capture_is_never_paused_for(
    sqlite_store: StateStore, tmp_path: Path
) -> None:
    """A full journal pauses capture, but not while a sink needs more of the log to go on."""
    store, path = sqlite_store, tmp_path / "orders.yaml"
    path.write_text(PIPELINE)
    store.pipelines.register(NAME, "spec-1", ["redis"])
    store.pipelines.set_start(NAME, position(0))
    lease = ActiveLease.acquire(
        store, NAME, "run-1", seconds=60, renew_seconds=20, on_renewal=lambda: None
    )
    assert lease is not None
    said: list[str] = []
    awaits = [True]
    pressure = BackPressure(
        load_pipeline(path).spec,
        LeasedRun(store, Journal(tmp_path.joinpath("journal").as_uri()), lease, said.append),
        close_range=lambda _: None,
        publish=lambda: None,
        detach=lambda *_: None,
        awaits_capture=lambda: awaits[0],
    )
    try:
        number = lease.write(lambda writer: writer.ranges.open(position(0), "spec-1", 1))
        lease.write(lambda writer: writer.segments.add(new_segment(1), number))
        lease.write(lambda writer: writer.segments.add(new_segment(2), number))

        pressure.check(2)
        assert said == []
        awaits[0] = False
        pressure.check(3)
        assert said[-1].startswith("capture is paused: the journal is full")
        awaits[0] = True
        pressure.check(3)
        assert pressure.paused is None
        assert (
            said[-1]
            == "capture goes on: a sink waits until changes that it already has are captured again"
        )
    finally:
        lease.release()
