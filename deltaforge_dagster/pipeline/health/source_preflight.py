"""Check that the source is set up as the pipeline needs it, at the pipeline's current position.

Used by `deltaforge check` and by the asset check `preflight` at the end of each run.
"""

from __future__ import annotations

from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.pipeline.snapshots.request import is_snapshot_expected
from deltaforge_dagster.sources.base import Source
from deltaforge_dagster.sources.findings import Finding
from deltaforge_dagster.sources.registry import parse_position
from deltaforge_dagster.state.store import StateStore


def preflight(source: Source, store: StateStore | None, loaded: LoadedPipeline) -> list[Finding]:
    """Return the findings for the source; a server that cannot be reached is a finding, too.

    Args:
        source: The pipeline's source; stays open.
        store: The state store, None when nothing has run yet.
        loaded: The pipeline.
    """
    row = store.pipelines.get(loaded.name) if store is not None else None
    text = row and (row.captured_position or row.start_position)
    newest = store.ranges.read(loaded.name, newest_first=True, limit=1) if store is not None else ()
    try:
        return source.preflight(
            parse_position(text) if text else None,
            newest[0].last_ts_us / 1e6 if newest else None,
            snapshot=is_snapshot_expected(store, loaded),
        )
    except DeltaforgeError as error:
        return [Finding("connection", "error", str(error))]
