"""Which lake tables may have files of earlier releases that only Spark reads correctly."""

from __future__ import annotations

import re
from collections.abc import Iterator

from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.sinks.registry import LakeSinkType, sink_types
from deltaforge_dagster.sinks.tables.writer import PREFIX
from deltaforge_dagster.sources.findings import Finding
from deltaforge_dagster.state.lake_commits import TableWrite
from deltaforge_dagster.state.store import StateStore

_TIMESTAMP = re.compile(r"\btimestamp\b")
"""Matches types of columns with timestamps that may be INT96.

Spark calls timestamps without a time zone `timestamp_ntz`, and never wrote these as INT96.
"""


def int96_findings(store: StateStore | None, loaded: LoadedPipeline) -> list[Finding]:
    """Return a warning for each table whose files may have the source's timestamps as INT96."""
    return [] if store is None else list(_findings(store, loaded))


def _findings(store: StateStore, loaded: LoadedPipeline) -> Iterator[Finding]:
    kinds = {block.config.id: sink_types()[block.type] for block in loaded.spec.spec.sinks}
    for stored in store.lake_commits.tables(loaded.name):
        kind, write = kinds.get(stored.sink), stored.write
        if not isinstance(kind, LakeSinkType) or not kind.had_int96 or write.int64_timestamps:
            continue
        columns = _timestamps(write)
        if columns:
            yield Finding(
                f"sink {stored.sink}",
                "warning",
                f"table {'.'.join(write.destination)} has files of an earlier release with "
                f"timestamps as INT96 ({', '.join(columns)}): where they are before 1678 or after "
                "2262, readers other than Spark (delta-rs, for one) read other times without an "
                "error",
                f"deltaforge resync {loaded.name} --sink {stored.sink} "
                f"--tables {'.'.join(write.source)}",
            )


def _timestamps(write: TableWrite) -> list[str]:
    """Return the source's timestamp columns.

    DeltaForge's own columns are left out: their times are never before 1678 or after 2262.
    """
    return [
        name
        for name, type_ in write.columns
        if _TIMESTAMP.search(type_) and not name.lower().startswith(PREFIX)
    ]
