"""Tests of when a run is started that reads a snapshot, with a real state store and Dagster's runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import dagster as dg
import pytest

from deltaforge_dagster.assets.names import PIPELINE_TAG, RUN_TAG
from deltaforge_dagster.config.file.load import LoadedPipeline, load_pipeline
from deltaforge_dagster.pipeline.snapshots.request import Life
from deltaforge_dagster.sensors import snapshot as module
from deltaforge_dagster.sensors.snapshot import due_snapshot_run
from deltaforge_dagster.state.snapshot_records import PlannedChunk, StagedChunk
from deltaforge_dagster.state.store import StateStore
from tests.sensors.test_tick import work
from tests.state.make import NAME, position

FILE = """\
metadata: {{name: orders, tenant: acme, labels: {{version: "{version}"}}}}
spec:
  source:
    type: postgres
    config:
      {{id: db, dsn: "postgres://u@localhost/d", slot: s, publication: p, tables: [t]{snapshot}}}
  sinks:
    - {{type: redis, config: {{id: redis, uri: "redis://localhost", stream: s}}}}{more}
"""
JOINED = """
    - {type: redis, config: {id: new, start: snapshot, uri: "redis://localhost", stream: n}}"""

Look = Callable[..., str]


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    """A Dagster instance."""
    with dg.DagsterInstance.ephemeral() as made:
        yield made


@pytest.fixture
def looked(sqlite_store: StateStore, tmp_path: Path, instance: dg.DagsterInstance) -> Look:
    """Return what `look` returns for a `snapshot` block and a version of the pipeline file."""

    def loaded(mode: str | None, version: int, more: str) -> LoadedPipeline:
        block = "" if mode is None else f", snapshot: {{{mode and f'mode: {mode}'}}}"
        text = FILE.format(snapshot=block, version=version, more=more)
        (tmp_path / "orders.yaml").write_text(text)
        return load_pipeline(tmp_path / "orders.yaml")

    def say(mode: str | None = None, version: int = 1, more: str = "") -> str:
        found = due_snapshot_run(instance, sqlite_store, loaded(mode, version, more))
        if isinstance(found, dg.RunRequest):
            assert found.tags[RUN_TAG] == "snapshot"
            return "run"
        return "nothing" if found is None else str(found.skip_message)

    return say


def begin(store: StateStore) -> None:
    """Fix the start position of the pipeline."""
    store.pipelines.set_start(NAME, position(0))


def finish(store: StateStore) -> None:
    """Finish the requested snapshot without rows."""
    row = store.snapshots.unfinished(NAME)
    assert row is not None
    store.snapshots.plan(NAME, row.snapshot, [])


def causes(store: StateStore) -> list[str]:
    """Return the causes of the snapshots, newest first."""
    return [row.cause for row in store.snapshots.read(NAME)]


def test_nobody_asks(sqlite_store: StateStore, looked: Look) -> None:
    """Without the block, without a mode, and with `never`, only a user can request a snapshot."""
    for mode in (None, "", "never"):
        assert looked(mode) == "nothing"
    begin(sqlite_store)
    for mode in (None, "", "never"):
        assert looked(mode) == "nothing"
    sqlite_store.snapshots.request(NAME, cause="command")
    assert looked() == "run"


def test_initial_is_once(sqlite_store: StateStore, looked: Look) -> None:
    """The snapshot is requested once the start position is fixed, and never again, whatever changes in the file."""
    assert looked("initial") == "nothing"
    begin(sqlite_store)
    assert looked("initial") == "run"
    assert looked("initial") == "run", "nobody has begun it yet"
    finish(sqlite_store)
    assert looked("initial") == "nothing"
    assert looked("initial", version=2) == "nothing"
    assert causes(sqlite_store) == ["initial"]


def test_a_sink_that_joins_asks_once(sqlite_store: StateStore, looked: Look) -> None:
    """An added sink gets its own snapshot after the unfinished one, unless all sinks get one."""
    assert looked("initial", more=JOINED) == "nothing"
    begin(sqlite_store)
    assert looked("initial", more=JOINED) == "run"
    assert looked() == "run", "it is not read yet"
    assert looked(more=JOINED) == "run"
    finish(sqlite_store)
    assert looked(more=JOINED) == "run"
    finish(sqlite_store)
    assert looked(more=JOINED) == "nothing"

    found = [(row.cause, row.sinks) for row in sqlite_store.snapshots.read(NAME)]
    assert found == [("sink", ["new"]), ("initial", [])]


def test_always_is_once_for_each_file(sqlite_store: StateStore, looked: Look) -> None:
    """A new run with the same file requests nothing; an edited file does."""
    looked("always")
    begin(sqlite_store)
    for version in (1, 2):
        assert looked("always", version) == "run"
        finish(sqlite_store)
        assert looked("always", version) == "nothing"
    assert causes(sqlite_store) == ["always", "always"]


def test_only_what_is_missing(sqlite_store: StateStore, looked: Look) -> None:
    """A run starts only if a chunk is missing, not if chunks wait for the pipeline's run."""
    looked()
    begin(sqlite_store)
    number = sqlite_store.snapshots.request(NAME, cause="command").snapshot
    chunk = PlannedChunk("public.t", 1, "{}")
    sqlite_store.snapshots.plan(NAME, number, [chunk])
    assert looked() == "run"
    staged = StagedChunk("path", "sum", 1, 1, "s", position(1), "{}", 1, 0.1)
    sqlite_store.snapshots.stage(NAME, number, chunk, staged)
    assert "the pipeline's run takes it over" in looked()


