"""Requests that tables of a sink are loaded again; `delivery` carries it out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.sinks.tables.config import TableSinkConfig
from deltaforge_dagster.sources.base import Source
from deltaforge_dagster.sources.snapshot import SnapshotSource
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.state.table_commits import Destination


def request_resync(
    store: StateStore, loaded: LoadedPipeline, sink: str, tables: Collection[str] = ()
) -> Sequence[str]:
    """Request that tables of a sink are recreated and loaded through a snapshot.

    The run that is live begins it, otherwise the next one. After the snapshot's rows, the tables
    get the changes that follow.

    Args:
        store: The state store.
        loaded: The pipeline, registered with its file.
        sink: The sink, which keeps tables.
        tables: Full names of the source's tables; empty for all that the sink has written or tried
            to.

    Returns:
        Full names of the source's tables.

    Raises:
        NotAllowed: There is no such sink or table, the sink writes no tables, or a resync of one of
            them has begun.
        TableRejected: The sink cannot have such a table.
    """
    resynced = resynced_tables(store, loaded, sink, tables)
    if not resynced:
        raise NotAllowed(f"pipeline {loaded.name!r}: sink {sink!r} has no tables yet")
    store.table_commits.resync(loaded.name, sink, resynced)
    return sorted(resynced.values())


def resynced_tables(
    store: StateStore, loaded: LoadedPipeline, sink: str, tables: Collection[str] = ()
) -> Mapping[Destination, str]:
    """Return the tables that a resync loads again: names of the source's tables by destination.

    Raises:
        NotAllowed: There is no such sink or table, or the sink writes no tables.
        TableRejected: The sink cannot have such a table.
    """
    config = _config(loaded, sink)
    destinations: dict[str, Destination] = {}
    for history in store.schemas.histories(loaded.name):
        table = history.newest.table
        if not tables or history.name in tables:
            destinations[history.name] = config.name_of(table.db, table.schema, table.table)
    unknown = sorted(set(tables) - destinations.keys())
    if unknown:
        raise NotAllowed(
            f"pipeline {loaded.name!r}: nothing was captured of a table {unknown[0]!r} yet; write "
            "full names, such as public.orders"
        )
    if not tables:
        written = _used_destinations(store, loaded.name, sink)
        destinations = {
            name: destination
            for name, destination in destinations.items()
            if destination in written
        }
    return {destination: name for name, destination in destinations.items()}


def check_loadable(loaded: LoadedPipeline, source: Source) -> None:
    """Check that a source has snapshots, without which recreated tables would stay empty.

    Raises:
        NotAllowed: It has none.
    """
    if not isinstance(source, SnapshotSource):
        raise NotAllowed(f"pipeline {loaded.name!r}: its source knows no snapshots")


def _config(loaded: LoadedPipeline, sink: str) -> TableSinkConfig:
    """Return the options of a sink that writes tables."""
    configs = {sink_spec.config.id: sink_spec.config for sink_spec in loaded.spec.spec.sinks}
    if sink not in configs:
        raise NotAllowed(
            f"pipeline {loaded.name!r} has no sink {sink!r} (there is: {', '.join(configs)})"
        )
    config = configs[sink]
    if not isinstance(config, TableSinkConfig):
        raise NotAllowed(
            f"sink {sink!r} writes no tables; to send rows of a table again: deltaforge snapshot "
            f"start {loaded.name} --tables TABLE --sinks {sink}"
        )
    return config


def _used_destinations(store: StateStore, pipeline: str, sink: str) -> set[Destination]:
    """Return the tables that a sink has written, and those that are suspended."""
    commits = store.table_commits.read(pipeline, sink)
    written = {
        stored.write.destination
        for stored in store.table_commits.tables(pipeline)
        if stored.sink == sink
    }
    return written | (set() if commits is None else set(commits.suspended))
