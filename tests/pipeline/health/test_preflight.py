"""What a look at the source is told of the pipeline: above all, whether its tables are to be read."""

from __future__ import annotations

from pathlib import Path

from deltaforge_dagster.config.file.load import LoadedPipeline, load_pipeline
from deltaforge_dagster.pipeline.health.preflight import preflight_source
from deltaforge_dagster.positions import Position
from deltaforge_dagster.sources.findings import Finding
from deltaforge_dagster.state.store import StateStore
from tests.pipeline.changes import PlayedSource
from tests.state.make import NAME, held

FILE = f"""\
metadata: {{name: {NAME}, tenant: acme}}
spec:
  source:
    type: postgres
    config: {{id: db, dsn: "postgres://localhost/shop", slot: s, publication: p, tables: [public.orders]SNAPSHOT}}
  sinks:
    - {{type: redis, config: {{id: cache, uri: "redis://localhost:6379", stream: orders}}}}
  engine: ENGINE
"""


class Asked(PlayedSource):
    """A source that notes whether its tables are to be read."""

    def preflight(
        self, position: Position | None, as_of: float | None, *, snapshot: bool = False
    ) -> list[Finding]:
        """Find what it was told."""
        del position, as_of
        return [Finding("snapshot", "ok", str(snapshot))]


def pipeline(folder: Path, snapshot: str = "", engine: str = "{}") -> LoadedPipeline:
    """Return a pipeline with a `snapshot` block."""
    file = folder / f"{NAME}.yaml"
    file.write_text(FILE.replace("SNAPSHOT", snapshot).replace("ENGINE", engine))
    return load_pipeline(file)


def to_come(store: StateStore | None, loaded: LoadedPipeline) -> bool:
    """Say what the source was told."""
    (found,) = preflight_source(Asked([]), store, loaded)
    return found.text == "True"


def test_a_snapshot_that_the_file_will_ask_for(tmp_path: Path) -> None:
    """Before anything has run the file decides, unless its seed says that somebody read before."""
    seed = '{checkpoint: {seed: {type: position, position: {lsn: "0/10"}}}}'

    assert not to_come(None, pipeline(tmp_path))
    assert not to_come(None, pipeline(tmp_path, ", snapshot: {mode: never}"))
    assert to_come(None, pipeline(tmp_path, ", snapshot: {mode: initial}"))
    assert not to_come(None, pipeline(tmp_path, ", snapshot: {mode: initial}", seed))
    assert to_come(None, pipeline(tmp_path, ", snapshot: {mode: always}", seed))


def test_a_snapshot_that_is_unfinished(sqlite_store: StateStore, tmp_path: Path) -> None:
    """It counts whoever asked for it, and one that is over no longer does; nothing is asked for."""
    held(sqlite_store, "cache")
    asking, quiet = pipeline(tmp_path, ", snapshot: {mode: initial}"), pipeline(tmp_path)
    assert to_come(sqlite_store, asking)
    assert sqlite_store.snapshots.read(NAME) == []

    wanted = sqlite_store.snapshots.request(NAME, cause="initial").snapshot
    assert to_come(sqlite_store, quiet)
    sqlite_store.snapshots.cancel(NAME, wanted, "no need")
    assert not to_come(sqlite_store, asking)
    assert not to_come(sqlite_store, quiet)