def test_one_run_at_a_time(
    sqlite_store: StateStore,
    looked: Look,
    instance: dg.DagsterInstance,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run with signs of life is left alone, one without is reported as failed; then there is a pause."""
    looked()
    begin(sqlite_store)
    sqlite_store.snapshots.request(NAME, cause="command")
    tags = {PIPELINE_TAG: NAME, RUN_TAG: "snapshot"}
    run = instance.create_run_for_job(work, status=dg.DagsterRunStatus.STARTING, tags=tags)
    instance.report_engine_event("begins", run)
    instance.report_dagster_event(
        dg.DagsterEvent("PIPELINE_START", run.job_name), run_id=run.run_id
    )
    assert "is reading" in looked()
    monkeypatch.setattr(module, "BEGIN_SECONDS", -1.0)
    Life(sqlite_store, NAME, run.run_id).show()
    assert "is reading" in looked()
    monkeypatch.setattr(module, "is_alive", lambda *_: False)
    assert looked() == "run"
    found = instance.get_run_by_id(run.run_id)
    assert found is not None
    assert found.status == dg.DagsterRunStatus.FAILURE
    assert "failed; the next one begins in" in looked()


def test_what_somebody_reads_in_the_ui(
    sqlite_store: StateStore, looked: Look, instance: dg.DagsterInstance
) -> None:
    """A run started in the UI is left alone; if it dies, the missing chunks are read at once."""
    looked()
    begin(sqlite_store)
    sqlite_store.snapshots.request(NAME, cause="command")
    run = instance.create_run_for_job(work, status=dg.DagsterRunStatus.STARTED)
    assert looked() == "run"
    Life(sqlite_store, NAME, run.run_id).show()
    assert looked() == f"run {run.run_id[:8]} is reading"
    instance.report_run_failed(run)
    assert looked() == "run"


def test_the_pause_grows(
    sqlite_store: StateStore,
    looked: Look,
    instance: dg.DagsterInstance,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pause after one failed run is short, and longer after several in a row."""
    monkeypatch.setattr(module, "PAUSES_SECONDS", (1e4, 1e5, 1e6))
    looked()
    begin(sqlite_store)
    sqlite_store.snapshots.request(NAME, cause="command")
    tags = {PIPELINE_TAG: NAME, RUN_TAG: "snapshot"}
    for least, most in ((1e3, 1e4), (1e4, 1e5), (1e5, 1e6), (1e5, 1e6)):
        run = instance.create_run_for_job(work, status=dg.DagsterRunStatus.STARTED, tags=tags)
        instance.report_run_failed(run)
        left = re.search(r"begins in (\d+) s", looked())
        assert left is not None
        assert least < float(left[1]) <= most
