"""Publishing: the one function that writes a range's materializations into Dagster's event log.

A run and a sensor tick both call it; they differ only in how an event is written (`emit`). The
event comes first, its `published` row second. Whoever finds an event without the row (a run was
killed between the two) writes only the row, so that a range is published once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import dagster as dg

from deltaforge_dagster.assets.names import asset_key, partition_key, partitions_name
from deltaforge_dagster.pipeline.publication import Publication, Value, pending
from deltaforge_dagster.state.store import StateStore

Emit = Callable[[dg.AssetMaterialization], None]


def publish(instance: dg.DagsterInstance, store: StateStore, pipeline: str, emit: Emit) -> int:
    """Publish what is due, ranges in order; return how many materializations were written."""
    written = 0
    for publication in pending(store, pipeline):
        add_partition(instance, pipeline, publication.range)
        if not _is_recorded(instance, pipeline, publication):
            emit(materialization(pipeline, publication))
            written += 1
        store.mark_published(pipeline, publication.range, publication.asset)
    return written


def add_partition(instance: dg.DagsterInstance, pipeline: str, number: int) -> None:
    """Make a range known to Dagster as a partition; harmless when it is."""
    instance.add_dynamic_partitions(partitions_name(pipeline), [partition_key(number)])


def materialization(
    pipeline: str, publication: Publication, more: Mapping[str, Value] | None = None
) -> dg.AssetMaterialization:
    """Return the event for a publication, with further metadata if given."""
    return dg.AssetMaterialization(
        asset_key=asset_key(pipeline, publication.asset),
        partition=partition_key(publication.range),
        metadata={**publication.metadata, **(more or {})},
    )


def recorded(
    instance: dg.DagsterInstance, pipeline: str, asset: str, number: int
) -> dg.AssetMaterialization | None:
    """Return the newest materialization of a range in Dagster's event log, if there is one."""
    found = instance.fetch_materializations(
        dg.AssetRecordsFilter(
            asset_key=asset_key(pipeline, asset), asset_partitions=[partition_key(number)]
        ),
        limit=1,
    )
    return found.records[0].asset_materialization if found.records else None


def _is_recorded(instance: dg.DagsterInstance, pipeline: str, publication: Publication) -> bool:
    """Whether the event is there, and not one of another range that once had this number.

    Numbers begin again when somebody deletes the state store and keeps Dagster's.
    """
    event = recorded(instance, pipeline, publication.asset, publication.range)
    if event is None:
        return False
    hashed = event.metadata.get("content_hash")
    return hashed is not None and hashed.value == publication.metadata["content_hash"]
