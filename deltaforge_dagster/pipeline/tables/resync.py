"""Requests that tables of a sink are loaded again; `delivery` does it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.sinks.tables.config import TableSinkConfig
from deltaforge_dagster.state.lake_commits import Destination
from deltaforge_dagster.state.store import StateStore


def request_resync(
    store: StateStore, loaded: LoadedPipeline, sink: str, tables: Collection[str] = ()
) -> Sequence[str]:
    """Request that tables of a sink are recreated, and get the source's rows through a snapshot, then what follows.

    The next run begins it, or the one that is live.

    Args:
        store: The state store.
        loaded: The pipeline, registered with its file.
        sink: The sink, which keeps tables.
        tables: Full names of the source's tables; empty for all that the sink has written or tried to.

    Returns:
        Full names of the source's tables.

    Raises:
        NotAllowed: There is no such sink or table, the sink writes no tables, or a resync of one of them has begun.
        TableRejected: The sink cannot have such a table.
    """
    known = resynced_tables(store, loaded, sink, tables)
    if not known:
        raise NotAllowed(f"pipeline {loaded.name!r}: sink {sink!r} has no tables yet")
    store.lake_commits.resync(loaded.name, sink, known)
    return sorted(known.values())


def resynced_tables(
    store: StateStore, loaded: LoadedPipeline, sink: str, tables: Collection[str] = ()
) -> Mapping[Destination, str]:
    """Return the tables that a resync of a sink loads again: full names of the source's tables by destination.

    Raises:
        NotAllowed: There is no such sink or table, or the sink writes no tables.
        TableRejected: The sink cannot have such a table.
    """
    config = _config(loaded, sink)
    known: dict[str, Destination] = {}
    for history in store.schemas.histories(loaded.name):
        table = history.newest.table
        if not tables or history.name in tables:
            known[history.name] = config.name_of(table.db, table.schema, table.table)
    unknown = sorted(set(tables) - known.keys())
    if unknown:
        raise NotAllowed(
            f"pipeline {loaded.name!r}: nothing was captured of a table {unknown[0]!r} yet; write full names, "
            "such as public.orders"
        )
    if not tables:
        there = _there(store, loaded.name, sink)
        known = {name: one for name, one in known.items() if one in there}
    return {one: name for name, one in known.items()}


def _config(loaded: LoadedPipeline, sink: str) -> TableSinkConfig:
    """Return the options of a sink that writes tables."""
    found = {one.config.id: one.config for one in loaded.spec.spec.sinks}
    if sink not in found:
        raise NotAllowed(
            f"pipeline {loaded.name!r} has no sink {sink!r} (there is: {', '.join(found)})"
        )
    config = found[sink]
    if not isinstance(config, TableSinkConfig):
        raise NotAllowed(
            f"sink {sink!r} writes no tables; to send rows of a table again: deltaforge snapshot start "
            f"{loaded.name} --tables TABLE --sinks {sink}"
        )
    return config


def _there(store: StateStore, pipeline: str, sink: str) -> set[Destination]:
    """Return the tables that a sink has written, and those that are held."""
    commits = store.lake_commits.read(pipeline, sink)
    written = {
        one.write.destination for one in store.lake_commits.tables(pipeline) if one.sink == sink
    }
    return written | (set() if commits is None else set(commits.held))
